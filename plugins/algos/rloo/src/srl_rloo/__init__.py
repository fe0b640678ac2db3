"""RLOO: the mean of the question's other samples is the baseline."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    summary = "RLOO: the mean of the question's other samples is the baseline"
    register("rloo", "srl_rloo.estimator:algorithm", summary)
    register("turn_rloo", "srl_rloo.turns:algorithm", "RLOO with a baseline for each turn: turn-level credit")
