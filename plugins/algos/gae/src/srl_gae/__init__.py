"""PPO: generalised advantage estimation with a critic."""

from srl.plugins import hookimpl


@hookimpl
def srl_algorithms(register):
    register("ppo", "srl_gae.estimator:ppo", "PPO: a critic and generalised advantage estimation")
