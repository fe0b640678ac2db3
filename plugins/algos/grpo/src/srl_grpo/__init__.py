"""GRPO: the group's mean is the baseline, its spread the scale."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    register(
        "grpo",
        "srl_grpo.estimator:algorithm",
        "GRPO: the group's mean is the baseline, its spread the scale",
        options="srl_grpo.estimator:Options",
    )
