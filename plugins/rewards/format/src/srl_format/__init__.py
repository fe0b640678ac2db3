"""The rewards `format` (exact match with scores for the form) and `evidence` (retrieval credit)."""

from srl.plugins import hookimpl


@hookimpl
def srl_rewards(register):
    register(
        "format",
        "srl_format.reward:FormatReward",
        "exact match with Search-R1's scores for a well-formed episode",
        options="srl_format.reward:Options",
    )
    register(
        "evidence",
        "srl_format.evidence:Evidence",
        "the share of the gold passages that searches showed, credited turn by turn",
    )
