"""Rewards that are models: `rm`, a sequence classifier."""

from srl.plugins import hookimpl


@hookimpl
def srl_rewards(register):
    register(
        "rm",
        "srl_reward_models.rm:ModelReward",
        "the score of a reward model, a Hugging Face sequence classifier",
        options="srl_reward_models.rm:Options",
    )
