"""The reward `format`: exact match with scores for a well-formed episode."""

from srl.plugins import hookimpl


@hookimpl
def srl_rewards(register):
    register(
        "format",
        "srl_format.reward:FormatReward",
        "exact match with Search-R1's scores for a well-formed episode",
        options="srl_format.reward:Options",
    )
