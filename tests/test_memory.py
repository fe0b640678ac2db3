"""What a run takes: what is counted is what is allocated, and what is estimated bounds what is used."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.live_tensors import Live, bytes_of
from tests.rows import on_policy
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.config import Config, load_config
from srl.models.load import load_model
from srl.models.weights import save_model
from srl.rollout.cached_forward import PADDED_TOKENS
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.train.checkpoint import save_checkpoint
from srl.train.load_components import LoadedModel, model_options
from srl.train.memory import (
    GPUS,
    USABLE,
    Layout,
    Shape,
    footprint,
    pass_parts,
    saved_model,
    settings_that_fit,
    shape_of,
    total,
)
from srl.train.rl import Learner, load_learner, load_optimisers, make_experience
from srl.trajectory import Question, Score, Segment, Trajectory
from srl.update.actor import ActorLoss, Experience, accumulate_actor
from srl.update.batch import collate
from srl.update.critic import accumulate_critic
from srl.update.optimiser import Optimiser

CPU, GPU = Layout(cpu=True), Layout()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Qwen2 and a Llama of width 256, two layers, as directories."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen2", "llama"):
        model = tiny_model(kind, width=256, ffn=512, heads=8, kv_heads=2, max_length=1024)
        save_model(model, byte_level_tokenizer(), root / kind)
    return {kind: root / kind for kind in ("qwen2", "llama")}


def configured(path: Path | str, **settings: object) -> Config:
    """A configuration with `section__key=value` on top of the defaults, on the CPU in float32."""
    given = {"model__path": str(path), "model__device": "cpu", "model__dtype": "float32", **settings}
    return Config().with_settings({name.replace("__", "."): value for name, value in given.items()})


def part(shape: Shape, config: Config, name: str, phase: str = "update") -> int:
    """Bytes of one use of memory while the run is in a phase."""
    return sum(getattr(each, phase) for each in footprint(shape, config, CPU) if each.name == name)


def test_cache_bytes_are_those_that_the_engine_allocates(saved):
    lengths = {"data__max_prompt_length": 350, "data__max_response_length": 350}
    config = configured(saved["qwen2"], rollout__max_num_seqs=3, **lengths)
    shape = shape_of(config, saved["qwen2"], needs_critic=False)
    engine = TorchEngine(
        tiny(saved["qwen2"]), Codec(byte_level_tokenizer()), max_num_seqs=3, max_model_len=700
    )

    async def allocated() -> int:
        for length in (40, 690):
            await engine.generate(f"episode {length}", [5] * length, Sampling(max_tokens=10))
        return bytes_of(
            [buffer for layer in engine._forward.cache.layers for buffer in (layer.keys, layer.values)]
        )

    assert part(shape, config, "KV cache", "rollout") == asyncio.run(allocated())


@pytest.mark.parametrize(("vocabulary", "read"), [(40000, 8), (400, 100)])
def test_rollout_takes_about_what_is_estimated_and_not_more(tmp_path, monkeypatch, vocabulary, read):
    """Eight episodes at once: drawing from a large vocabulary, or reading beside many keys."""
    monkeypatch.setitem(PADDED_TOKENS, "cpu", 800)
    path, slots, longest, prompt = tmp_path / "model", 8, 256, 130
    save_model(tiny_model(vocab_size=vocabulary, width=64, ffn=96), byte_level_tokenizer(), path)
    config = configured(
        path, rollout__max_num_seqs=slots, data__max_prompt_length=1, data__max_response_length=longest - 1
    )
    shape, model = shape_of(config, path, needs_critic=False), tiny(path)
    engine = TorchEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=slots, max_model_len=longest)

    async def episode(number: int) -> None:
        ids = [5 + number] * prompt
        for _ in range(2):
            made = await engine.generate(str(number), ids, Sampling(max_tokens=8))
            ids += [*made.token_ids, *[9] * read]

    async def play() -> None:
        await asyncio.gather(*map(episode, range(slots)))

    with Live(list(model.parameters())) as live:
        asyncio.run(play())
    own = live.peak - part(shape, config, "KV cache", "rollout")
    assert 0.95 * own <= part(shape, config, "rollout buffers", "rollout") <= 1.5 * own


def tiny(path: Path) -> torch.nn.Module:
    return load_model(path, dtype="float32", device="cpu")


def episodes(count: int, length: int, vocabulary: int) -> list[Trajectory]:
    """Two for each question, all but the first token written by the policy; the first has one token less, so
    that attention has a mask."""
    made = []
    for row in range(count):
        ids = tuple(torch.randint(0, vocabulary, (length - 1 - (row == 0),)).tolist())
        parts = [Segment("prompt", (1,), "", 0), Segment("policy", ids, "", 0, (-1.0,) * len(ids))]
        made.append(Trajectory(Question(str(row // 2), "", ()), parts, sample=row % 2))
    return made


def experience(rows: int, length: int, vocabulary: int) -> Experience:
    batch = collate(episodes(rows, length, vocabulary))
    mask = batch.response_mask
    return on_policy(batch, mask, torch.ones_like(mask), batch.sampler_logprobs)


@pytest.mark.parametrize(
    ("dtype", "rank", "checkpointing", "vocabulary", "entropy_coeff"),
    [
        ("float32", 0, False, 400, 0.0), ("float32", 0, False, 3000, 0.1), ("float32", 8, True, 400, 0.1),
        ("float32", 8, True, 3000, 0.0), ("bfloat16", 8, False, 400, 0.1), ("bfloat16", 8, False, 3000, 0.0),
        ("bfloat16", 0, True, 400, 0.0), ("bfloat16", 0, True, 3000, 0.1),
    ],
)  # fmt: skip
def test_update_takes_about_what_is_estimated_and_not_more(
    tmp_path, monkeypatch, dtype, rank, checkpointing, vocabulary, entropy_coeff
):
    for module in ("srl.update.logprobs", "srl.train.memory"):  # small, so that no vocabulary is large
        monkeypatch.setattr(f"{module}.CHUNK", 256)
    monkeypatch.setattr("srl.update.logprobs.KEPT_LOGITS", 256 * 1000)
    path, rows, length = tmp_path / "model", 6, 72
    model = tiny_model(vocab_size=vocabulary, width=64, ffn=192, heads=4, layers=3)
    save_model(model, byte_level_tokenizer(), path)
    config = configured(
        path, model__dtype=dtype, model__lora_rank=rank, model__gradient_checkpointing=checkpointing,
        data__max_prompt_length=1, data__max_response_length=length - 1, actor__ppo_mini_batch_size=rows,
        actor__ppo_max_token_len=rows * length, actor__entropy_coeff=entropy_coeff,
    )  # fmt: skip
    shape = shape_of(config, path, needs_critic=False)
    model = load_model(path, **model_options(config.model))
    batch, loss = experience(rows, length, vocabulary), ActorLoss(entropy_coeff=entropy_coeff)
    accumulate_actor(model, batch, loss=loss, max_tokens=rows * length)  # gradients exist now
    with Live(list(model.parameters())) as live:
        accumulate_actor(model, batch, loss=loss, max_tokens=rows * length)
    estimated = total(pass_parts(shape, config, CPU, config.actor), "update")
    assert 0.97 * live.peak <= estimated <= 1.5 * live.peak


def made_learner(path: Path, algo: str, **settings: object) -> tuple[Config, Learner, dict[str, Optimiser]]:
    """The networks of a run on the model at `path`, as a run loads them."""
    config = configured(path, algorithm__name=algo, **settings)
    model = load_model(path, **model_options(config.model))
    learner = load_learner(config, LoadedModel(model, None))
    return config, learner, load_optimisers(config, learner)


def tensors_of(learner: Learner, optimisers: dict[str, Optimiser]) -> list[torch.Tensor]:
    """Everything that the run holds between its phases."""
    networks = [each for each in (learner.actor, learner.reference, learner.critic) if each is not None]
    states = [state for each in optimisers.values() for state in each.adamw.state.values()]
    return [
        *(tensor for network in networks for tensor in (*network.parameters(), *network.buffers())),
        *(master for each in optimisers.values() for master in each.masters),
        *(tensor for state in states for tensor in state.values()),
    ]


NETWORKS = {
    "all weights": {"algo": "grpo", "actor__use_kl_loss": True},
    "adapter": {"algo": "grpo", "actor__use_kl_loss": True, "model__lora_rank": 4},
    "critic": {"algo": "ppo", "algorithm__use_kl_in_reward": True},
    "critic with an adapter": {"algo": "ppo", "critic__lora_rank": 4},
    "two adapters": {"algo": "ppo", "model__lora_rank": 4, "critic__lora_rank": 4},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("networks", NETWORKS.values(), ids=NETWORKS)
def test_between_its_phases_a_run_holds_exactly_what_is_counted(saved, networks, dtype):
    config, learner, optimisers = made_learner(saved["llama"], **networks, model__dtype=dtype)
    shape = shape_of(config, saved["llama"], needs_critic=learner.critic is not None)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(learner, optimisers) if tensor.ndim}
    buffers = {
        b.data_ptr() for n in (learner.actor, learner.reference, learner.critic) if n for b in n.buffers()
    }
    names = ("policy weights", "critic weights", "reference weights")
    counted = sum(
        part(shape, config, name, "rollout") for name in (*names, "policy optimiser", "critic optimiser")
    )
    assert counted == sum(size for place, size in held.items() if place not in buffers)


@pytest.mark.parametrize(
    ("networks", "vocabulary"), [("all weights", 6000), ("adapter", 400), ("critic", 6000), ("critic", 400)]
)
def test_log_probs_take_no_more_than_an_update(tmp_path, monkeypatch, networks, vocabulary):
    for module in ("srl.update.logprobs", "srl.train.memory"):
        monkeypatch.setattr(f"{module}.CHUNK", 256)
    rows, length = 8, 64
    save_model(
        tiny_model(vocab_size=vocabulary, width=64, ffn=192), byte_level_tokenizer(), tmp_path / "model"
    )
    config, learner, optimisers = made_learner(
        tmp_path / "model", **NETWORKS[networks], model__dtype="bfloat16", data__max_prompt_length=1,
        data__max_response_length=length - 1, actor__ppo_mini_batch_size=rows // 4, rollout__n=2,
        actor__ppo_max_token_len=rows * length // 2, critic__ppo_max_token_len=rows * length // 2,
        data__train_batch_size=rows // 2,
    )  # fmt: skip
    shape = shape_of(config, tmp_path / "model", needs_critic=learner.critic is not None)
    sampled = episodes(rows, length, vocabulary)
    with Live(tensors_of(learner, optimisers)) as live:
        make_experience(learner, sampled, [Score(1.0)] * rows)
    sections = [config.actor, config.critic][: 1 + (learner.critic is not None)]
    assert live.peak <= max(total(pass_parts(shape, config, CPU, section), "update") for section in sections)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "rank"),
    [("float32", False, 0), ("bfloat16", False, 8), ("float32", True, 8), ("bfloat16", True, 0)],
)
def test_update_of_a_critic_takes_about_what_is_estimated_and_not_more(saved, dtype, checkpointing, rank):
    rows, length = 6, 72
    config, learner, optimisers = made_learner(
        saved["qwen2"], "ppo", model__dtype=dtype, model__gradient_checkpointing=checkpointing,
        critic__lora_rank=rank, data__max_prompt_length=1, data__max_response_length=length - 1,
        critic__ppo_mini_batch_size=rows, critic__ppo_max_token_len=rows * length,
        actor__ppo_max_token_len=length, actor__ppo_mini_batch_size=1, data__train_batch_size=rows,
    )  # fmt: skip
    shape = shape_of(config, saved["qwen2"], needs_critic=True)
    given = experience(rows, length, 400)
    given = replace(given, values=torch.zeros_like(given.mask))
    given_to = {"clip": 0.5, "normalise": "token-mean", "max_tokens": rows * length}
    accumulate_critic(learner.critic, given, **given_to)  # gradients exist now
    gradients = [master.grad for master in optimisers["critic"].masters]
    with Live([*tensors_of(learner, optimisers), *gradients]) as live:
        accumulate_critic(learner.critic, given, **given_to)
    estimated = total(pass_parts(shape, config, CPU, config.critic), "update")
    assert 0.97 * live.peak <= estimated <= 1.5 * live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("networks", [NETWORKS["all weights"], NETWORKS["adapter"]], ids=["whole", "adapter"])
def test_a_checkpoint_takes_no_more_than_is_estimated(tmp_path, saved, networks, dtype):
    config, learner, optimisers = made_learner(saved["qwen2"], **networks, model__dtype=dtype)
    shape = shape_of(config, saved["qwen2"], needs_critic=learner.critic is not None)
    known = tensors_of(learner, optimisers)
    with Live(known) as live:
        path = tmp_path / "checkpoint"
        save_checkpoint(path, learner, byte_level_tokenizer(), optimisers, {}, {}, is_first=True)
    estimated = saved_model(shape, CPU).update
    assert 0.97 * live.peak <= estimated <= 1.5 * live.peak


WHOLE = {"model.path": "Qwen/Qwen2.5-3B", "model.lora_rank": 0}
FITTING: dict[str, tuple[str, str, dict[str, object]]] = {
    "3B GRPO": ("80 GB", "grpo", WHOLE),
    "3B PPO": ("80 GB", "ppo", WHOLE),
    "7B LoRA": ("24 GB", "grpo", {"model.path": "Qwen/Qwen2.5-7B"}),
    "0.5B": ("16 GB", "grpo", {}),
}


@pytest.mark.parametrize(("gpu", "algo", "settings"), FITTING.values(), ids=FITTING)
def test_published_models_fit_their_gpus_with_what_the_plan_says_to_set(gpu, algo, settings):
    sets = {**settings, "model.device": "cpu", "model.dtype": "bfloat16"}
    config, room = load_config("one-gpu", None, algo, sets).config, int(GPUS[gpu] * 2**30)
    shape = shape_of(config, str(config.model.path), needs_critic=algo == "ppo")
    assert settings_that_fit(config, shape, GPU, 2**20) is None
    assert settings_that_fit(config, shape, GPU, 2**50) == {}
    changes = settings_that_fit(config, shape, GPU, room)
    assert changes is not None
    parts = footprint(shape, config.with_settings(changes), GPU)
    assert max(total(parts, "rollout"), total(parts, "update")) <= USABLE * room
