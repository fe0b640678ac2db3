"""GSPO and CISPO: GRPO's advantages under another loss of the policy."""

from __future__ import annotations

from functools import partial

from srl.advantage import Algorithm
from srl_grpo.estimator import Options, estimate


def gspo(options: Options | None = None) -> Algorithm:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, section 5.1): a ratio for each sequence, clipped closely.

    The clip ranges are the paper's. It has no KL term.
    """
    return _of("gspo", options, {
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
        "actor.loss_agg_mode": "seq-mean-token-mean",
    })  # fmt: skip


def cispo(options: Options | None = None) -> Algorithm:
    """CISPO (MiniMax 2025, arXiv 2506.13585, section 3.1): no token is clipped away, only its weight.

    The weight has no lower bound, as in the paper, which gives no number for the upper one.
    """
    return _of("cispo", options, {
        "actor.clip_ratio_low": 1.0,
        "actor.clip_ratio_high": 4.0,
        "actor.loss_agg_mode": "token-mean",
    })  # fmt: skip


def _of(name: str, options: Options | None, settings: dict[str, object]) -> Algorithm:
    defaults: dict[str, object] = {
        "rollout.n": 5,
        "algorithm.use_kl_in_reward": False,
        "actor.use_kl_loss": False,
        "actor.policy_loss.loss_mode": name,
    }
    return Algorithm(
        name=name,
        estimator=partial(estimate, **(options or Options()).model_dump()),
        defaults=defaults | settings,
        requires={"actor.policy_loss.loss_mode": (name,)},
    )
