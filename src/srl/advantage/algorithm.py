"""The type that an algorithm plugin returns, and the type that its estimator returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Advantages(NamedTuple):
    """Both are 0 where the mask is 0 and on rows with `valid` 0.

    `returns` are a critic's targets; without a critic, the values that the advantages were made from.
    """

    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T)


@dataclass(frozen=True)
class Algorithm:
    """An estimator and the default settings of its method.

    The estimator is a pure function, called with keywords only:

        estimator(token_level_rewards=(B, T), response_mask=(B, T), group_ids=(B,), valid=(B,),
                  values=(B, T) or None, group_size=n, gamma=1.0, lam=1.0, **options) -> Advantages

    Rows with the same `group_ids` answer the same question; `group_size` is `rollout.n`. `defaults` maps
    dotted configuration keys to values, such as `{"actor.use_kl_loss": True}`; a user's settings override
    them. `requires` maps keys to the values that the method works with; a run with another is refused.
    """

    name: str
    estimator: Callable[..., Advantages]
    needs_critic: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    requires: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
