"""The learning rate of verl's optimisers is that of the local engine, update by update."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import config

from srl.config import save_config
from srl.model import save_model
from srl.train.setup import Policy, load_learner, load_optimisers
from srl.train.verl.schedule import VERLS_OWN, our_schedule


class Optim(SimpleNamespace):
    """verl's section about an optimiser, with the defaults of its file."""

    lr_warmup_steps = 0
    lr_warmup_steps_ratio = 0.0
    lr_scheduler_type = "constant"
    min_lr_ratio = 0.0
    num_cycles = 0.5


@pytest.fixture
def run(tmp_path, monkeypatch):
    save_model(tiny_model(), byte_level_tokenizer(), tmp_path / "model")
    monkeypatch.setenv("SRL_VERL_RUN", str(tmp_path))
    return tmp_path


def settings(run, **given):
    """Three training steps of two updates of the actor and four of the critic, saved with the run."""
    chosen = config(
        run, "ppo", trainer__total_training_steps=3, data__train_batch_size=4, critic__ppo_epochs=2, **given
    )
    save_config(run, chosen)
    return chosen


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


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("network", "updates"), [("actor", 6), ("critic", 12)])
def test_every_update_has_the_rate_of_the_local_engine(run, kind, network, updates):
    changes = {f"{network}__optim__lr_scheduler_type": kind, f"{network}__optim__lr_warmup_steps": 1}
    chosen = settings(run, **changes)
    learner = load_learner(chosen, Policy(tiny_model(), None))
    local = load_optimisers(chosen, learner)[network]
    theirs = optimiser()
    told = "constant" if kind == "linear" else kind
    model_type = "value_model" if network == "critic" else "language_model"
    found = our_schedule(engine(model_type, lr_warmup_steps=1, lr_scheduler_type=told), theirs)
    expected = []
    for _ in range(updates):
        expected.append(local.lr)
        local.step()
    assert rates(theirs, updates) == pytest.approx(expected)
    assert found.used == pytest.approx(expected[-1])


def test_rate_goes_on_after_a_resume(run):
    settings(run, actor__optim__lr_scheduler_type="linear")
    whole = optimiser()
    our_schedule(engine(), whole)
    expected = rates(whole, 6)
    first, second = optimiser(), optimiser()
    before, after = our_schedule(engine(), first), our_schedule(engine(), second)
    rates(first, 4)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert rates(second, 2) == pytest.approx(expected[4:])


def test_what_the_section_verl_says_of_a_schedule_wins(run):
    settings(run, actor__optim__lr_scheduler_type="linear")
    one = optimiser()
    our_schedule(engine(lr_scheduler_type="cosine", lr_warmup_steps=1, total_training_steps=5), one)
    assert rates(one, 3) == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert our_schedule(engine(min_lr_ratio=0.1), optimiser()) is None
    assert our_schedule(engine(num_cycles=1.0), optimiser()) is None


def test_scheduler_moves_with_its_optimiser_only(run):
    settings(run, actor__optim__lr_scheduler_type="linear")
    one = optimiser()
    made = our_schedule(engine(), one)
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
    assert {name: found[name] in usual for name, usual in VERLS_OWN.items()} == dict.fromkeys(VERLS_OWN, True)
