"""REINFORCE: the return itself, with no baseline unless asked for."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    register(
        "reinforce",
        "srl_reinforce.estimator:algorithm",
        "REINFORCE: the return itself, with no baseline unless asked for",
        options="srl_reinforce.estimator:Options",
    )
