"""From scores to advantages: the tensor functions of which algorithm plugins are made.

Every function is pure and works on whole batches. The mask is 1 on tokens that the policy wrote; values
where it is 0 (padding, retrieved text, even NaN) are never read.
"""

from srl.advantage.algorithm import Advantages, Algorithm
from srl.advantage.groups import group_count, group_mean, group_std, leave_one_out_mean
from srl.advantage.tokens import (
    discounted_returns,
    gae,
    last_policy_token,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    over_tokens,
    score_on_last_token,
    sequence_score,
    valid_mask,
)

__all__ = [
    "Advantages",
    "Algorithm",
    "discounted_returns",
    "gae",
    "group_count",
    "group_mean",
    "group_std",
    "last_policy_token",
    "leave_one_out_mean",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "over_tokens",
    "score_on_last_token",
    "sequence_score",
    "valid_mask",
]
