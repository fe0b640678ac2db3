"""Checkpoints: whole or not there, the same when they come back, and never another model's."""

import json
import pickle
import shlex
import subprocess

import pytest
import torch
from tests.tiny_models import new_model
from tests.training import SETTINGS, tokenizer

from srl.advantage import Algorithm
from srl.config import load_config
from srl.errors import UserError
from srl.files import CHECKPOINT, DamagedError, checksums, write_manifest
from srl.models.load import load_model, load_tokenizer
from srl.models.weights import add_lora, model_digest
from srl.train import checkpoint
from srl.train.checkpoint import load_checkpoint, save_checkpoint
from srl.train.resume import resume_command, without_damaged
from srl.train.rl import Learner
from srl.train.run_directory import checkpoint_path, checkpoints
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


def take_steps(them, those):
    """Steps with gradients that depend on the weights, so that any difference grows."""
    networks = {"actor": them.actor, "critic": them.critic}
    for _ in range(3):
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


@pytest.mark.parametrize(
    ("dtype", "lora", "critic_lora"),
    [(torch.float32, 0, 0), (torch.bfloat16, 0, 4), (torch.float32, 4, 0), (torch.bfloat16, 4, 2)],
)
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
    assert json.loads((path / "srl.json").read_text()) == {"format": 1, "step": 3, **ABOUT}
    assert model_digest(path) == model_digest(them.actor)
    text = "<think> I think velmar </think> <search> velmar flag </search>"
    tokens, _ = load_tokenizer(path)
    assert tokens.encode(text) == tokenizer().encode(text), "word for word, and not as Qwen2's own"
    assert tokens.decode(tokens.encode(text)) == text


@pytest.mark.parametrize("lora", [0, 4])
def test_the_first_checkpoint_of_a_run_that_is_not_the_trained_model_is_refused(tmp_path, monkeypatch, lora):
    them = learner(lora=lora, critic=False)
    those = optimisers(them)
    take_steps(them, those)
    path, whole = save(tmp_path / "right", them, those), checkpoint.save_model

    def lose_what_was_trained(model, tokenizer, directory, **options):
        whole(learner(critic=False).actor, tokenizer, directory)

    monkeypatch.setattr(checkpoint, "save_model", lose_what_was_trained)
    with pytest.raises(UserError):
        save(tmp_path / "wrong", them, those)
    assert not checkpoints(tmp_path / "wrong")
    assert path.is_dir()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    them, adapted, alone = learner(), learner(lora=4), learner(critic=False)
    path, without = save(tmp_path, them, optimisers(them)), save(tmp_path, alone, optimisers(alone), step=4)
    of_adapter = save(tmp_path, adapted, optimisers(adapted), step=5)
    for saved, other in ((path, learner(width=32)), (path, adapted), (of_adapter, them), (without, them)):
        with pytest.raises(UserError, match=saved.name):
            load_checkpoint(saved, other, optimisers(other))


def spoil(file):
    """Other bytes in the middle half, as a disk or a copy leaves them: sizes and ends stay."""
    content = bytearray(file.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter] = b"\x7f" * (2 * quarter)
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["trainer/actor-optimiser.pt", "model.safetensors", "trainer/state.json", "manifest.json"]
)
def test_no_file_of_a_checkpoint_is_damaged_unnoticed(tmp_path, name):
    them, again = learner(), learner()
    those = optimisers(them)
    path = save(tmp_path, them, those, step=10)
    spoil(path / name)
    with pytest.raises(DamagedError, match=f"{name} is damaged"):
        load_checkpoint(path, again, optimisers(again))
    (path / name).unlink()
    if name not in ("trainer/state.json", "manifest.json"):
        with pytest.raises(DamagedError, match=f"{name} is missing"):
            load_checkpoint(path, again, optimisers(again))


class Command:
    """A pickle of this would run a command."""

    def __reduce__(self):
        return exit, (3,)


@pytest.mark.parametrize("content", [b"", pickle.dumps(Command()), b"garbage"])
def test_weights_are_read_as_data_only(tmp_path, content):
    """Also where the checksums are those of such a file."""
    them = learner()
    path = save(tmp_path, them, optimisers(them))
    (path / "trainer" / "critic.pt").write_bytes(content)
    (path / "manifest.json").unlink()
    write_manifest(path, CHECKPOINT, {"files": checksums(path)})
    with pytest.raises(UserError):
        load_checkpoint(path, them, optimisers(them))


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
