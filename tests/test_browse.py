"""Runs, trajectories by what they are like, why answers are wrong, and questions in SQL."""

from __future__ import annotations

from dataclasses import replace

import duckdb
import pytest
from tests.store_builder import BERN, episode, new_log, question, record, write_step

import srl.store
from srl.browse.listing import listing
from srl.browse.runs import runs
from srl.browse.sql import sql
from srl.browse.trajectories import Filter, verdicts
from srl.errors import UserError
from srl.store.verdict import VERDICTS


@pytest.fixture
def log(tmp_path):
    """Five episodes of two steps, each wrong in its own way or right."""
    writer = new_log(tmp_path)
    other = replace(question(3, hops=3), data_source="hotpotqa")
    writer.write(
        1,
        "train",
        [
            record(episode(0, answer="Münchenbuchsee")),
            record(episode(1, answer="Bern")),
            record(episode(2, answer="Bern", passages=(BERN,))),
        ],
        {},
    )
    two = {"step": 2, "phase": "val"}
    writer.write(
        2,
        "val",
        [
            record(episode(3, asked=other, passages=None, **two)),
            record(episode(4, answer=None, end="failed", **two)),
        ],
        {},
    )
    with srl.store.open(tmp_path) as connection:
        yield connection


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"phase": "val"}, [3, 4]),
        ({"steps": "1"}, [0, 1, 2]),
        ({"steps": "2:"}, [3, 4]),
        ({"steps": ":1"}, [0, 1, 2]),
        ({"steps": "1:2"}, [0, 1, 2, 3, 4]),
        ({"source": "hotpotqa"}, [3]),
        ({"hops": 3}, [3]),
        ({"question": "nq-2"}, [2]),
        ({"em": "1"}, [0]),
        ({"em": "<1"}, [1, 2, 3, 4]),
        ({"reward": ">=0.125", "phase": "train"}, [0, 1, 2]),
        ({"end": "answered"}, [0, 1, 2, 3]),
        ({"verdict": "retriever"}, [2]),
        ({"min_searches": 1}, [0, 1, 2, 4]),
        ({"max_searches": 0}, [3]),
        ({"contains": "PAINTER 1"}, [1]),
        ({"contains": "münchenBUCHsee"}, [0]),
        ({"contains": "100%_'"}, []),
        ({"failed": True}, [4]),
        ({"em": "0", "min_searches": 1, "phase": "train"}, [1, 2]),
    ],
)
def test_filter_lets_through_what_it_names(log, conditions, numbers):
    found = listing(log, Filter(**conditions), sort="question_id", limit=None)
    assert [row["question_id"] for row in found] == [f"nq-{number}" for number in numbers]


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"em": "wrong"}, "--em wrong: expected a number such as 0, or a bound such as '<1'"),
        ({"steps": "a:b"}, "--steps a:b: expected a step such as 30, or a range such as 10:20"),
        ({"verdict": "raeder"}, "did you mean 'reader'"),
    ],
)
def test_filter_that_makes_no_sense_says_what_would(log, conditions, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        listing(log, Filter(**conditions))


def test_trajectories_are_sorted_and_limited(log):
    found = listing(log, Filter(), sort="-searches", limit=2)
    assert [row["question_id"] for row in found] == ["nq-0", "nq-1"]
    assert listing(log, Filter(), sort="searches", limit=1)[0]["searches"] == 0
    with pytest.raises(UserError, match="--sort -serches: no such column; did you mean 'searches'"):
        listing(log, Filter(), sort="-serches")


def test_verdicts_are_counted_by_what_is_asked(log):
    train, val = verdicts(log, Filter())
    nothing = dict.fromkeys(VERDICTS, 0)
    assert train == {"phase": "train", "steps": "1", "total": 3} | nothing | {
        "correct": 1, "reader": 1, "retriever": 1,
    }  # fmt: skip
    assert val == {"phase": "val", "steps": "2", "total": 2} | nothing | {"no search": 1, "failed search": 1}
    by_hops = verdicts(log, Filter(phase="val"), by="hops")
    assert [(row["hops"], row["total"]) for row in by_hops] == [(2, 1), (3, 1)]
    with pytest.raises(UserError, match="expected one of phase, step"):
        verdicts(log, Filter(), by="answer")


def test_verdicts_before_training_are_apart_from_those_in_it(tmp_path):
    log = new_log(tmp_path / "run")
    for step in (0, 2, 3):
        write_step(log, step, "val", size=step + 1)
    with srl.store.open(tmp_path) as connection:
        counted = verdicts(connection, Filter())
        by_step = verdicts(connection, Filter(), by="step")
    assert [(row["phase"], row["steps"], row["total"]) for row in counted] == [
        ("val", "0", 1),
        ("val", "2:3", 7),
    ]
    assert [(row["step"], row["total"]) for row in by_step] == [(0, 1), (2, 3), (3, 4)]


def test_runs_say_of_which_step_each_figure_is(tmp_path):
    log = new_log(tmp_path / "run")
    write_step(log, 0, "test")
    for step in (0, 2, 4):
        write_step(log, step, "val")
    write_step(log, 5)
    with srl.store.open(tmp_path) as connection:
        (row,) = runs(connection)
    assert (row["steps"], row["val_step"], row["test_step"]) == (5, 4, 0)


def test_runs_say_how_far_they_got(tmp_path):
    for name, top in (("a", 3), ("b", 1)):
        log = new_log(tmp_path / name)
        for step in range(1, top + 1):
            write_step(log, step)
            write_step(log, step, "val")
    write_step(log, 2, "test")
    log.finish()
    with srl.store.open(tmp_path) as connection:
        first, second = runs(connection)
    assert (first["run_id"], first["status"], first["steps"]) == ("a", "running", 3)
    assert (first["val_em"], first["best_val_em"], first["score"], first["test_em"]) == (
        0.15,
        0.15,
        0.3,
        None,
    )
    assert (second["status"], second["test_em"]) == ("finished", 0.1)


@pytest.mark.parametrize(
    "query",
    ["FROM runs", "SELECT 1", "DESCRIBE hits", "SHOW TABLES", "EXPLAIN SELECT 1", "SUMMARIZE steps",
     "EXPLAIN ANALYZE FROM steps", "WITH a AS (SELECT 1) FROM a",
     "-- hello\nSELECT 1;"],
)  # fmt: skip
def test_queries_that_read_are_answered(log, query):
    assert sql(log, query).columns


@pytest.mark.parametrize(
    "query",
    ["SELECT repeat('x', 3000000)", "SELECT range(500000)", "SELECT [repeat('x', 2000000)], 1",
     "FROM range(200000)", "SELECT {'a': [range(500000)]}"],
)  # fmt: skip
def test_a_result_of_too_many_bytes_is_refused_before_python_has_it(log, query):
    with pytest.raises(UserError):
        sql(log, query, most_bytes=1 << 20)
    assert sql(log, f"SELECT count(*) AS n FROM ({query})", most_bytes=1 << 20).columns == ("n",)


def test_cells_are_cut_where_they_are_computed(log):
    query = "SELECT repeat('x', 3000000) AS a, range(500000) AS b, 1 AS c"
    ((text, numbers, one),) = sql(log, query, cell=7, most_bytes=1 << 20).rows
    assert (text, numbers, one) == ("x" * 7, list(range(7)), 1)


def test_values_are_those_that_duckdb_gives_to_python(log):
    query = """SELECT 1::HUGEINT AS a, MAP {'k': 2} AS b, {'x': 1, 'y': [2::HUGEINT]} AS c,
    'a'::ENUM('a') AS d, 1.5::DECIMAL(4, 2) AS e, TIMESTAMP '2026-01-02 03:04:05' AS f,
    '01'::BIT AS g, DATE '2026-01-02' AS h, 'c2a3b4d5-0000-4000-8000-000000000000'::UUID AS i,
    NULL AS j, [1, NULL] AS k, 3.5::FLOAT AS l, 1::UTINYINT AS m, [1, 2]::INT[2] AS n,
    TIME '01:02:03' AS o, union_value(k := 1) AS p FROM range(3000)"""
    assert list(sql(log, query).rows) == log.execute(query).fetchall()


@pytest.mark.skipif(duckdb.__version__ < "2", reason="DuckDB 1 takes a PIVOT apart into two statements")
def test_pivot_is_answered(log):
    assert sql(log, "PIVOT steps ON phase USING max(step) GROUP BY run_id").columns[1:] == ("train", "val")


@pytest.mark.skipif(duckdb.__version__ < "2", reason="DuckDB 1 takes a PIVOT apart into two statements")
@pytest.mark.parametrize("before", ["", "-- hello\n", "EXPLAIN ", "DESCRIBE ", "FROM (", "SELECT * FROM ("])
def test_pivot_is_answered_wherever_it_is_read(log, before):
    assert sql(log, f"{before}PIVOT steps ON phase USING max(step)" + ")" * before.count("(")).columns


@pytest.mark.parametrize(
    "query",
    ["COPY runs TO '{}'", "EXPLAIN ANALYZE COPY runs TO '{}'", "EXPLAIN (FORMAT json) COPY runs TO '{}'",
     "ATTACH '{}'", "CREATE TABLE a AS SELECT 1", "DROP VIEW runs", "SET threads = 1", "INSTALL json",
     "EXPLAIN (ANALYZE /*) SELECT 1 -- */) COPY (SELECT 42) TO '{}'", "INSERT INTO raw.runs VALUES (1)",
     "EXPLAIN ANALYZE /* SELECT 1 */ COPY (SELECT 42) TO '{}'", "CALL pragma_version()",
     "EXPLAIN ANALYZE -- SELECT\nCOPY (SELECT 42) TO '{}'", "EXPLAIN ANALYZE ANALYZE", "PRAGMA version",
     "EXPLAIN (SELECT 1)", "EXPLAIN EXPLAIN ANALYZE COPY runs TO '{}'", "LOAD json", "DETACH memory",
     "IMPORT DATABASE '{}'", "WITH a AS (COPY runs TO '{}') FROM a",
     "WITH a AS (COPY runs TO '{}') PIVOT steps ON phase USING max(step)",
     "CREATE TABLE a AS PIVOT steps ON phase USING max(step)",
     "CREATE TEMP TABLE a AS (PIVOT steps ON phase USING max(step))",
     "EXPLAIN ANALYZE CREATE TABLE a AS PIVOT steps ON phase USING max(step)",
     "PREPARE a AS PIVOT steps ON phase USING max(step)",
     "INSERT INTO raw.runs PIVOT steps ON phase USING max(step)",
     "WITH a AS (FROM steps) INSERT INTO raw.runs PIVOT a ON phase USING max(step)",
     "EXPLAIN ANALYZE WITH a AS (COPY runs TO '{}') FROM a", "FROM query('COPY runs TO ''{}''')",
     "WITH a AS (DELETE FROM raw.runs RETURNING *) FROM a",
     "EXPLAIN\x1cANALYZE COPY runs TO '{}'",
     "SELECT 1; COPY runs TO '{}'", "/* */ EXPLAIN ANALYZE COPY runs TO '{}'", "EXPORT DATABASE '{}'", ""],
)  # fmt: skip
def test_queries_that_write_are_refused(log, query, tmp_path):
    target = tmp_path / "written"
    with pytest.raises(UserError) as error:
        sql(log, query.format(target))
    assert "\n" not in str(error.value)
    assert not target.exists()


def test_bad_query_gets_the_databases_words_in_one_line(log):
    with pytest.raises(
        UserError, match=r'^Binder Error: Referenced column "emm" not found in FROM clause!.*$'
    ):
        sql(log, "SELECT emm FROM trajectories")
    with pytest.raises(UserError, match=r"The tables are runs, steps, metrics, trajectories"):
        sql(log, "FROM trajectory")


def test_columns_of_one_name_do_not_hide_each_other(log):
    assert sql(log, "SELECT 1 AS a, 2 AS a, 3 AS b").records() == [{"a": 1, "a_1": 2, "b": 3}]
