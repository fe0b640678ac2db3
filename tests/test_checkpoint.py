"""Checkpoints: whole or not there, the same when they come back, and never another model's."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from tests.training import SETTINGS, tokenizer

from srl import files
from srl.advantage import Algorithm
from srl.config import load_config
from srl.errors import UserError
from srl.files import DamagedError, check_checkpoint
from srl.models.load import load_model, load_tokenizer
from srl.models.new import new_model
from srl.models.weights import add_lora, model_digest
from srl.train import checkpoint
from srl.train.checkpoint import (
    Progress,
    load_checkpoint,
    load_newest,
    save_checkpoint,
    save_validated,
)
from srl.train.experience import Learner
from srl.train.resume import checkpoint_notes, resume_command
from srl.train.run_directory import checkpoint_path, checkpoints
from srl.update.critic import Critic
from srl.update.kl import AdaptiveKL
from srl.update.logits import trunk
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


def save(run, them, those, step=3, keep=None, **known):
    progress = Progress(step=step, kl=them.kl_control.state_dict(), **known)
    return save_checkpoint(run, progress, them, tokenizer(), those, ABOUT, keep)


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
    them.kl_control.coef = 0.5
    path = save(tmp_path, them, those, seconds=1.5, val_em_best=0.25, val_em_best_step=2, test_em_start=0.1)
    saved = {name: value.clone() for name, value in weights(them).items()}
    take_steps(them, those)
    again = learner(**kinds)
    resumed = optimisers(again)
    progress = load_checkpoint(path, again, resumed)
    assert_equal(weights(again), saved)
    assert progress == Progress(3, 1.5, 0.1, None, 0.25, 2, {"coef": 0.5})
    assert again.kl_control.coef == 0.5
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


def test_a_checkpoint_has_the_tokenizer_of_the_run(tmp_path):
    """Word for word: transformers would read it as Qwen2's own, which splits and joins otherwise."""
    them = learner()
    loaded, _ = load_tokenizer(save(tmp_path, them, optimisers(them)))
    text = "<think> I think velmar </think> <search> velmar flag </search>"
    ids = tokenizer().encode(text)
    assert loaded.encode(text) == ids
    assert loaded.decode(ids) == text


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


@pytest.mark.parametrize("broken", ["save_model", "write_json", "trained_weights"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_checkpoint_that_was_not_finished_is_not_there(tmp_path, monkeypatch, broken, error):
    them = learner()
    those = optimisers(them)
    older = save(tmp_path, them, those, step=2)

    def breaking(*arguments, **named):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, broken, breaking)
        for step in (2, 3):
            with pytest.raises(error):
                save(tmp_path, them, those, step=step)
    assert list(checkpoints(tmp_path).values()) == [older]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002"]
    load_checkpoint(older, learner(), optimisers(learner()))


def test_what_a_killed_process_left_is_no_checkpoint(tmp_path):
    them = learner()
    older = save(tmp_path, them, optimisers(them), step=2)
    (tmp_path / "checkpoints" / ".step-000003.tmp-host-1-0a1b2c3d").mkdir()
    (tmp_path / "checkpoints" / "step-3").mkdir()
    assert list(checkpoints(tmp_path).values()) == [older]
    assert list(checkpoints(tmp_path / "nowhere").values()) == []


def test_the_newest_are_kept(tmp_path):
    them = learner()
    those = optimisers(them)
    for step in (1, 2, 10, 11):
        save(tmp_path, them, those, step=step, keep=2)
    assert list(checkpoints(tmp_path).values()) == [checkpoint_path(tmp_path, step) for step in (10, 11)]
    save(tmp_path, them, those, step=12)
    assert len(list(checkpoints(tmp_path).values())) == 3, "without a number all are kept"


def validated(run, them, **named):
    progress = Progress(step=3, kl=them.kl_control.state_dict())
    progress.note_validation(0.5, 3)
    save_validated(run, progress, keep=1, **named)


def test_the_validation_of_a_saved_step_changes_its_state_alone(tmp_path):
    them = learner()
    those = optimisers(them)
    take_steps(them, those)
    save(tmp_path, them, those, step=2)
    path = save(tmp_path, them, those, awaits_validation=True)
    before = {file: (file.stat().st_ino, file.read_bytes()) for file in path.rglob("*.*")}
    validated(tmp_path, them)
    assert list(checkpoints(tmp_path)) == [3]
    check_checkpoint(path)
    after = {file: (file.stat().st_ino, file.read_bytes()) for file in path.rglob("*.*")}
    changed = {file.name for file in before.keys() | after.keys() if before.get(file) != after.get(file)}
    assert changed == {"state.json", "manifest.json"}, "the others are links"
    progress = load_checkpoint(path, learner(), optimisers(learner()))
    assert (progress.val_em, progress.awaits_validation) == ({3: 0.5}, False)


def test_a_file_that_somebody_put_into_a_checkpoint_stays_when_its_validation_is_added(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them), awaits_validation=True)
    (path / "model.gguf").write_text("mine")
    validated(tmp_path, them)
    assert (path / "model.gguf").read_text() == "mine"
    assert load_checkpoint(path, learner(), optimisers(learner())).val_em == {3: 0.5}


def test_a_disk_without_links_has_copies(tmp_path, monkeypatch):
    them = learner()
    path = save(tmp_path, them, optimisers(them))

    def refused(*given):
        raise PermissionError

    monkeypatch.setattr(files.os, "link", refused)
    validated(tmp_path, them)
    check_checkpoint(path)
    assert load_checkpoint(path, learner(), optimisers(learner())).val_em == {3: 0.5}


@pytest.mark.parametrize("broken", ["write_json", "write_manifest", "checksums"])
def test_a_checkpoint_whose_validation_was_not_finished_is_as_before(tmp_path, monkeypatch, broken):
    them = learner()
    path = save(tmp_path, them, optimisers(them), awaits_validation=True)

    def breaking(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, broken, breaking)
        with pytest.raises(KeyboardInterrupt):
            validated(tmp_path, them)
    check_checkpoint(path)
    assert load_checkpoint(path, learner(), optimisers(learner())).awaits_validation


@pytest.mark.parametrize(("keep_best", "kept"), [(True, [2, 5]), (False, [5])])
def test_a_collapse_does_not_delete_the_best_checkpoint_also_of_a_resumed_run(tmp_path, keep_best, kept):
    them = learner()
    those, progress = optimisers(them), Progress(kl=them.kl_control.state_dict())
    for step, em in enumerate((0.25, 0.5, 0.5, 0.0, 0.0), start=1):
        progress.step = step
        progress.note_validation(em, step)
        path = save_checkpoint(tmp_path, progress, them, tokenizer(), those, ABOUT, 1, keep_best)
        progress = load_checkpoint(path, them, those)
    assert list(checkpoints(tmp_path)) == kept
    assert (progress.val_em_best, progress.val_em_best_step) == (0.5, 2)


def test_a_checkpoint_of_an_older_version_knows_the_best_step(tmp_path):
    them = learner()
    path = as_older(save(tmp_path, them, optimisers(them), val_em_best=0.25, val_em_best_step=2))
    state = json.loads((path / "trainer" / "state.json").read_text())
    del state["val_em"]
    (path / "trainer" / "state.json").write_text(json.dumps(state))
    assert load_checkpoint(path, them, optimisers(them)).val_em == {2: 0.25}


def test_an_old_checkpoint_is_out_of_sight_before_it_is_removed(tmp_path, monkeypatch):
    """A process killed while it removes one leaves no half of it under its name."""
    them = learner()
    those = optimisers(them)
    save(tmp_path, them, those, step=1, keep=1)

    rmtree = shutil.rmtree

    def dying(path, **named):
        if path.name == "step-000001":
            raise KeyboardInterrupt
        rmtree(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", dying)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, them, those, step=2, keep=1)
    assert [path.name for path in list(checkpoints(tmp_path).values())] == ["step-000002"]
    save(tmp_path, them, those, step=3, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_a_step_is_deleted_twice_where_an_open_file_keeps_the_first(tmp_path, monkeypatch):
    """As NFS does. A run that is rolled back makes the same step again."""
    them = learner()
    those = optimisers(them)
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda path, **named: None)
        for _ in range(2):
            checkpoint.delete_checkpoints(tmp_path, [save(tmp_path, them, those, step=1)])
    assert not checkpoints(tmp_path)
    checkpoint.delete_checkpoints(tmp_path, [])
    assert not list((tmp_path / "checkpoints").iterdir())


def test_what_a_killed_process_was_writing_goes_with_the_next_checkpoint(tmp_path):
    """Also of another step and another host; but nothing that only has such a name."""
    them = learner()
    mine = {f".step-000007.tmp-host-1-0a1b2c3{n}": files.MARK if n == "d" else "thesis" for n in "de"}
    for name, file in (mine | {".step-1.dropped": "thesis"}).items():
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / file).touch()
    save(tmp_path, them, optimisers(them), step=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [".step-000007.tmp-host-1-0a1b2c3e", ".step-1.dropped", "step-000003"]


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
    with pytest.raises(UserError, match="not in both the model and the checkpoint"):
        load_checkpoint(of_adapter, them, optimisers(them))


def test_a_checkpoint_with_the_critic_of_older_versions_says_how_to_go_on(tmp_path):
    """It was a copy of the policy's trunk with its adapter, and all of that was trained."""
    them = learner(lora=4)
    path = save(tmp_path, them, optimisers(them))
    older = {f"decoder.{name}": value for name, value in trunk(them.actor).named_parameters()}
    torch.save(older, path / "trainer" / "critic.pt")
    with pytest.raises(UserError, match=r"older version's, .*: srl train --model \S+step-000003$"):
        load_checkpoint(as_older(path), them, optimisers(them))


def test_a_checkpoint_without_the_critic_is_refused(tmp_path):
    alone = learner(critic=False)
    path = save(tmp_path, alone, optimisers(alone))
    both = learner()
    with pytest.raises(UserError, match=r"not a checkpoint of this run: .*critic\.pt"):
        load_checkpoint(path, both, optimisers(both))


def test_a_model_directory_is_not_a_checkpoint_to_resume_from(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    (path / "trainer" / "state.json").unlink()
    with pytest.raises(UserError, match="no trainer state"):
        load_checkpoint(path, them, optimisers(them))


def test_a_newer_format_is_refused(tmp_path):
    them = learner()
    path = as_older(save(tmp_path, them, optimisers(them)))
    state = path / "trainer" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 2}))
    with pytest.raises(UserError, match="format 2"):
        load_checkpoint(path, them, optimisers(them))


def test_saving_a_step_again_replaces_it(tmp_path):
    them = learner()
    those = optimisers(them)
    path = save(tmp_path, them, those)
    take_steps(them, those)
    assert save(tmp_path, them, those) == path
    stored = load_file(path / "model.safetensors")
    assert torch.equal(stored["model.norm.weight"], them.actor.model.norm.weight)
    assert list(checkpoints(tmp_path).values()) == [path]


def as_older(path):
    """Make a checkpoint one of a version that kept no checksums."""
    (path / "manifest.json").unlink()
    known = json.loads((path / "srl.json").read_text())
    (path / "srl.json").write_text(json.dumps({key: known[key] for key in known if key != "manifest"}))
    return path


def test_a_checkpoint_that_lost_its_manifest_is_refused(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    (path / "manifest.json").unlink()
    for load in (lambda: load_checkpoint(path, learner(), optimisers(learner())), lambda: load_model(path)):
        with pytest.raises(DamagedError, match=r"manifest\.json is missing.*before it is none"):
            load()
    (path / "srl.json").write_text("{")
    with pytest.raises(DamagedError, match=r"srl\.json is damaged"):
        load_checkpoint(path, learner(), optimisers(learner()))


def test_a_checkpoint_without_checksums_is_gone_on_from_with_a_note(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    assert list(checkpoint_notes(path)) == [f"from {path.name}"]
    _, said = checkpoint_notes(as_older(path))
    assert said == "step-000003 was saved without checksums: it cannot be checked for damage"


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
        "trainer/actor.pt",
        "trainer/critic.pt",
        "model.safetensors",
        "trainer/state.json",
        "srl.json",
    ],
)
def test_no_file_of_a_checkpoint_is_damaged_unnoticed(tmp_path, name):
    them, again = learner(lora=2), learner(lora=2)
    those = optimisers(them)
    save(tmp_path, them, those, step=2)
    path = save(tmp_path, them, those, step=10)
    spoil(path / name)
    with pytest.raises(DamagedError, match=rf"{name} is damaged.*the checkpoint before it is step-000002$"):
        load_checkpoint(path, again, optimisers(again))
    (path / name).unlink()
    if name != "trainer/state.json":
        with pytest.raises(DamagedError, match=f"{name} is missing"):
            load_checkpoint(path, again, optimisers(again))


def test_a_damaged_model_of_a_checkpoint_is_not_loaded(tmp_path):
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    spoil(path / "trainer" / "actor-optimiser.pt")
    load_model(path)
    spoil(path / "model.safetensors")
    with pytest.raises(DamagedError, match=r"model\.safetensors is damaged"):
        load_model(path)


class Command:
    """A pickle of this would run a command."""

    def __reduce__(self):
        return exit, (3,)


@pytest.mark.parametrize("content", [b"", pickle.dumps(Command()), b"garbage"])
def test_a_checkpoint_without_checksums_still_loads_and_its_damage_is_one_line(tmp_path, content):
    them = learner()
    path = as_older(save(tmp_path, them, optimisers(them)))
    load_checkpoint(path, learner(), optimisers(learner()))
    (path / "trainer" / "critic.pt").write_bytes(content)
    with pytest.raises(DamagedError) as said:
        load_checkpoint(path, learner(), optimisers(learner()))
    assert f"{path / 'trainer' / 'critic.pt'} is damaged" in str(said.value)
    assert "weights_only" not in str(said.value)
    assert "\n" not in str(said.value)


def test_a_broken_newest_checkpoint_says_how_to_go_on_from_the_one_before(tmp_path):
    run = tmp_path / "my run"
    them = learner()
    those = optimisers(them)
    for step in (1, 2):
        save(run, them, those, step=step)
    spoil(checkpoint_path(run, 2) / "trainer" / "critic.pt")
    with pytest.raises(DamagedError, match="before it is step-000001; to resume without it type: ") as said:
        load_newest(checkpoint_path(run, 2), learner(), optimisers(learner()))
    first, _, second = str(said.value).rpartition("type: ")[2].partition(" && ")
    assert second == resume_command(run)
    subprocess.run(shlex.split(first), check=True)
    assert load_newest(checkpoint_path(run, 1), learner(), optimisers(learner())).step == 1
    spoil(checkpoint_path(run, 1) / "trainer" / "critic.pt")
    with pytest.raises(DamagedError, match=r"before it is none; to resume without it type: mv "):
        load_newest(checkpoint_path(run, 1), learner(), optimisers(learner()))


def test_nothing_is_in_a_checkpoint_twice(tmp_path):
    them = learner(critic_lora=2)
    those = optimisers(them)
    take_steps(them, those)
    trainer = save(tmp_path, them, those) / "trainer"
    assert sorted(path.name for path in trainer.iterdir()) == [
        "actor-optimiser.pt", "critic-optimiser.pt", "critic.pt", "state.json",
    ]  # fmt: skip
    kept = torch.load(trainer / "critic.pt", weights_only=True)
    assert kept.keys() == {name for name, value in them.critic.named_parameters() if value.requires_grad}
    adapted = learner(lora=2, critic=False)
    both = torch.load(save(tmp_path, adapted, optimisers(adapted), step=4) / "trainer" / "actor.pt")
    assert all(".lora_" in name for name in both)


def test_an_older_checkpoint_with_the_weights_beside_the_model_is_gone_on_from(tmp_path):
    them = learner()
    those = optimisers(them)
    take_steps(them, those)
    path = as_older(save(tmp_path, them, those))
    other = {name: value.detach() + 1 for name, value in them.actor.named_parameters()}
    torch.save(other, path / "trainer" / "actor.pt")
    again = learner()
    load_checkpoint(path, again, optimisers(again))
    assert_equal(dict(again.actor.named_parameters()), other)
