"""The plan of a run: what it shows, what it warns of, and that it starts nothing."""

import json
from pathlib import Path

import pytest
from tests.test_memory import configured
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.verl_configs import GPU, made
from typer.testing import CliRunner

from srl.cli.train import app
from srl.config import load_config
from srl.errors import UserError
from srl.models.weights import save_model
from srl.train.dry_run import plan_run, planned_job
from srl.train.memory import GPUS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    save_model(tiny_model(width=64, ffn=96, max_length=1024), byte_level_tokenizer(), folder)
    return folder


def typed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("Qwen/Qwen2.5-0.5B", ("--preset", "one-gpu", "--set", "model.device=cuda")),
        ("meta-llama/Llama-3.2-3B", ("--preset", "search-r1-llama", "--algo", "ppo")),
        ("Qwen/Qwen2.5-32B", ("--backend", "verl", "--preset", "search-r1-32b", "--algo", "grpo")),
    ],
)
def test_dry_run_needs_neither_weights_nor_data_and_writes_nothing(monkeypatch, tmp_path, model, arguments):
    monkeypatch.chdir(tmp_path)
    printed = typed(*arguments)
    assert f"{model} (not downloaded yet)" in printed
    assert ("data.train_files" in printed) == ("one-gpu" not in arguments), "its questions are made up"
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(("backend", "devices"), [("local", 1), ("verl", len(GPUS))])
def test_dry_run_speaks_json(saved, backend, devices):
    preset = ("--preset", "one-gpu", "--model", str(saved), "--backend", backend)
    found = json.loads(typed(*preset, "--set", "model.device=cpu", "--json"))
    assert found["shape"]["kind"] == "qwen2"
    assert {part["name"] for part in found["memory"]} >= {"policy weights", "gradients"}
    assert (len(found["fits"]), found["available"] is None) == (devices, backend == "verl")


def test_a_model_that_reads_less_than_an_episode_and_the_share_of_vllm_are_told(saved, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = plan_run(configured(saved, model__device="cuda", rollout__engine="vllm"))
    assert any("data.max_prompt_length" in text for text in plan.warnings)
    assert any("rollout.gpu_memory_utilization" in text for text in plan.notes)
    assert "KV cache" not in [part.name for part in plan.memory], "vLLM has its own"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model__path": "no/such"}, "no/such"),
        ({"data__corpus": "pages.jsonl"}, "data.train_files"),
        ({"data__train_files": ("a.parquet",)}, "search.index"),
    ],
)
def test_run_that_cannot_be_planned_is_one_line(saved, settings, named):
    with pytest.raises(UserError, match=named):
        plan_run(configured(saved, **settings))


@pytest.mark.parametrize(("room", "fits"), [(10**12, {}), (10**6, None)])
def test_a_plan_says_whether_the_run_fits_this_machine(saved, monkeypatch, room, fits):
    monkeypatch.setattr("srl.train.dry_run.available_memory", lambda: room)
    plan = plan_run(configured(saved, data__max_response_length=100, data__max_prompt_length=100))
    assert list(plan.fits.values()) == [fits]
    assert plan.warnings == ()


# verl


def test_plan_of_a_published_run_fits_the_gpus_it_was_published_for(monkeypatch):
    """Four machines of eight H100 of 80 GB, without verl."""
    monkeypatch.setattr("srl.train.dry_run.find_spec", lambda name: None)
    config = load_config("search-r1-32b", algo="ppo").config
    assert not planned_job(config).cpu
    assert plan_run(config, "verl").fits["80 GB"] == {}


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("cluster.tensor_model_parallel_size=3", "cluster.tensor_model_parallel_size"),
        ("data.train_batch_size=4", "actor.ppo_mini_batch_size"),
    ],
)
def test_plan_says_what_would_end_the_run(setting, key):
    pytest.importorskip("hydra")
    config = made(setting).with_settings({"cluster.n_gpus_per_node": GPU.gpus_per_node})
    assert any(text.startswith(key) for text in plan_run(config, "verl").warnings)
