"""REINFORCE and REINFORCE++: the return, without a baseline or whitened over the batch."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    register(
        "reinforce",
        "srl_reinforce.estimator:reinforce",
        "REINFORCE: the return, without a baseline by default",
        options="srl_reinforce.estimator:Options",
    )
    for name in ("reinforce_plus_plus", "reinforce++"):
        summary = "REINFORCE++: returns-to-go, whitened over the batch"
        register(name, "srl_reinforce.estimator:reinforce_plus_plus", summary)
