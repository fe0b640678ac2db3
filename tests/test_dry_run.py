"""The plan of a run: what it counts is what is allocated, and what it estimates bounds what is used."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.live_tensors import Live, bytes_of
from tests.tiny_models import byte_level_tokenizer, tiny_model
from typer.testing import CliRunner

from srl.cli.train import app
from srl.config import Config, load_config
from srl.config.sections import Trainer
from srl.errors import UserError
from srl.model import load_model, save_model
from srl.rollout.cached_forward import PADDED_TOKENS
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.train import disk_space, make_missing
from srl.train.checkpoint import save_checkpoint
from srl.train.dry_run.facts import disk_of_checkpoints
from srl.train.dry_run.memory import (
    SAMPLED_LOGIT,
    Footprint,
    Layout,
    available_memory,
    cache_bytes,
    checkpoint_bytes,
    footprint,
    gib,
)
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.plan import GPUS, plan_local
from srl.train.dry_run.remedy import LOCAL, Device, memory_warnings, settings_that_fit, sizes
from srl.train.dry_run.step_time import DeviceSpeed, EpisodeTokens, half_of_the_budgets, measure, step_times
from srl.train.dry_run.text import plan_lines
from srl.train.experience import Learner, make_experience
from srl.train.load_components import LoadedModel, load_learner, load_optimisers, model_options
from srl.train.run_directory import Progress
from srl.trajectory import Question, Score, Segment, Trajectory
from srl.update.actor import ActorLoss, Experience, accumulate_actor
from srl.update.batch import collate
from srl.update.critic import Critic, accumulate_critic
from srl.update.optimiser import Optimiser

CPU, GPU = Layout("local", cpu=True), Layout("local")
SPEED = DeviceSpeed(operations=1e12, bandwidth=1e11, forward_s=0.01)


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
    found = footprint(shape, config, CPU).parts
    return sum(getattr(item, phase) for item in found if item.name == name)


def test_published_shape_has_the_parameters_of_qwen():
    shape = shape_of(load_config("one-gpu").config, "Qwen/Qwen2.5-0.5B", needs_critic=False)
    assert (shape.parameters, shape.body) == (494_032_768, 494_032_768 - 151_936 * 896)
    assert (
        shape.adapter == shape.trainable == 24 * 32 * (4 * 2 * 896 + 3 * 4864 + 3 * 896 - 2 * 896 + 2 * 128)
    )
    assert shape.kv_bytes == 12_288


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_held_bytes_are_exactly_those_of_the_tensors(saved, kind, dtype, rank):
    config = configured(saved[kind], model__dtype=dtype, model__lora_rank=rank)
    shape = shape_of(config, saved[kind], needs_critic=True)
    model = load_model(saved[kind], **model_options(config.model))
    critic = Critic(model)
    trained = [item for item in [*model.parameters(), *critic.parameters()] if item.requires_grad]
    optimisers = [Optimiser(network.parameters(), lr=1e-3) for network in (model, critic)]
    for weight in trained:
        weight.sum().backward()
    gradients = max(sum(master.grad.nbytes for master in optimiser.masters) for optimiser in optimisers)

    def said(name: str) -> int:
        return part(shape, config, name)

    weights = {name: weight for name, weight in model.named_parameters() if "lora" not in name}
    assert said("policy weights") == bytes_of(list(weights.values()))
    assert said("adapter weights") == bytes_of(list(model.parameters())) - said("policy weights")
    assert said("critic weights") == bytes_of(list(critic.parameters()))
    assert said("gradients") == gradients
    assert [said("policy optimiser"), said("critic optimiser")] == [state_bytes(each) for each in optimisers]


def state_bytes(optimiser: Optimiser) -> int:
    """Moments, and float32 copies where there are some."""
    moments = [state[name] for state in optimiser.adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
    pairs = zip(optimiser.masters, optimiser.parameters, strict=True)
    return bytes_of([*moments, *(master for master, parameter in pairs if master is not parameter)])


def test_cache_bytes_are_those_that_the_engine_allocates(saved):
    config = configured(saved["qwen2"], rollout__max_num_seqs=3)
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

    assert cache_bytes(shape, 3, 700) == asyncio.run(allocated())


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

    async def episodes() -> None:
        await asyncio.gather(*map(episode, range(slots)))

    with Live(list(model.parameters())) as live:
        asyncio.run(episodes())
    own = live.peak - cache_bytes(shape, slots, longest)
    assert 0.95 * own <= part(shape, config, "rollout buffers", "rollout") <= 1.5 * own


def tiny(path: Path) -> torch.nn.Module:
    return load_model(path, dtype="float32", device="cpu")


def experience(rows: int, length: int, vocabulary: int) -> Experience:
    """Rows of a prompt token and policy tokens, one row a token shorter so that attention has a mask."""
    made = []
    for row in range(rows):
        ids = tuple(torch.randint(0, vocabulary, (length - 1 - (row == 0),)).tolist())
        parts = [Segment("prompt", (1,), "", 0), Segment("policy", ids, "", 0, (-1.0,) * len(ids))]
        made.append(Trajectory(Question(str(row), "", ()), parts))
    batch = collate(made)
    mask = batch.response_mask
    return Experience(batch, mask, mask, torch.ones_like(mask), mask, batch.sampler_logprobs)


@pytest.mark.parametrize(("vocabulary", "entropy_coeff"), [(400, 0.0), (400, 0.1), (3000, 0.0), (3000, 0.1)])
@pytest.mark.parametrize(
    ("dtype", "rank", "checkpointing"),
    [("float32", 0, False), ("float32", 8, True), ("bfloat16", 8, False), ("bfloat16", 0, True)],
)
def test_update_takes_about_what_is_estimated_and_not_more(
    tmp_path, monkeypatch, dtype, rank, checkpointing, vocabulary, entropy_coeff
):
    for module in (
        "srl.update.logprobs",
        "srl.train.dry_run.memory",
    ):  # small, so that a large vocabulary need not be
        monkeypatch.setattr(f"{module}.CHUNK", 256)
        monkeypatch.setattr(f"{module}.KEPT_LOGITS", 256 * 1000)
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
    estimated = part(shape, config, "activations") + part(shape, config, "backward buffers")
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
    names = ("policy weights", "adapter weights", "critic weights", "reference weights")
    counted = sum(
        part(shape, config, name, "checkpoint") for name in (*names, "policy optimiser", "critic optimiser")
    )
    assert counted == sum(size for place, size in held.items() if place not in buffers)


def scored(count: int, length: int, vocabulary: int) -> list[Trajectory]:
    """Episodes of `length` tokens, all but the first written by the policy, two for each question."""
    made = []
    for row in range(count):
        ids = tuple(torch.randint(0, vocabulary, (length - 1,)).tolist())
        parts = [Segment("prompt", (1,), "", 0), Segment("policy", ids, "", 0, (-1.0,) * len(ids))]
        made.append(Trajectory(Question(str(row // 2), "", ()), parts, sample=row % 2))
    return made


@pytest.mark.parametrize("vocabulary", [400, 6000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("networks", NETWORKS.values(), ids=NETWORKS)
def test_log_probs_take_about_what_is_estimated_and_not_more(
    tmp_path, monkeypatch, networks, dtype, vocabulary
):
    for module in ("srl.update.logprobs", "srl.train.dry_run.memory"):
        monkeypatch.setattr(f"{module}.CHUNK", 256)
    rows, length = 8, 64
    save_model(
        tiny_model(vocab_size=vocabulary, width=64, ffn=192), byte_level_tokenizer(), tmp_path / "model"
    )
    config, learner, optimisers = made_learner(
        tmp_path / "model", **networks, model__dtype=dtype, data__max_prompt_length=1,
        data__max_response_length=length - 1, actor__ppo_mini_batch_size=rows // 4, rollout__n=2,
        actor__ppo_max_token_len=rows * length // 2, critic__ppo_max_token_len=rows * length // 2,
        data__train_batch_size=rows // 2,
    )  # fmt: skip
    shape = shape_of(config, tmp_path / "model", needs_critic=learner.critic is not None)
    episodes = scored(rows, length, vocabulary)
    with Live(tensors_of(learner, optimisers)) as live:
        make_experience(learner, episodes, [Score(1.0)] * rows)
    estimated = part(shape, config, "log-prob buffers", "logprobs")
    assert 0.95 * live.peak <= estimated <= 1.5 * live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rank", [0, 8])
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
    estimated = part(shape, config, "activations") + part(shape, config, "backward buffers")
    assert 0.97 * live.peak <= estimated <= 1.5 * live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("networks", NETWORKS.values(), ids=NETWORKS)
def test_a_checkpoint_takes_no_more_than_is_estimated(tmp_path, saved, networks, dtype):
    config, learner, optimisers = made_learner(saved["qwen2"], **networks, model__dtype=dtype)
    shape = shape_of(config, saved["qwen2"], needs_critic=learner.critic is not None)
    known = tensors_of(learner, optimisers)
    with Live(known) as live:
        path = save_checkpoint(
            tmp_path, Progress(step=1), learner, byte_level_tokenizer(), optimisers, {}, keep=None
        )
    estimated = part(shape, config, "saved model", "checkpoint")
    assert 0.97 * live.peak <= estimated <= 1.5 * live.peak
    files = [file for file in path.rglob("*") if file.suffix in (".pt", ".safetensors")]
    written = sum(file.stat().st_size for file in files)
    assert checkpoint_bytes(shape, CPU) == pytest.approx(written, rel=0.02, abs=100_000)
    of_networks = disk_space.checkpoint_bytes(learner.actor, learner.critic)
    assert of_networks == pytest.approx(written, rel=0.02, abs=100_000)


def test_reference_is_held_only_where_there_is_a_kl_and_no_adapter(saved):
    path = saved["qwen2"]

    def reference(**settings: object) -> int:
        return shape_of(configured(path, **settings), path, needs_critic=False).reference

    whole = shape_of(configured(path), path, needs_critic=False).parameters
    assert reference() == 0
    assert reference(actor__use_kl_loss=True) == reference(algorithm__use_kl_in_reward=True) == whole
    assert reference(actor__use_kl_loss=True, model__lora_rank=4) == 0
    assert reference(actor__use_kl_loss=True, model__lora_rank=4, ref__path=str(path)) == whole


@pytest.mark.parametrize("small", [True, False])
def test_a_cache_is_given_back_before_the_update_unless_it_is_small_and_a_cpus(saved, monkeypatch, small):
    config = configured(saved["qwen2"])
    shape = shape_of(config, saved["qwen2"], needs_critic=False)
    size = part(shape, config, "KV cache", "rollout")
    monkeypatch.setattr("srl.train.dry_run.memory.SMALL_CACHE", size if small else size - 1)
    on_cpu, on_gpu = (footprint(shape, config, layout) for layout in (CPU, GPU))
    assert bytes_in_rollout(on_gpu, "KV cache") == bytes_in_rollout(on_cpu, "KV cache")
    assert on_cpu.update - on_gpu.update == (size if small else 0)


def test_a_gpu_has_keys_and_values_of_results_for_every_head(saved, monkeypatch):
    monkeypatch.setitem(PADDED_TOKENS, "cuda", PADDED_TOKENS["cpu"])
    config = configured(saved["qwen2"], rollout__max_num_seqs=8, rollout__max_obs_length=1000)
    shape = shape_of(config, saved["qwen2"], needs_critic=False)
    assert shape.heads > shape.kv_heads
    cpu, gpu = (bytes_in_rollout(footprint(shape, config, at), "rollout buffers") for at in (CPU, GPU))
    together, longest = 7, 6144  # as many tokens at a time as an episode may have, 1,000 of each
    sampling = SAMPLED_LOGIT * 8 * shape.vocabulary  # in the graphs' own memory
    assert gpu - cpu - sampling == together * longest * 2 * shape.heads * shape.head_dim * shape.itemsize
    alike = replace(shape, kv_heads=shape.heads)
    cpu, gpu = (bytes_in_rollout(footprint(alike, config, at), "rollout buffers") for at in (CPU, GPU))
    assert gpu == cpu + sampling


def bytes_in_rollout(memory: Footprint, name: str) -> int:
    (found,) = (item for item in memory.parts if item.name == name)
    return found.rollout


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_what_to_type_where_a_run_does_not_fit_makes_it_fit(saved, share):
    path = saved["qwen2"]
    config = configured(path, rollout__max_num_seqs=512, actor__ppo_max_token_len=65536)
    shape = shape_of(config, path, needs_critic=False)
    found = footprint(shape, config, GPU)
    room = share * min(found.rollout, found.update)
    lines = list(memory_warnings(config, shape, path, Device("cuda", "a GPU", int(room / 0.9)), GPU))
    assert [line.split()[1] for line in lines] == ["rollout", "update"]
    settings = {}
    for line in lines:
        for word in line.split(": ", 1)[1].removeprefix("--set ").split(" --set "):
            key, _, value = word.partition("=")
            settings[key] = json.loads(value)
    changed = config.with_settings(settings)
    slimmer = footprint(shape_of(changed, path, needs_critic=False), changed, GPU)
    assert max(slimmer.rollout, slimmer.update) <= room


def test_hopeless_case_names_the_keys(saved):
    path = saved["qwen2"]
    config = configured(path)
    lines = list(
        memory_warnings(
            config, shape_of(config, path, needs_critic=False), path, Device("cuda", "x", 1000), GPU
        )
    )
    assert "rollout.max_num_seqs" in lines[0]
    assert "use a smaller model" in lines[0]
    assert "actor.ppo_max_token_len" in lines[1]


@pytest.mark.parametrize(
    ("vocabulary", "checkpointing", "layers", "at_once"),
    [
        (400, False, "all of 2 layers", "all tokens"),
        (9000, True, "the input of each of 2 layers", "up to 2,048 tokens"),
    ],
)
def test_notes_tell_the_optimisers_precision_the_kept_layers_and_the_logits(
    tmp_path, vocabulary, checkpointing, layers, at_once
):
    save_model(tiny_model(vocab_size=vocabulary, width=16), byte_level_tokenizer(), tmp_path)
    config = configured(tmp_path, model__gradient_checkpointing=checkpointing)
    shape = shape_of(config, tmp_path, needs_critic=False)
    notes = {item.name: item.how for item in footprint(shape, config, CPU).parts}
    assert notes["policy optimiser"].endswith(", AdamW in float32")
    assert notes["activations"].endswith(f": {layers}")
    assert notes["backward buffers"] == f"logits of {at_once} at once"


def test_step_takes_as_long_as_its_operations():
    """One layer of 10 numbers a token, one episode a step: every count can be done by hand."""
    shape = Shape(
        kind="x", layers=1, width=2, heads=1, kv_heads=1, head_dim=2, ffn=4, vocabulary=8, context=None,
        itemsize=4, parameters=26, body=10, adapter=0, trainable=26, critic=0, critic_trained=0, reference=0,
        tied=True, attention="sdpa",
    )  # fmt: skip
    config = configured("x", data__train_batch_size=1, trainer__total_training_steps=3)
    speed, tokens = DeviceSpeed(1.0, 1e9, 0.5), EpisodeTokens(prompt=2, written=1, read=1)
    found = step_times(shape, config, speed, tokens)
    forward, head = 4 * (2 * 10 + 4 * 2 * 4), 2 * 2 * 8
    assert found.logprobs_s == 0  # with one optimiser step those of the update serve
    several = configured("x", data__train_batch_size=1, actor__ppo_epochs=2)
    assert step_times(shape, several, speed, tokens).logprobs_s == forward + head
    assert found.update_s == 2 * forward + 2 * 10 * 4 + 3 * head + head
    decoding = 2 * (0.5 + 0.5 * (forward / 4 + head))  # two tokens at most, half an episode in flight
    assert found.rollout_s == pytest.approx(2 * 10 * 3 + decoding)
    assert found.total_s == pytest.approx(3 * found.step_s)


def test_adapters_reference_and_checkpointing_change_the_time_as_they_should(saved):
    path = saved["qwen2"]

    def update(**settings: object) -> float:
        config = configured(path, **settings)
        return step_times(
            shape_of(config, path, needs_critic=False), config, SPEED, EpisodeTokens(10, 20, 30)
        ).update_s

    assert update(model__lora_rank=2) < update() < update(model__gradient_checkpointing=True)
    assert update(actor__ppo_epochs=2) == pytest.approx(2 * update())


def test_speed_is_measured():
    config = load_config("one-gpu").config
    shape = replace(shape_of(config, "Qwen/Qwen2.5-0.5B", needs_critic=False), layers=2)
    found = measure(shape, torch.device("cpu"), torch.float32, seconds=0.0)
    assert min(found.operations, found.bandwidth, found.forward_s) > 0


def test_half_of_the_budgets_is_written_and_read():
    config = load_config("one-gpu").config
    assert half_of_the_budgets(config) == EpisodeTokens(prompt=256, written=512, read=750)
    assert config.rollout.max_turns * config.rollout.max_obs_length == 2 * 750
    narrow = config.with_settings({"data.max_response_length": 2000})
    assert half_of_the_budgets(narrow).read == (2000 - 1024) / 2, "what the turns leave"
    for settings in ({"rollout.search": False}, {"rollout.max_turns": 0}):
        assert half_of_the_budgets(config.with_settings(settings)).read == 0


def test_available_memory_is_read_in_bytes(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  16 kB\nMemAvailable:    3 kB\n")
    assert available_memory(file) == 3072
    assert available_memory(tmp_path / "none") is None


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("srl.train.dry_run.plan.measure", lambda *given: SPEED)
    monkeypatch.setattr("srl.train.threads.usable_cores", lambda: 1)


@pytest.mark.usefixtures("quick")
def test_dry_run_of_the_preset_needs_no_model_and_writes_nothing(workspace, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["--preset", "one-gpu", "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0
    for said in (
        "494.0 M parameters",
        "17.6 M",
        "grpo: 64 questions × 5",
        "total",
        "a step",
        "(not downloaded yet)",
    ):
        assert said in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("quick")
def test_dry_run_speaks_json(saved):
    arguments = ["--preset", "one-gpu", "--model", str(saved["llama"]), "--dry-run", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert found["shape"]["kind"] == "llama"
    assert found["rollout_peak"] == sum(item["rollout"] for item in found["memory"]["parts"])
    assert found["update_peak"] == sum(item["update"] for item in found["memory"]["parts"])
    assert found["assumed"] == {"prompt": 256, "written": 512, "read": 750}
    assert found["time"]["total_s"] > 0


@pytest.mark.usefixtures("quick")
def test_plan_of_the_tiny_world_is_that_of_its_base(saved, monkeypatch):
    monkeypatch.setitem(make_missing.BASE_MODELS, "tiny", saved["qwen2"])
    found = plan_local(load_config("tiny", algo="ppo", flags={"model.device": "cpu"}).config)
    assert found.shape.critic > 0
    assert "80 steps of fine-tuning" in found.facts["trained"]
    assert found.memory.rollout == found.rollout_peak
    table = [line for line in plan_lines(found) if line.startswith("total")]
    assert gib(found.update_peak) in table[0]


@pytest.mark.usefixtures("quick")
def test_model_that_reads_less_than_an_episode_is_warned_of(saved):
    found = plan_local(configured(saved["qwen2"]))
    assert any("this model's context is 1,024" in text for text in found.warnings)


@pytest.mark.usefixtures("quick")
def test_plan_says_that_float16_is_not_trained_in(saved):
    found = plan_local(configured(saved["qwen2"], model__dtype="float16"))
    assert any("model.dtype = float16" in text for text in found.warnings)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout__engine": "vllm"}, "takes rollout.gpu_memory_utilization=0.5 of the GPU"),
        ({"rollout__engine": "vllm", "rollout__top_p": 0.9,
          "algorithm__rollout_correction__rollout_is": "off"}, "vLLM renormalises what is left"),
        ({"rollout__engine": "openai"}, "rollout.engine = openai is not for training"),
        ({"model__dtype": "float16"}, "model.dtype = float16"),
    ],
)  # fmt: skip
def test_plan_of_another_machine_says_what_is_refused_there(saved, monkeypatch, settings, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = plan_local(configured(saved["qwen2"], model__device="cuda", **settings))
    assert any(said in text for text in found.warnings)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model__path": "no/such"}, "no model directory no/such"),
        ({"data__corpus": "pages.jsonl"}, "set data.train_files too"),
        ({"data__train_files": ("a.parquet",)}, "nothing to search: set search.index"),
    ],
)
def test_run_that_cannot_start_is_one_clear_line(saved, settings, said):
    with pytest.raises(UserError, match=said) as caught:
        plan_local(configured(saved["qwen2"], **settings))
    assert "\n" not in str(caught.value)


FITTING = {
    "3B GRPO on 80 GB": ("80 GB", "grpo", {"model.path": "Qwen/Qwen2.5-3B", "model.lora_rank": 0}),
    "3B PPO on 80 GB": ("80 GB", "ppo", {"model.path": "Qwen/Qwen2.5-3B", "model.lora_rank": 0}),
    "7B LoRA on 24 GB": ("24 GB", "grpo", {"model.path": "Qwen/Qwen2.5-7B"}),
    "0.5B on 16 GB": ("16 GB", "grpo", {}),
}


@pytest.mark.parametrize(("gpu", "algo", "settings"), FITTING.values(), ids=FITTING)
def test_published_models_fit_their_gpus_with_what_the_plan_says_to_type(gpu, algo, settings):
    """Rollout, log-probs, update and checkpoint, in nine tenths of the GPU."""
    config = load_config("one-gpu", None, algo, {**settings, "model.device": "cpu"}).config
    path, memory, critic = str(config.model.path), GPUS[gpu] * 2**30, algo == "ppo"
    shape = shape_of(config, path, needs_critic=critic)
    found = settings_that_fit(config, shape, sizes(config, shape, path, GPU), memory)
    assert found is not None
    assert "model.lora_rank" not in found, "what is trained stays as it was"
    changed = config.with_settings(found)
    fitted = footprint(shape_of(changed, path, needs_critic=critic), changed, GPU)
    assert all(getattr(fitted, phase) <= 0.9 * memory for phase in LOCAL)
    assert fitted.checkpoint > 0


def test_a_critic_that_is_a_copy_does_not_fit_and_the_plan_proposes_an_adapter():
    given = {
        "model.path": "Qwen/Qwen2.5-3B",
        "model.lora_rank": 0,
        "critic.lora_rank": 0,
        "model.device": "cpu",
    }
    config = load_config("one-gpu", None, "ppo", given).config
    shape = shape_of(config, "Qwen/Qwen2.5-3B", needs_critic=True)
    size = sizes(config, shape, "Qwen/Qwen2.5-3B", GPU)
    found = settings_that_fit(config, shape, size, GPUS["80 GB"] * 2**30)
    assert found is not None
    assert found["critic.lora_rank"] == 32
    lines = list(
        memory_warnings(config, shape, "Qwen/Qwen2.5-3B", Device("cuda", "a GPU", int(79.6 * 2**30)), GPU)
    )
    assert any("--set critic.lora_rank=32" in line for line in lines)
    fsdp = replace(GPU, kind="fsdp", workers=2)
    device = Device("cuda", "a GPU", 20 * 2**30)
    others = list(memory_warnings(config, shape, "Qwen/Qwen2.5-3B", device, fsdp, ("update",)))
    assert others
    assert not any("critic.lora_rank" in line for line in others), "verl's critic has no adapter"


def test_a_plan_for_a_gpu_that_is_not_here_says_what_to_type_on_each(saved, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configured(saved["qwen2"], model__device="cuda", model__dtype="auto")
    plan = plan_local(config)
    assert plan.time is None
    assert plan.shape.itemsize == 2
    assert [fit.name for fit in plan.local_fits] == list(GPUS)
    lines = plan_lines(plan)
    assert "16 GB   fits" in lines
    (head,) = (line for line in lines if line.startswith("memory, estimated"))
    assert head.split()[-4:] == ["rollout", "log-probs", "update", "checkpoint"]
    assert not [line for line in lines if line.startswith("time,")]


def test_an_offloaded_reference_is_on_a_gpu_for_its_pass_only(saved):
    kept, offloaded = (
        configured(saved["qwen2"], actor__use_kl_loss=True, ref__param_offload=away) for away in (False, True)
    )
    shape = shape_of(kept, saved["qwen2"], needs_critic=False)
    for config, phases in ((kept, LOCAL), (offloaded, ["logprobs"])):
        (found,) = (p for p in footprint(shape, config, GPU).parts if p.name == "reference weights")
        assert [phase for phase in LOCAL if getattr(found, phase)] == list(phases)
    (on_cpu,) = (p for p in footprint(shape, offloaded, CPU).parts if p.name == "reference weights")
    assert all(getattr(on_cpu, phase) for phase in LOCAL)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"max_ckpt_to_keep": 3}, "the last 3 and the best kept: up to 5.00 GiB"),
        ({"max_ckpt_to_keep": 3, "keep_best_ckpt": False}, "the last 3 kept: up to 4.00 GiB"),
        ({"max_ckpt_to_keep": 3, "test_freq": 0}, "the last 3 kept: up to 4.00 GiB"),
        ({"max_ckpt_to_keep": 3, "save_freq": 150}, "the last 3 and the best kept: up to 2.00 GiB"),
        ({}, "all 6 kept: up to 6.00 GiB"),
        ({"save_freq": 0}, "all 1 kept: up to 1.00 GiB"),
        ({"save_freq": 70}, "all 5 kept: up to 5.00 GiB"),
    ],
)
def test_disk_of_the_checkpoints_counts_the_best_and_the_one_being_written(sets, said):
    trainer = Trainer(**{"total_training_steps": 300, "save_freq": 50, "test_freq": 50, **sets})
    assert disk_of_checkpoints(trainer, 2**30) == f"1.00 GiB each, {said}"


@pytest.mark.parametrize(
    ("there", "sets", "most"),
    [
        ([50, 100], {}, 6),  # 150, 200, 250 and 300 are to come
        ([50, 100, 150, 200, 250, 300], {}, 6),  # none is
        ([100, 150, 200], {"max_ckpt_to_keep": 3}, 5),  # the best is not there yet, and one is being written
        ([50, 200, 250], {"max_ckpt_to_keep": 2}, 4),
        ([50, 250], {"max_ckpt_to_keep": 2}, 3),  # one is to come
        ([50, 100, 150, 200], {"max_ckpt_to_keep": 1}, 5),  # it was a run that kept more
        ([120], {"save_freq": 70}, 5),  # a run of 120 steps that was made longer: 140, 210, 280 and 300
        ([100], {"save_freq": 0}, 2),
    ],
)
def test_a_resumed_run_adds_the_checkpoints_to_come_to_those_there(there, sets, most):
    trainer = Trainer(**{"total_training_steps": 300, "save_freq": 50, "test_freq": 50, **sets})
    assert disk_space.kept_checkpoints(trainer, 300, there).most == most


@pytest.mark.parametrize(
    ("there", "sets", "most"),
    [
        ([], {}, 8),  # 50, 100, 150, 160, and of the validations 30, 60, 90, 120
        ([], {"save_freq": 0}, 6),  # each validation may be the best so far, and the last step
        ([], {"save_freq": 30}, 6),
        ([], {"test_freq": 0}, 4),
        ([30, 60, 100], {}, 6),  # 120, 150 and 160 are to come
        ([], {"max_ckpt_to_keep": 2}, 4),
    ],
)
def test_validations_that_save_the_best_so_far_are_counted(there, sets, most):
    trainer = Trainer(**{"save_freq": 50, "test_freq": 30, **sets})
    assert disk_space.kept_checkpoints(trainer, 160, there, saves_best=True).most == most


def test_the_disk_of_a_resumed_run_has_room_for_the_checkpoints_to_come_alone(monkeypatch, tmp_path):
    for step in (50, 100):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    trainer = Trainer(total_training_steps=300, save_freq=50)
    for free, fits in ((4 * 2**30, True), (4 * 2**30 - 1, False)):
        monkeypatch.setattr(
            disk_space.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free)
        )
        said = disk_space.lack_of_room(trainer, 300, tmp_path, 2**30)
        assert (said is None) is fits
    assert said.startswith("the checkpoints to come take up to 4.00 GiB (4 of 1.00 GiB), and the disk of ")
    assert said.endswith(" free; free some space, or set trainer.max_ckpt_to_keep=1")


@pytest.mark.parametrize(("kept", "most"), [(None, 30), (2, 4), (1, 3)])
def test_every_round_of_rejection_sampling_is_saved_and_as_many_are_kept_as_of_other_runs(
    monkeypatch, tmp_path, kept, most
):
    trainer = Trainer(save_freq=10, test_freq=0, max_ckpt_to_keep=kept)
    for free, fits in ((most * 2**30, True), (most * 2**30 - 1, False)):
        monkeypatch.setattr(
            disk_space.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free)
        )
        said = disk_space.lack_of_room(trainer, 30, tmp_path, 2**30, each_step=True)
        assert (said is None) is fits
    assert f"take up to {most}.00 GiB ({most} of 1.00 GiB)" in said
    assert ("or set trainer.max_ckpt_to_keep=1" in said) is (kept != 1)


def test_a_disk_without_room_for_the_checkpoints_is_a_warning(saved, monkeypatch, tmp_path):
    monkeypatch.setenv("SRL_WORKSPACE", str(tmp_path / "not" / "there"))
    config = configured(saved["qwen2"], algorithm__name="grpo", trainer__max_ckpt_to_keep=2)
    size = checkpoint_bytes(shape_of(config, saved["qwen2"], needs_critic=False), CPU)
    most = disk_space.kept_checkpoints(config.trainer, config.trainer.total_training_steps).most
    for missing, warned in ((0, []), (1, [True])):
        disk = SimpleNamespace(free=most * size - missing)
        monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder, disk=disk: disk)
        said = [text for text in plan_local(config).warnings if "checkpoints" in text]
        assert ["free some space, or set trainer.max_ckpt_to_keep=1" in text for text in said] == warned
