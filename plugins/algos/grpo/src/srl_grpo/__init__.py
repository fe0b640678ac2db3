"""GRPO: the score relative to the group's mean, in standard deviations."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    register(
        "grpo",
        "srl_grpo.estimator:algorithm",
        "GRPO: the score relative to the group's mean, in standard deviations",
        options="srl_grpo.estimator:Options",
    )
