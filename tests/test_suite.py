"""Suites: the manifest of Search-R1's sets and a user's own; files, and changed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.shared_data import shared_data

from srl.data.parquet import write_questions
from srl.data.sources import SOURCES
from srl.data.suite import Suite, read_sets, read_suite
from srl.errors import UserError
from srl.trajectory import Question


def questions(source: str, count: int, split: str = "test") -> list[Question]:
    return [
        Question(f"{source}/{split}/{i}", f"who is {i} of {source}?", (f"name {i}", "N"), source, split)
        for i in range(count)
    ]


def jsonl(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(source: str, count: int) -> list[Mapping[str, Any]]:
    """The same questions as rows of FlashRAG."""
    return [
        {"id": str(i), "question": f"who is {i} of {source}", "golden_answers": ["N", f"name {i}"]}
        for i in range(count)
    ]


def manifest(path: Path, *sets: str, form: object = 1) -> str:
    lines = (f"  - {{{one}}}\n" for one in sets)
    path.write_text(f"format: {form}\nname: mine\nsets:\n{''.join(lines)}")
    return str(path)


def suite_of(*names: str, rows: int | None = None) -> Suite:
    sets = [{"name": name, "source": name, "split": "test", "rows": rows} for name in names]
    return Suite.model_validate({"name": "s", "sets": sets})


def test_search_r1_has_its_seven_sets_with_the_splits_it_evaluates() -> None:
    suite = read_suite("search-r1")
    assert {one.name: (one.split, one.rows) for one in suite.sets} == {
        "nq": ("test", 3610),
        "triviaqa": ("test", 11313),
        "popqa": ("test", 14267),
        "hotpotqa": ("validation", 7405),
        "2wikimultihopqa": ("validation", 12576),
        "musique": ("validation", 2417),
        "bamboogle": ("test", 125),
    }
    assert sum(one.rows or 0 for one in suite.sets) == 51713
    assert all(one.split in SOURCES[one.source].hub_files for one in suite.sets)
    rows = {one.name: one.rows for one in suite.sets}
    assert len(shared_data("nq/NQ-open.dev.jsonl").read_text().splitlines()) == rows["nq"]
    for name, file in (("hotpotqa", "hotpot_dev_v1_simplified"), ("bamboogle", "bamboogle")):
        assert len(json.loads(shared_data(f"{name}/{file}.json").read_text())) == rows[name]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("name: a, file: a.jsonl, row: 3", r"sets\[0\]\.row"),
        ("name: a, file: a.jsonl, rows: many", r"sets\[0\]\.rows"),
        ("name: a, file: a.jsonl, rows: 0", r"sets\[0\]\.rows"),
        ("file: a.jsonl", r"sets\[0\]\.name"),
        ("name: a", "'a'"),
        ("name: a, source: nq", "'a'"),
        ("name: a, source: nk, split: test", "'nk'"),
        ("name: a, source: nq, split: tset", "'tset'"),
        ("name: a, source: wiki-18, split: test", "'a'"),
    ],
)
def test_a_mistake_in_a_manifest_is_named(tmp_path: Path, line: str, place: str) -> None:
    with pytest.raises(UserError, match=place):
        read_suite(manifest(tmp_path / "mine.yaml", line))


def test_the_manifest_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    [example] = re.findall(r"```yaml\n(format: 1\n.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    suite = read_suite(str(tmp_path / "mine.yaml"))
    assert [(one.name, one.split, one.rows) for one in suite.sets] == [
        ("ours", "", 500),
        ("nq", "validation", None),
    ]


def test_a_set_named_twice_and_an_unknown_suite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'a'"):
        read_suite(manifest(tmp_path / "mine.yaml", "name: a, file: a.jsonl", "name: a, file: b.jsonl"))
    with pytest.raises(UserError, match="'search-r2'"):
        read_suite("search-r2")


def test_sets_are_found_by_name_and_by_split_and_in_one_merged_file(tmp_path: Path) -> None:
    suite = suite_of("nq", "popqa", "musique")
    (tmp_path / "popqa").mkdir()
    jsonl(tmp_path / "nq.jsonl", rows_of("nq", 3))
    write_questions(tmp_path / "popqa" / "test.parquet", questions("popqa", 4))
    write_questions(tmp_path / "test.parquet", [*questions("nq", 9), *questions("musique", 5)])
    found = read_sets(suite, tmp_path)
    assert {name: len(asked) for name, (_, asked) in found.items()} == {"nq": 3, "popqa": 4, "musique": 5}
    assert [item.id for item in found["nq"][1]] == ["nq/test/0", "nq/test/1", "nq/test/2"]


def test_an_id_of_two_sets_is_an_error_and_so_is_one_that_is_repeated(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{**row, "data_source": "x"} for row in rows_of("x", 2)])
    suite = read_suite(manifest(tmp_path / "m.yaml", "name: a, file: a.jsonl", "name: b, file: a.jsonl"))
    with pytest.raises(UserError, match="'x/train/0'"):
        read_sets(suite, tmp_path)
    jsonl(tmp_path / "a.jsonl", rows_of("x", 2) + rows_of("x", 1))
    with pytest.raises(UserError, match=r"a\.jsonl:3:"):
        read_sets(suite, tmp_path)


def test_another_number_of_rows_than_the_manifests_is_refused(tmp_path: Path) -> None:
    jsonl(tmp_path / "nq.jsonl", rows_of("nq", 3))
    assert list(read_sets(suite_of("nq", rows=3), tmp_path)) == ["nq"]
    with pytest.raises(UserError) as caught:
        read_sets(suite_of("nq", rows=4), tmp_path)
    assert caught.value.key == "nq"
