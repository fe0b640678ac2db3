"""Checkpoints: whole or not there, the same when they come back, and never another model's."""

from __future__ import annotations

import json
import pickle
import shlex
import subprocess

import pytest
import torch
from tests.training import SETTINGS, tokenizer

from srl import files
from srl.advantage import Algorithm
from srl.config import load_config
from srl.errors import UserError
from srl.files import DamagedError
from srl.models.load import load_model, load_tokenizer
from srl.models.new import new_model
from srl.models.weights import add_lora, model_digest
from srl.train import checkpoint
from srl.train.checkpoint import delete_checkpoints, load_checkpoint, save_checkpoint
from srl.train.learner import Learner
from srl.train.resume import resume_command, without_damaged
from srl.train.run_directory import checkpoint_path, checkpoints, superseded_checkpoints
from srl.update.critic import Critic
from srl.update.kl import AdaptiveKL
from srl.update.optimiser import Optimiser, schedule

ABOUT = {"template": "tiny", "search": True, "index_digest": "abc"}


def learner(*, width=16, critic=True, dtype=torch.float32, lora=0, critic_lora=0, seed=0):
    config = load_config(None, None, "ppo", SETTINGS).config
    sizes = {"vocab_size": len(tokenizer()), "layers": 1, "heads": 2, "ffn": 16, "max_length": 64}
    actor = new_model("qwen2", width=width, seed=seed, **sizes).to(dtype)
    if lora:
        torch.manual_seed(seed)
        add_lora(actor, lora)
    control = AdaptiveKL(0.25, target=0.1, horizon=10)
    made = Critic(actor, lora_rank=critic_lora) if critic else None
    return Learner(config, Algorithm("none", lambda **_: None), actor, None, made, control)


def optimisers(them):
    networks = {"actor": them.actor} | ({"critic": them.critic} if them.critic is not None else {})
    return {
        name: Optimiser(network.parameters(), lr=1e-2, schedule=schedule("cosine", 2, 10))
        for name, network in networks.items()
    }


def take_steps(them, those, count=3):
    """Steps with gradients that depend on the weights, so that any difference grows."""
    networks = {"actor": them.actor, "critic": them.critic}
    for _ in range(count):
        for name, optimiser in those.items():
            for weight in networks[name].parameters():
                if weight.requires_grad:
                    weight.grad = torch.sin(7 * weight.detach()) + 0.1
            optimiser.step()


def save(run, them, those, step=3, **state):
    path = checkpoint_path(run, step)
    is_first = not checkpoints(run)
    save_checkpoint(path, them, tokenizer(), those, state, {"step": step, **ABOUT}, is_first=is_first)
    return path


def weights(them):
    found = {f"actor.{name}": value for name, value in them.actor.state_dict().items()}
    return found | (
        {f"critic.{name}": value for name, value in them.critic.state_dict().items()} if them.critic else {}
    )


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lora", "critic_lora"), [(0, 0), (0, 4), (4, 0), (4, 2)])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path, dtype, lora, critic_lora):
    kinds = {"dtype": dtype, "lora": lora, "critic_lora": critic_lora}
    them = learner(**kinds)
    those = optimisers(them)
    take_steps(them, those)
    path = save(tmp_path, them, those, kl={"coef": 0.5})
    saved = {name: value.clone() for name, value in weights(them).items()}
    take_steps(them, those)
    again = learner(**kinds)
    resumed = optimisers(again)
    assert load_checkpoint(path, again, resumed) == {"kl": {"coef": 0.5}}
    assert_equal(weights(again), saved)
    take_steps(again, resumed)
    assert_equal(weights(again), weights(them))


def test_a_checkpoint_is_a_model_directory(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    loaded = load_model(path)
    assert_equal(dict(loaded.state_dict()), dict(them.actor.state_dict()))
    assert loaded.generation_config.stop_strings == ["</search>", "</answer>"]
    assert json.loads((path / "srl.json").read_text()) == {"format": 1, "step": 3, **ABOUT, "manifest": True}
    assert model_digest(path) == model_digest(them.actor)
    text = "<think> I think velmar </think> <search> velmar flag </search>"
    tokens, _ = load_tokenizer(path)
    assert tokens.encode(text) == tokenizer().encode(text), "word for word, and not as Qwen2's own"
    assert tokens.decode(tokens.encode(text)) == text


def test_an_adapter_is_saved_by_itself_and_merged(tmp_path):
    them = learner(lora=4, critic=False)
    those = optimisers(them)
    take_steps(them, those)
    path = save(tmp_path, them, those)
    kept = torch.load(path / "trainer" / "actor.pt", weights_only=True)
    assert kept.keys()
    assert all("lora_" in name for name in kept)
    merged = load_model(path)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, them.actor(ids).logits)
        assert not torch.allclose(merged(ids).logits, learner(critic=False).actor(ids).logits, atol=1e-2)
    assert (path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("lora", [0, 4])
def test_the_first_checkpoint_of_a_run_that_is_not_the_trained_model_is_refused(tmp_path, monkeypatch, lora):
    them = learner(lora=lora, critic=False)
    those = optimisers(them)
    take_steps(them, those)
    path, whole = save(tmp_path / "right", them, those), checkpoint.save_model

    def lose_what_was_trained(model, tokenizer, directory):
        whole(learner(critic=False).actor, tokenizer, directory)

    monkeypatch.setattr(checkpoint, "save_model", lose_what_was_trained)
    with pytest.raises(UserError):
        save(tmp_path / "wrong", them, those)
    assert not checkpoints(tmp_path / "wrong")
    assert path.is_dir()


def test_loading_a_checkpoint_anew_changes_nothing_of_the_run(tmp_path):
    them = learner(lora=4)
    those = optimisers(them)
    take_steps(them, those)
    before, state = {name: value.clone() for name, value in weights(them).items()}, torch.get_rng_state()
    modes = [module.training for module in them.actor.modules()]
    save(tmp_path, them, those)
    assert_equal(weights(them), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in them.actor.modules()] == modes


@pytest.mark.parametrize(
    ("broken", "error"), [("save_model", KeyboardInterrupt), ("write_json", RuntimeError)]
)
def test_a_checkpoint_that_was_not_finished_is_not_there(tmp_path, monkeypatch, broken, error):
    them = learner()
    those = optimisers(them)
    older = save(tmp_path, them, those, step=2)

    def breaking(*arguments, **named):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, broken, breaking)
        with pytest.raises(error):
            save(tmp_path, them, those, step=3)
    assert list(checkpoints(tmp_path).values()) == [older]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002"]
    load_checkpoint(older, learner(), optimisers(learner()))


@pytest.mark.parametrize(("keep", "val_em", "kept"), [
    (2, None, [11, 12]), (None, None, [1, 2, 10, 11, 12]), (1, {1: 0.25, 2: 0.5, 10: 0.5, 12: 0.0}, [2, 12]),
])  # fmt: skip
def test_the_newest_are_kept_and_the_first_of_the_best(tmp_path, keep, val_em, kept):
    for step in (1, 2, 10, 11, 12):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-3").mkdir()
    (tmp_path / "checkpoints" / ".step-000003.tmp-host-1-0a1b2c3d").mkdir()
    delete_checkpoints(tmp_path, superseded_checkpoints(tmp_path, keep, val_em=val_em))
    assert list(checkpoints(tmp_path)) == kept


def test_an_old_checkpoint_is_out_of_sight_before_it_is_removed(tmp_path, monkeypatch):
    """A process killed while it removes one leaves no half of it under its name. What it was writing goes
    too, but nothing that only has such a name."""
    mine = {f".step-000007.tmp-host-1-0a1b2c3{n}": files.MARK if n == "d" else "thesis" for n in "de"}
    for name, file in (mine | {".step-1.dropped": "thesis", "step-000001": "weights"}).items():
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / file).touch()

    def dying(path, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", dying)
        with pytest.raises(KeyboardInterrupt):
            delete_checkpoints(tmp_path, checkpoints(tmp_path).values())
    assert not checkpoints(tmp_path)
    delete_checkpoints(tmp_path, [])
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [".step-000007.tmp-host-1-0a1b2c3e", ".step-1.dropped"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    wider = learner(width=32)
    with pytest.raises(UserError, match=r"not a checkpoint of this run: model\.embed_tokens"):
        load_checkpoint(path, wider, optimisers(wider))
    adapted = learner(lora=4)
    with pytest.raises(UserError, match=r"not a checkpoint of this run: .*actor\.pt"):
        load_checkpoint(path, adapted, optimisers(adapted))
    of_adapter = save(tmp_path, adapted, optimisers(adapted), step=4)
    with pytest.raises(UserError, match="not a checkpoint of this run"):
        load_checkpoint(of_adapter, them, optimisers(them))


def test_what_is_not_there_or_of_another_format_is_refused(tmp_path):
    alone, both = learner(critic=False), learner()
    path = save(tmp_path, alone, optimisers(alone))
    with pytest.raises(UserError, match=r"not a checkpoint of this run: .*critic\.pt"):
        load_checkpoint(path, both, optimisers(both))
    state = path / "trainer" / "state.json"
    (path / "manifest.json").unlink()
    (path / "srl.json").write_text(json.dumps({"format": 1}))
    state.write_text(json.dumps({"format": 2}))
    with pytest.raises(UserError, match="format 2"):
        load_checkpoint(path, alone, optimisers(alone))
    state.unlink()
    with pytest.raises(UserError, match="no trainer state"):
        load_checkpoint(path, alone, optimisers(alone))


def test_a_checkpoint_that_lost_its_manifest_is_refused(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    (path / "manifest.json").unlink()
    for load in (lambda: load_checkpoint(path, learner(), optimisers(learner())), lambda: load_model(path)):
        with pytest.raises(DamagedError, match=r"manifest\.json is missing"):
            load()
    (path / "srl.json").write_text("{")
    with pytest.raises(DamagedError, match=r"srl\.json is damaged"):
        load_checkpoint(path, learner(), optimisers(learner()))


def spoil(file):
    """Other bytes in the middle half, as a disk or a copy leaves them: sizes and ends stay."""
    content = bytearray(file.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter] = b"\x7f" * (2 * quarter)
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "trainer/actor-optimiser.pt",
        "trainer/critic.pt",
        "model.safetensors",
        "trainer/state.json",
        "srl.json",
    ],
)
def test_no_file_of_a_checkpoint_is_damaged_unnoticed(tmp_path, name):
    them, again = learner(), learner()
    those = optimisers(them)
    path = save(tmp_path, them, those, step=10)
    spoil(path / name)
    with pytest.raises(DamagedError, match=f"{name} is damaged"):
        load_checkpoint(path, again, optimisers(again))
    (path / name).unlink()
    if name != "trainer/state.json":
        with pytest.raises(DamagedError, match=f"{name} is missing"):
            load_checkpoint(path, again, optimisers(again))


class Command:
    """A pickle of this would run a command."""

    def __reduce__(self):
        return exit, (3,)


@pytest.mark.parametrize("content", [b"", pickle.dumps(Command()), b"garbage"])
def test_weights_are_read_as_data_only(tmp_path, content):
    file = tmp_path / "checkpoint" / "critic.pt"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(DamagedError) as said:
        checkpoint._load(file)
    assert "\n" not in str(said.value)


def test_a_broken_newest_checkpoint_says_how_to_go_on_from_the_one_before(tmp_path):
    run = tmp_path / "my run"
    them = learner()
    those = optimisers(them)
    for step in (1, 2):
        save(run, them, those, step=step)
    spoil(checkpoint_path(run, 2) / "trainer" / "critic.pt")
    with pytest.raises(DamagedError) as said, without_damaged(checkpoint_path(run, 2)):
        load_checkpoint(checkpoint_path(run, 2), learner(), optimisers(learner()))
    first, _, second = str(said.value).rpartition("type: ")[2].partition(" && ")
    assert second == resume_command(run)
    subprocess.run(shlex.split(first), check=True)
    assert load_checkpoint(max(checkpoints(run).values()), learner(), optimisers(learner())) == {}
