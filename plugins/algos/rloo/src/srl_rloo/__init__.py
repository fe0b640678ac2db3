"""RLOO: the other samples of the question are the baseline."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    summary = "RLOO: the other samples of the question are the baseline"
    register("rloo", "srl_rloo.estimator:algorithm", summary)
