"""REINFORCE++: returns whitened over the whole batch, under two names."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    summary = "REINFORCE++: returns-to-go, whitened over the batch"
    for name in ("reinforce_plus_plus", "reinforce++"):
        register(name, "srl_reinforce_plus_plus.estimator:algorithm", summary)
