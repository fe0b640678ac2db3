"""Rewards that are models: `rm`, a sequence classifier, and `judge`, a language model behind a server."""

from srl.plugins import hookimpl


@hookimpl
def srl_rewards(register):
    register(
        "rm",
        "srl_reward_models.rm:ModelReward",
        "the score of a reward model, a Hugging Face sequence classifier",
        options="srl_reward_models.rm:Options",
    )
    register(
        "judge",
        "srl_reward_models.judge:JudgeReward",
        "the verdict of a language model behind a server with OpenAI's API",
        options="srl_reward_models.judge:Options",
    )
