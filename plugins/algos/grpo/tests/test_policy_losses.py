"""GSPO and CISPO: what they set, and the combinations that a run refuses."""

import pytest
from torch.testing import assert_close

from srl.config import load_config
from srl.errors import UserError
from srl.testing import check_algorithm
from srl.testing.algorithms import batch
from srl_grpo.estimator import cispo, estimate, gspo


@pytest.mark.parametrize("make", [gspo, cispo])
def test_the_advantages_are_grpos(make):
    given = batch()
    assert_close(make().estimator(**given).advantages, estimate(**given).advantages)
    check_algorithm(make().name)


def test_gspo_clips_sequences_as_its_paper():
    actor = load_config(algo="gspo").config.actor
    assert actor.policy_loss.loss_mode == "gspo"
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (3e-4, 4e-4)
    assert (actor.loss_agg_mode, actor.use_kl_loss) == ("seq-mean-token-mean", False)


def test_cispo_has_no_lower_bound():
    actor = load_config(algo="cispo").config.actor
    assert (actor.policy_loss.loss_mode, actor.clip_ratio_low) == ("cispo", 1.0)


def test_another_loss_than_the_algorithms_own_is_refused():
    with pytest.raises(UserError, match=r"actor\.policy_loss\.loss_mode"):
        load_config(algo="gspo", sets=["actor.policy_loss.loss_mode=vanilla"])
