"""REINFORCE: the return, without a baseline by default."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    register(
        "reinforce",
        "srl_reinforce.estimator:algorithm",
        "REINFORCE: the return, without a baseline by default",
        options="srl_reinforce.estimator:Options",
    )
