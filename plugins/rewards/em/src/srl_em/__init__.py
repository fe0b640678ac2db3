"""The reward `em`: 1 for an answer that equals a golden answer, else 0."""

from srl.plugins import hookimpl


@hookimpl
def srl_rewards(register):
    register("em", "srl_em.reward:ExactMatch", "1 if the normalised answer equals a golden answer, else 0")
