"""The learning rate of verl's optimisers is that of the local backend, update by update."""

from types import SimpleNamespace

import pytest
import torch
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import config

from srl.models.weights import save_model
from srl.train.load_components import LoadedModel
from srl.train.rl import load_learner, load_optimisers
from srl.train.verl.patches import our_schedule


@pytest.fixture
def settings(tmp_path):
    """Three training steps of two updates of the actor and four of the critic."""
    save_model(tiny_model(), byte_level_tokenizer(), tmp_path / "model")
    sizes = {
        "trainer__total_training_steps": 3,
        "data__train_batch_size": 4,
        "critic__ppo_mini_batch_size": 1,
    }
    return lambda **more: config(tmp_path, "ppo", **sizes, **more)


def engine(network="actor", total_training_steps=3):
    return SimpleNamespace(
        optimizer_config=SimpleNamespace(total_training_steps=total_training_steps),
        model_config=SimpleNamespace(model_type="value_model" if network == "critic" else "language_model"),
    )


def optimiser():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)


def rates(stepping, updates, rate=lambda stepping: stepping.param_groups[0]["lr"]):
    """The learning rate of each update."""
    seen = []
    for _ in range(updates):
        seen.append(rate(stepping))
        stepping.step()
    return seen


def local_rates(chosen, network, updates):
    local = load_optimisers(chosen, load_learner(chosen, LoadedModel(tiny_model(), None)))[network]
    return rates(local, updates, lambda local: local.lr)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("network", "updates"), [("actor", 6), ("critic", 12)])
def test_every_update_has_the_rate_of_the_local_backend(settings, kind, network, updates):
    chosen = settings(
        **{f"{network}__optim__lr_scheduler_type": kind, f"{network}__optim__lr_warmup_steps": 1}
    )
    expected, theirs = local_rates(chosen, network, updates), optimiser()
    schedule = our_schedule(chosen, engine(network), theirs)
    assert rates(theirs, updates) == pytest.approx(expected)
    assert schedule.used == pytest.approx(expected[-1])


def test_decay_of_the_actor_begins_when_the_critic_has_warmed_up(settings):
    """Three steps, the first the critic's alone: the actor's four updates fall from 4/4 to 1/4."""
    chosen, theirs = settings(trainer__critic_warmup=1, actor__optim__lr_scheduler_type="linear"), optimiser()
    our_schedule(chosen, engine(total_training_steps=2), theirs)
    assert rates(theirs, 4) == pytest.approx(local_rates(chosen, "actor", 4))
    assert theirs.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("longer", [3, 6])
def test_rate_goes_on_after_a_resume_also_of_a_run_that_got_longer(settings, longer):
    chosen = settings(actor__optim__lr_scheduler_type="linear")
    whole, first, second = optimiser(), optimiser(), optimiser()
    our_schedule(chosen, engine(total_training_steps=longer), whole)
    expected = rates(whole, 6)
    before = our_schedule(chosen, engine(), first)
    after = our_schedule(chosen, engine(total_training_steps=longer), second)
    rates(first, 4)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert rates(second, 2) == pytest.approx(expected[4:])
