"""Algorithms that compare the samples of a question: GRPO, GSPO, CISPO, RLOO, and RLOO by turns."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    for name, summary in (
        ("grpo", "GRPO: the score relative to the group's mean, in standard deviations"),
        ("gspo", "GSPO: GRPO's advantages, and a clipped ratio for each sequence"),
        ("cispo", "CISPO: GRPO's advantages, and clipped weights of tokens"),
    ):
        register(name, f"srl_grpo.estimator:{name}", summary, options="srl_grpo.estimator:Options")
    register("rloo", "srl_grpo.rloo:rloo", "RLOO: the mean of the question's other samples is the baseline")
    register("turn_rloo", "srl_grpo.turns:turn_rloo", "RLOO with a baseline for each turn: turn-level credit")
