"""`srl inspect searches` and `grep`: counts and excerpts of a log made by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.store_builder import BERN, KLEE, episode, new_log, policy, question, record, search

import srl.store
from srl.browse.grep import grep
from srl.browse.searching import failures, searches
from srl.browse.trajectories import Filter
from srl.cli import main
from srl.errors import UserError

RUN = "20250102T030405Z-tiny-grpo-s1-00aa"


@pytest.fixture
def run(workspace):
    """Step 1: a query asked twice, one that found nothing, one that failed. Step 2: evidence not shown."""
    log = new_log(workspace / "runs" / RUN)
    asking = episode(0)
    asking.searches = [
        replace(search("Klee", KLEE, BERN, turn=0), latency_s=1.0, shown=1),
        replace(search(" klee ", BERN, turn=1), latency_s=2.0, attempts=2),
        replace(search("nobody", turn=2, status="empty"), latency_s=3.0, attempts=1),
        replace(search("Klee?", turn=3, status="failed", error="503"), latency_s=4.0),
    ]
    quiet = episode(1, passages=None)
    log.write(1, "train", [record(asking), record(quiet)], {})
    hidden = episode(2, step=2)
    hidden.searches = [replace(search("Paul Klee", BERN, KLEE), shown=1, retriever="web")]
    hidden.segments[1] = policy("<think>a_b 100% Sure</think>", 0)
    log.write(2, "train", [record(hidden)], {})
    return workspace / "runs" / RUN


def test_searches_are_counted_by_step(run):
    with srl.store.open(run) as log:
        first, second = searches(log, Filter())
    assert {name: first[name] for name in ("step", "searches", "episodes", "empty", "failed", "retried")} == {
        "step": 1, "searches": 4, "episodes": 1, "empty": 1, "failed": 1, "retried": 2
    }  # fmt: skip
    assert first["repeated"] == 1, "case and outer spaces do not make another query"
    assert first["evidence_shown"] == pytest.approx(1 / 3), "of the three that were answered"
    assert first["evidence_first"] == pytest.approx(1 / 3)
    assert (first["p50_s"], first["max_s"]) == (2.5, 4.0)
    assert [second[f"evidence_{name}"] for name in ("first", "shown", "cut")] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("phase", [("train", 5)]),
        ("retriever", [("", 4), ("web", 1)]),
        ("source", [("nq", 5)]),
        ("run", [(RUN, 5)]),
    ],
)
def test_searches_are_counted_by_other_columns(run, by, expected):
    names = {"source": "data_source", "run": "run_id"}
    with srl.store.open(run) as log:
        found = searches(log, Filter(), by)
    assert [(row[names.get(by, by)], row["searches"]) for row in found] == expected


def test_searches_of_questions_without_answers_have_no_share_of_evidence(tmp_path):
    new_log(tmp_path).write(1, "train", [record(episode(asked=question(golds=())))], {})
    with srl.store.open(tmp_path) as log:
        (found,) = searches(log, Filter())
    assert (found["searches"], found["evidence_first"], found["evidence_shown"]) == (1, None, None)


def test_failed_searches_are_listed_with_their_error(run, capsys):
    with srl.store.open(run) as log:
        (found,) = failures(log, Filter(), 5)
    assert (found["query"], found["status"], found["error"], found["attempts"]) == (
        "Klee?",
        "failed",
        "503",
        3,
    )
    assert main(["inspect", "searches", "--failed"]) == 0
    assert "503" in capsys.readouterr().out
    assert main(["inspect", "searches", "--failed", "--steps", "2"]) == 0
    assert "no search failed" in capsys.readouterr().err


def test_searches_prints_a_table_and_json(run, capsys):
    assert main(["inspect", "searches", "--by", "step"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["phase", "step", "searches"]
    assert main(["inspect", "searches", "--by", "retriever", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["retriever"] for row in rows] == ["", "web"]


def found_by(run, text, **options):
    with srl.store.open(run) as log:
        return [
            (row["step"], row["place"]) for row in grep(log, text, options.pop("chosen", Filter()), **options)
        ]


def test_text_is_found_where_it_is_looked_for_the_latest_step_first(run):
    assert found_by(run, "KLEE") == [(2, "query"), (1, "query"), (1, "query"), (1, "query")]
    assert found_by(run, "klee", case=True) == [(1, "query")]
    assert found_by(run, "klee", places=["policy"]) == []
    assert found_by(run, "klee", limit=1) == [(2, "query")]
    assert found_by(run, "klee", chosen=Filter(steps="2", phase="train")) == [(2, "query")]
    assert found_by(run, "bern", places=["answer"]) == [(2, "answer"), (1, "answer"), (1, "answer")]
    assert found_by(run, "where was painter 1", places=["question", "prompt"]) == [
        (1, "prompt"),
        (1, "question"),
    ]


def test_signs_are_text_unless_it_is_a_regular_expression(run):
    assert found_by(run, "a_b 100%") == [(2, "policy")]
    assert found_by(run, "axb") == []
    assert found_by(run, "a.b\\s+1\\d*%", regex=True) == [(2, "policy")]
    assert found_by(run, "^klee$", regex=True) == [(1, "query")]
    with pytest.raises(UserError, match="not a regular expression of RE2"):
        found_by(run, "(", regex=True)


def test_an_excerpt_is_the_text_around_the_match(tmp_path):
    made = episode()
    made.segments[1] = policy("x " * 100 + "Needle\n here " + "y " * 100, 0)
    new_log(tmp_path).write(1, "train", [record(made)], {})
    with srl.store.open(tmp_path) as log:
        (plain,) = grep(log, "needle", Filter())
        (found,) = grep(log, "n[e]+dle", Filter(), regex=True)
    assert plain["excerpt"] == found["excerpt"]
    assert plain["excerpt"].startswith("…x x")
    assert "x Needle here y" in plain["excerpt"]
    assert len(plain["excerpt"]) < 140


@pytest.mark.parametrize(
    ("options", "said"), [({"places": ["all"]}, "--in all"), ({}, "nothing to look for")]
)
def test_what_cannot_be_looked_for_is_said(run, options, said):
    with pytest.raises(UserError, match=said):
        found_by(run, "" if not options else "x", **options)


def test_grep_prints_rows_and_a_note_where_there_are_more(run, capsys):
    assert main(["inspect", "grep", "klee", "-n", "2"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "first 2 rows" in err
    assert main(["inspect", "grep", "no such text"]) == 0
    assert "no match" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "bounded"), [(20, True), (1000, True), (1001, False), (0, False)])
def test_a_grep_for_few_rows_does_not_keep_the_log_in_memory(run, monkeypatch, limit, bounded):
    def memory(log, *_, **__):
        seen.append(log.execute("SELECT current_setting('memory_limit')").fetchone())
        return []

    seen: list[tuple[str]] = []
    monkeypatch.setattr("srl.browse.grep.grep", memory)
    assert main(["inspect", "grep", "klee", "-n", str(limit)]) == 0
    assert (seen == [("732.4 MiB",)]) == bounded
