"""The learning rate of verl's optimisers is that of the local backend, update by update."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import config

from srl.config import load_config
from srl.models.weights import save_model
from srl.train.learning_rate import learning_steps, updates_per_step, warmup_steps
from srl.train.load_components import LoadedModel, load_learner, load_optimisers
from srl.train.verl.schedule import VERL_ONLY, actor_learns_after_the_critic, our_schedule
from srl.update.optimiser import schedule


class Optim(SimpleNamespace):
    """verl's section about an optimiser, with the defaults of its file."""

    lr_warmup_steps = 0
    lr_warmup_steps_ratio = 0.0
    lr_scheduler_type = "constant"
    min_lr_ratio = 0.0
    num_cycles = 0.5


@pytest.fixture
def run(tmp_path):
    save_model(tiny_model(), byte_level_tokenizer(), tmp_path / "model")
    return tmp_path


def settings(run, **given):
    """Three training steps of two updates of the actor and four of the critic."""
    return config(
        run, "ppo", trainer__total_training_steps=3, data__train_batch_size=4, critic__ppo_epochs=2, **given
    )


def engine(model_type="language_model", **asked):
    named = {"total_training_steps": 3, **asked}
    return SimpleNamespace(
        optimizer_config=Optim(**named), model_config=SimpleNamespace(model_type=model_type)
    )


def optimiser(lr=1e-3):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(one, updates):
    """The learning rate of each update."""
    found = []
    for _ in range(updates):
        found.append(one.param_groups[0]["lr"])
        one.step()
    return found


def local_rates(chosen, network, updates):
    """The learning rate of each update of the local backend."""
    local = load_optimisers(chosen, load_learner(chosen, LoadedModel(tiny_model(), None)))[network]
    found = []
    for _ in range(updates):
        found.append(local.lr)
        local.step()
    return found


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("network", "updates"), [("actor", 6), ("critic", 12)])
def test_every_update_has_the_rate_of_the_local_backend(run, kind, network, updates):
    changes = {f"{network}__optim__lr_scheduler_type": kind, f"{network}__optim__lr_warmup_steps": 1}
    chosen = settings(run, **changes)
    expected = local_rates(chosen, network, updates)
    theirs = optimiser()
    told = "constant" if kind == "linear" else kind
    model_type = "value_model" if network == "critic" else "language_model"
    found = our_schedule(chosen, engine(model_type, lr_warmup_steps=1, lr_scheduler_type=told), theirs)
    assert rates(theirs, updates) == pytest.approx(expected)
    assert found.used == pytest.approx(expected[-1])


def planned(total, critic_warmup):
    """The training steps that verl's optimiser of the actor is planned for."""
    optim = SimpleNamespace(total_training_steps=total)
    actor = SimpleNamespace(actor=SimpleNamespace(optim=optim))
    trainer = SimpleNamespace(critic_warmup=critic_warmup)
    actor_learns_after_the_critic(SimpleNamespace(trainer=trainer, actor_rollout_ref=actor))
    return optim.total_training_steps


def test_decay_of_the_actor_begins_when_the_critic_has_warmed_up(run):
    """Three steps, the first the critic's alone: the actor's four updates fall from 4/4 to 1/4."""
    kinds = {f"{network}__optim__lr_scheduler_type": "linear" for network in ("actor", "critic")}
    chosen = settings(run, trainer__critic_warmup=1, **kinds)
    expected = [1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    assert local_rates(chosen, "actor", 4) == pytest.approx(expected)
    assert local_rates(chosen, "critic", 12)[-1] == pytest.approx(1e-3 / 12)
    theirs = optimiser()
    our_schedule(chosen, engine(total_training_steps=planned(total=3, critic_warmup=2)), theirs)
    assert rates(theirs, 4) == pytest.approx(expected)


def test_tiny_ppo_ends_its_decay_with_its_last_update():
    """27 steps of two updates: the last of 54 has 1/54 of 2e-4, about 3.7e-6."""
    chosen = load_config("tiny", None, "ppo").config
    steps, updates = learning_steps(chosen, "actor"), updates_per_step(chosen, chosen.actor)
    assert steps * updates == 54
    factor = schedule(chosen.actor.optim.lr_scheduler_type, warmup_steps(chosen, "actor"), steps * updates)
    assert chosen.actor.optim.lr * factor(53) == pytest.approx(2e-4 / 54)


def test_warm_up_as_a_share_is_of_the_steps_that_the_network_learns(run):
    ratios = {f"{network}__optim__lr_warmup_steps_ratio": 0.5 for network in ("actor", "critic")}
    chosen = settings(run, trainer__critic_warmup=1, **ratios)
    assert (warmup_steps(chosen, "actor"), warmup_steps(chosen, "critic")) == (1, 2)


@pytest.mark.parametrize("critic_warmup", [3, 5])
def test_run_in_which_only_the_critic_learns_has_a_schedule_for_the_actor(run, critic_warmup):
    chosen = settings(
        run, trainer__critic_warmup=critic_warmup, actor__optim__lr_scheduler_type="linear",
        actor__optim__lr_warmup_steps_ratio=0.5,
    )  # fmt: skip
    assert learning_steps(chosen, "actor") == 0
    assert local_rates(chosen, "actor", 1) == [1e-3]
    assert planned(total=3, critic_warmup=critic_warmup + 1) == 1, "Megatron takes no schedule of length 0"


def test_rate_goes_on_after_a_resume(run):
    chosen = settings(run, actor__optim__lr_scheduler_type="linear")
    whole = optimiser()
    our_schedule(chosen, engine(), whole)
    expected = rates(whole, 6)
    first, second = optimiser(), optimiser()
    before, after = our_schedule(chosen, engine(), first), our_schedule(chosen, engine(), second)
    rates(first, 4)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert rates(second, 2) == pytest.approx(expected[4:])


def test_rate_of_a_longer_run_is_that_of_its_new_schedule(run):
    chosen = settings(run, actor__optim__lr_scheduler_type="linear")
    whole = optimiser()
    our_schedule(chosen, engine(total_training_steps=6), whole)
    expected = rates(whole, 6)
    first, second = optimiser(), optimiser()
    before = our_schedule(chosen, engine(), first)
    after = our_schedule(chosen, engine(total_training_steps=6), second)
    rates(first, 4)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert rates(second, 2) == pytest.approx(expected[4:])


def test_what_the_section_verl_says_of_a_schedule_wins(run):
    chosen = settings(run, actor__optim__lr_scheduler_type="linear")
    one = optimiser()
    our_schedule(chosen, engine(lr_scheduler_type="cosine", lr_warmup_steps=1, total_training_steps=5), one)
    assert rates(one, 3) == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert our_schedule(chosen, engine(min_lr_ratio=0.1), optimiser()) is None
    assert our_schedule(chosen, engine(num_cycles=1.0), optimiser()) is None


def test_scheduler_moves_with_its_optimiser_only(run):
    chosen = settings(run, actor__optim__lr_scheduler_type="linear")
    one = optimiser()
    made = our_schedule(chosen, engine(), one)
    assert made.used == one.param_groups[0]["lr"] == 1e-3
    one.step()
    assert made.used == 1e-3
    assert one.param_groups[0]["lr"] == pytest.approx(1e-3 * 5 / 6)


@pytest.mark.slow
@pytest.mark.must_run
def test_schedule_of_verls_file_asks_for_nothing():
    directory = find_spec("verl")
    if directory is None:
        pytest.skip("verl is not installed")
    path = Path(directory.submodule_search_locations[0], "trainer", "config", "optim", "fsdp.yaml")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {name: found[name] in usual for name, usual in VERL_ONLY.items()} == dict.fromkeys(VERL_ONLY, True)
