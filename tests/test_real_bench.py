"""The pieces of `bench/real`: what a part types, resuming, the figures, and what the tables make of them."""

import json
from pathlib import Path

import pytest
from bench.real import parts
from bench.real.commands import Bench

from srl.config.load import load_config

SUMMARY = {"run_id": "r", "algo": "grpo", "steps": 9, "seconds": 1.0}


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


@pytest.mark.parametrize("part", ["grpo", "ppo", "mask", "rft", "r1"])
def test_reinforcement_learning_asks_nothing_that_the_cold_start_was_shown(bench, typed, monkeypatch, part):
    monkeypatch.setattr(parts, "start", lambda bench: "cold@best")
    monkeypatch.setattr(parts, "write_answers", lambda bench, name, text: bench.prepared / name)
    monkeypatch.setattr(parts, "mixed", lambda shown: f"sft.train_files={shown}")
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
