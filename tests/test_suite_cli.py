"""`srl eval run --suite` and `--limit`, with a model whose answers are scripted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.cli import main
from srl.data.parquet import write_questions
from srl.evaluate.intervals import wilson_interval
from srl.evaluate.question_sets import draw
from srl.models.weights import save_model
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Sampling, ScriptedEngine
from srl.trajectory import Question

PLAIN = [
    "data.template=r1", "rollout.search=false", "data.max_prompt_length=512", "data.max_response_length=128",
    "rollout.max_turns=1", "rollout.max_turn_tokens=64", 
    "trainer.threads=1",
]  # fmt: skip


def questions(source: str, count: int) -> list[Question]:
    return [
        Question(f"{source}/test/{i}", f"who is {i}?", ("Ada Brix",), source, "test") for i in range(count)
    ]


class Says(ScriptedEngine):
    """Right for every other question of nq and every fifth of popqa; counts the questions."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, lambda request, turn: "")
        self.asked: list[str] = []

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        source, _, number = request_id.split("/")[2:5]
        self.asked.append(f"{source}/test/{number}")
        right = int(number) % (2 if source == "nq" else 5) == 0
        ids = tuple(self.codec.encode_text(f"<answer>{'Ada Brix' if right else 'nobody'}</answer>"))
        return Completion(ids, (0.0,) * len(ids), "stop")


SETS = {"nq": 40, "popqa": 10}


class Place:
    """A model, and a suite of two sets: 40 questions of nq and 10 of popqa."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], engines: list[Says]) -> None:
        self.folder, self.capsys, self.engines = folder, capsys, engines
        save_model(tiny_model(max_length=1024), byte_level_tokenizer(), folder / "model")
        for name, count in SETS.items():
            write_questions(folder / f"{name}.parquet", questions(name, count))
        self.manifest = folder / "mine.yaml"
        self.manifest.write_text(
            "format: 1\nname: mine\nsets:\n"
            "  - {name: nq, file: nq.parquet, rows: 40}\n  - {name: popqa, file: popqa.parquet, rows: 10}\n"
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of `srl eval run MODEL …`."""
        sets = [word for one in PLAIN for word in ("--set", one)]
        code = main(["eval", "run", str(self.folder / "model"), *arguments, *sets])
        out = self.capsys.readouterr()
        return code, out.out, out.err

    def suite(self, *arguments: str) -> tuple[int, str, str]:
        return self.run("--suite", str(self.manifest), *arguments)

    @property
    def asked(self) -> set[str]:
        return set(self.engines[-1].asked)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    engines: list[Says] = []

    def load(config: Any, policy: Any, note: Any) -> Says:
        engines.append(Says(policy.codec))
        return engines[-1]

    monkeypatch.setattr("srl.train.load_components.load_engine", load)
    return Place(tmp_path, capsys, engines)


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_suite_prints_a_row_for_each_set_and_their_means(place: Place) -> None:
    code, out, err = place.suite()
    assert code == 0, err
    lines = [cells(line) for line in out.splitlines()]
    _, *rows = lines[lines.index(["questions", "EM", "F1", "cover-EM"]) :]
    low, high = wilson_interval(0.5, 40)
    assert rows[0] == ["nq", "40 of 40", *[f"0.500 ({low:.3f} to {high:.3f})"] * 3]
    assert [row[:2] for row in rows] == [
        ["nq", "40 of 40"], ["popqa", "10 of 10"],
        ["mean over sets", "50 of 50"], ["all questions", "50 of 50"],
    ]  # fmt: skip
    assert [row[2].split()[0] for row in rows] == ["0.500", "0.200", "0.350", "0.440"]
    assert len(place.asked) == 50


def test_a_limit_says_its_error_and_a_larger_one_generates_only_what_is_new(place: Place) -> None:
    code, out, err = place.suite("--limit", "16", "--json")
    assert code == 0, err
    rows = {row["name"]: row for row in json.loads(out)["no_search"]["sets"]}
    assert {name: (row["used"], row["size"]) for name, row in rows.items()} == {
        "nq": (8, 40), "popqa": (8, 10), "mean over sets": (16, 50), "all questions": (16, 50),
    }  # fmt: skip
    assert set(rows["nq"]["measures"]["em"]) == {"mean", "interval", "full"}
    first = place.asked
    assert first == set(draw({n: [q.id for q in questions(n, c)] for n, c in SETS.items()}, 16).ids)
    code, out, err = place.suite("--limit", "30", "--run", "last")
    assert code == 0, err
    assert re.search(r"^nq\s+20 of 40", out, re.MULTILINE)
    assert (len(place.asked), first & place.asked) == (14, set())


@pytest.mark.parametrize("arguments", [["--suite", "search-r2"], ["--suite", "search-r1"], []])
def test_a_mistake_is_one_line_before_a_model_is_loaded(place: Place, arguments: list[str]) -> None:
    code, out, err = place.run(*arguments)
    assert (code, out, place.engines) == (2, "", [])
    assert [line for line in err.splitlines() if line.startswith("srl: ")] == err.splitlines()[-1:]


def test_data_sources_of_several_files_are_sets_too(place: Place) -> None:
    files = [word for name in SETS for word in ("--data", str(place.folder / f"{name}.parquet"))]
    code, out, err = place.run(*files, "--limit", "16", "--json")
    assert code == 0, err
    assert [row["used"] for row in json.loads(out)["no_search"]["sets"]] == [8, 8, 16, 16]
