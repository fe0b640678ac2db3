"""The plan of a run: what it counts is what is allocated, and what it estimates bounds what is used."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.live_tensors import Live, bytes_of
from tests.tiny_models import byte_level_tokenizer, tiny_model
from typer.testing import CliRunner

from srl.cli.train import app
from srl.config import Config, load_config
from srl.errors import UserError
from srl.model import load_model, save_model
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.train.dry_run.memory import Layout, cache_bytes, footprint, gib
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.plan import _available_memory, plan_local
from srl.train.dry_run.remedy import Device, memory_warnings
from srl.train.dry_run.step_time import DeviceSpeed, EpisodeTokens, half_of_the_budgets, measure, step_times
from srl.train.dry_run.text import plan_lines
from srl.train.load_components import model_options
from srl.trajectory import Question, Segment, Trajectory
from srl.update.actor import ActorLoss, Experience, accumulate_actor
from srl.update.batch import collate
from srl.update.critic import Critic
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
    held = [weight for optimiser in optimisers for weight in optimiser.masters]
    gradients = bytes_of([weight.grad for weight in held])
    for optimiser in optimisers:
        optimiser.step()

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


@pytest.mark.parametrize(("vocabulary", "prompt"), [(6000, 8), (400, 240)])
def test_rollout_takes_about_what_is_estimated_and_not_more(tmp_path, monkeypatch, vocabulary, prompt):
    """Eight episodes at once: drawing from a large vocabulary, or attending to many keys."""
    monkeypatch.setattr("srl.train.dry_run.memory.PADDED_TOKENS", 1)
    monkeypatch.setattr("srl.rollout.cached_forward.PADDED_TOKENS", 1)
    path, slots, longest = tmp_path / "model", 8, 256
    save_model(tiny_model(vocab_size=vocabulary, width=64, ffn=96), byte_level_tokenizer(), path)
    config = configured(
        path, rollout__max_num_seqs=slots, data__max_prompt_length=1, data__max_response_length=longest - 1
    )
    shape, model = shape_of(config, path, needs_critic=False), tiny(path)
    engine = TorchEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=slots, max_model_len=longest)

    async def episodes() -> None:
        wanted = [
            engine.generate(str(index), [5 + index] * prompt, Sampling(max_tokens=8))
            for index in range(slots)
        ]
        await asyncio.gather(*wanted)

    with Live(list(model.parameters())) as live:
        asyncio.run(episodes())
    own = live.peak - cache_bytes(shape, slots, longest)
    assert 0.95 * own <= part(shape, config, "rollout buffers", "rollout") <= 1.3 * own


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
    model = load_model(path, **model_options(config.model)).train()
    batch, loss = experience(rows, length, vocabulary), ActorLoss(entropy_coeff=entropy_coeff)
    accumulate_actor(model, batch, loss=loss, max_tokens=rows * length)  # gradients exist now
    with Live(list(model.parameters())) as live:
        accumulate_actor(model, batch, loss=loss, max_tokens=rows * length)
    estimated = part(shape, config, "activations") + part(shape, config, "backward buffers")
    assert 0.97 * live.peak <= estimated <= 1.5 * live.peak


def test_reference_is_held_only_where_there_is_a_kl_and_no_adapter(saved):
    path = saved["qwen2"]

    def reference(**settings: object) -> int:
        return shape_of(configured(path, **settings), path, needs_critic=False).reference

    whole = shape_of(configured(path), path, needs_critic=False).parameters
    assert reference() == 0
    assert reference(actor__use_kl_loss=True) == reference(algorithm__use_kl_in_reward=True) == whole
    assert reference(actor__use_kl_loss=True, model__lora_rank=4) == 0
    assert reference(actor__use_kl_loss=True, model__lora_rank=4, ref__path=str(path)) == whole


def test_a_gpu_gives_the_cache_back_before_the_update(saved):
    config = configured(saved["qwen2"])
    shape = shape_of(config, saved["qwen2"], needs_critic=False)
    kept, given_back = (footprint(shape, config, layout) for layout in (CPU, GPU))
    assert kept.rollout == given_back.rollout
    assert kept.update - given_back.update == part(shape, config, "KV cache", "rollout")


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
        itemsize=4, parameters=26, body=10, adapter=0, trainable=26, critic=0, reference=0,
    )  # fmt: skip
    config = configured("x", data__train_batch_size=1, trainer__total_training_steps=3)
    found = step_times(shape, config, DeviceSpeed(1.0, 1e9, 0.5), EpisodeTokens(prompt=2, written=1, read=1))
    forward, head = 4 * (2 * 10 + 4 * 2 * 4), 2 * 2 * 8
    assert found.logprobs_s == forward + head
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
    assert half_of_the_budgets(config) == EpisodeTokens(prompt=256, written=512, read=768)
    alone = config.with_settings({"rollout.search": False})
    assert half_of_the_budgets(alone).read == 0


def test_available_memory_is_read_in_bytes(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  16 kB\nMemAvailable:    3 kB\n")
    assert _available_memory(file) == 3072
    assert _available_memory(tmp_path / "none") is None


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
    assert found["assumed"] == {"prompt": 256, "written": 512, "read": 768}
    assert found["time"]["total_s"] > 0


@pytest.mark.usefixtures("quick")
def test_plan_of_the_tiny_world_is_that_of_its_base(saved, monkeypatch):
    monkeypatch.setattr("srl.train.dry_run.plan.BASE_MODEL", saved["qwen2"])
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
        ({"model__path": "no/such"}, "no model directory no/such"),
        ({"data__corpus": "pages.jsonl"}, "set data.train_files too"),
        ({"data__train_files": ("a.parquet",)}, "nothing to search: set search.index"),
    ],
)
def test_run_that_cannot_start_is_one_clear_line(saved, settings, said):
    with pytest.raises(UserError, match=said) as caught:
        plan_local(configured(saved["qwen2"], **settings))
    assert "\n" not in str(caught.value)
