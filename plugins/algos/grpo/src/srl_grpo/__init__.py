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
    for name, summary in (
        ("gspo", "GSPO: GRPO's advantages, and a clipped ratio for each sequence"),
        ("cispo", "CISPO: GRPO's advantages, and clipped weights of tokens"),
    ):
        register(name, f"srl_grpo.policy_losses:{name}", summary, options="srl_grpo.estimator:Options")
