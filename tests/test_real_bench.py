"""The pieces of `bench/real`: what a part types, resuming, the figures, and what the tables make of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.real import measure, parts
from bench.real.commands import Bench
from tests.shared_data import shared_data

from srl.config.load import load_config
from srl.evaluate.episode_results import EpisodeResult

ROOT = Path(__file__).parent.parent
SUMMARY = {"run_id": "r", "algo": "grpo", "steps": 9, "seconds": 1.0}


def result(name: str, em: float = 0.0, hops: int | None = 2, evidence: float | None = 1.0) -> EpisodeResult:
    return EpisodeResult(
        question_id=name, sample=0, data_source="hotpotqa", split="test", hops=hops, kind="bridge",
        document="", valid=True, end="answered", em=em, f1=em, cover_em=em, answer_shown=True,
        evidence_recall=evidence, searches=2, valid_searches=2, failed_searches=0, named_searches=(), turns=3,
        valid_actions=3, tokens=40, total_tokens=400, seconds=1.0,
    )  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "prepared").mkdir()
    return Bench(tmp_path, tmp_path / "data", tmp_path / "model", seed=1, preset="small")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is typed, instead of `srl`, which begins a run and prints its summary."""
    commands: list[list[str]] = []

    def srl(bench: Bench, workspace: Path, *arguments: object) -> str:
        commands.append([*map(str, arguments)])
        (workspace / "runs" / "r").mkdir(parents=True, exist_ok=True)
        (workspace / "runs" / "r" / "run.json").write_text("{}")
        return f"a note\n{json.dumps(SUMMARY)}\n"

    monkeypatch.setattr(Bench, "srl", srl)
    return commands


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_a_run_that_was_stopped_is_resumed_and_a_finished_one_left_alone(bench, typed, monkeypatch):
    def stopped(*arguments: Any) -> str:
        printing(*arguments)
        raise KeyboardInterrupt

    printing: Callable[..., str] = Bench.srl
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "srl", stopped)
        with pytest.raises(KeyboardInterrupt):
            bench.train_once("grpo", "--algo", "grpo")
    assert bench.trained("grpo") is None
    found = bench.train_once("grpo", "--algo", "grpo")
    assert typed == [
        ["train", "--preset", "small", "--seed", "1", "--algo", "grpo", "--json"],
        ["train", "--resume", "--run", "r", "--json"],
    ]
    assert found.summary == SUMMARY
    assert bench.train_once("grpo", "--algo", "grpo") == found == bench.trained("grpo")
    assert len(typed) == 2
    assert replace(bench, seed=2).trained("grpo") is None


@pytest.mark.parametrize("part", ["grpo", "ppo", "mask", "rft", "r1"])
def test_reinforcement_learning_asks_nothing_that_the_cold_start_was_shown(bench, typed, monkeypatch, part):
    monkeypatch.setattr(parts, "start", lambda bench: "cold@best")
    monkeypatch.setattr(parts, "write_answers", lambda bench, name, text: bench.prepared / name)
    getattr(parts, part)(bench)
    assert f"data.exclude_files={bench.prepared / parts.SHOWN}" in typed[-1]
    mixed = [setting.split("=")[0] for setting in typed[-1] if setting.startswith("data.mix.")]
    assert sorted(mixed) == sorted(f"data.mix.{name}" for name in parts.ASKED)


def test_rejection_sampling_and_the_grpo_beside_it_sample_as_many_episodes(bench, typed, monkeypatch):
    monkeypatch.setattr(parts, "start", lambda bench: "cold@best")
    parts.rft(bench)
    rounds, beside = typed
    assert [option(command, "--algo") for command in typed] == ["rft", "grpo"]
    sets = dict(setting.split("=", 1) for setting in rounds if "=" in setting)
    preset = load_config("small").config
    episodes = int(sets["rft.questions"]) * int(sets["rollout.n"]) * int(option(rounds, "--steps"))
    assert episodes == preset.data.train_batch_size * preset.rollout.n * int(option(beside, "--steps"))


def test_difference_is_of_the_questions_that_both_have():
    before = [result(f"q{number}") for number in range(60)]
    after = [result(f"q{number}", float(number % 2)) for number in range(20, 80)]
    found = measure.difference(measure.paired(before, after))
    assert found is not None
    assert (found["questions"], found["before"], found["after"], found["difference"]) == (40, 0.0, 0.5, 0.5)
    assert found["p"] < 0.001
    assert measure.difference([]) is None


def test_a_paired_test_leaves_comparisons_out(bench, monkeypatch):
    asked = [("a", 0.0, "bridge_comparison"), ("b", 1.0, "bridge"), ("c", 0.0, "")]
    episodes = [replace(result(name, em), kind=kind) for name, em, kind in asked]
    monkeypatch.setattr(measure, "results_of", lambda bench, setting: episodes)
    tests = measure.compared(bench, "+ GRPO", {}, {})["+ GRPO"]
    assert {which: test["questions"] for which, test in tests.items()} == {
        "all": 3, "hops>1": 3, "no comparisons": 2,
    }  # fmt: skip


def test_results_have_nothing_of_this_machine(bench):
    bench.once("row-base", lambda: {"closed-book": {"em": 0, "place": "x"}})
    bench.once("curves-grpo-s0", lambda: {"val/em": {"steps": [0], "values": [0.5]}})
    found = measure.collected(bench)
    assert found["rows"] == {"closed-book": {"0": {"em": 0}}}
    assert found["curves"] == {"grpo": {"0": {"val/em": {"steps": [0], "values": [0.5]}}}}


@pytest.mark.slow
def test_parts_run_on_published_data_and_a_model_that_is_at_hand(tmp_path):
    model = os.environ.get("SRL_BENCH_MODEL")
    if not model:
        pytest.skip("$SRL_BENCH_MODEL names no model")
    parts_to_run = "cold-start", "grpo", "rft", "base", "evaluate", "curves", "transcript"
    settings = "model.lora_rank=0", "model.gradient_checkpointing=false", "model.device=cpu"
    command = [sys.executable, "bench/real", "--smoke", "--only", *parts_to_run, "--preset", "one-gpu",
               "--model", model, "--cache", str(tmp_path)]  # fmt: skip
    command += ["--data", str(shared_data("squad").parent)]
    command += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(command, cwd=ROOT, check=True)
    made = {path.stem for path in (tmp_path / "state").iterdir()}
    assert made >= {"data", "demonstrations", "cold-start-s0", "grpo-s0", "row-base", "row-grpo-s0",
                    "row-rft-s0", "compared-cold-start-grpo-s0", "curves-grpo-s0",
                    "transcript-grpo-s0"}  # fmt: skip
