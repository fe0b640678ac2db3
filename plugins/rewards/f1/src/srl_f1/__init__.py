"""The reward `f1`: word F1 of the answer against the closest golden answer."""

from srl.plugins import hookimpl


@hookimpl
def srl_rewards(register):
    register("f1", "srl_f1.reward:WordF1", "word F1 of the answer against the closest golden answer")
