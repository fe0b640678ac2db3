"""What is read from a log for people: listings, runs, curves, SQL, and numbers as text."""

from dataclasses import replace

import duckdb
import pytest
from tests.store_builder import BERN, episode, new_log, question, record

import srl.store
from srl.browse.filters import EVERY, Filter, condition, facets
from srl.browse.formatting import json_line
from srl.browse.listing import COLUMNS, neighbours, page
from srl.browse.sql import sql
from srl.errors import UserError


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Five episodes of two steps, each wrong in its own way or right."""
    folder = tmp_path_factory.mktemp("log")
    writer = new_log(folder)
    answers = [("Münchenbuchsee", None), ("Bern", None), ("Bern", (BERN,))]
    made = [
        episode(n, answer=answer, **{"passages": of} if of else {}) for n, (answer, of) in enumerate(answers)
    ]
    writer.write(1, "train", [record(one) for one in made], {})
    other = replace(question(3, hops=3), data_source="hotpotqa")
    made = [
        episode(3, step=2, phase="val", asked=other, passages=None),
        episode(4, step=2, phase="val", answer=None, end="failed"),
    ]
    writer.write(2, "val", [record(one) for one in made], {})
    with srl.store.open(folder) as connection:
        yield connection


CONDITIONS = [
    ({}, [0, 1, 2, 3, 4]), ({"phase": "val"}, [3, 4]), ({"steps": "1"}, [0, 1, 2]), ({"steps": "2:"}, [3, 4]),
    ({"steps": ":1"}, [0, 1, 2]), ({"steps": "1:2"}, [0, 1, 2, 3, 4]), ({"source": "hotpotqa"}, [3]),
    ({"hops": 3}, [3]), ({"question": "nq-2"}, [2]), ({"em": "1"}, [0]), ({"em": "<.5"}, [1, 2, 3, 4]),
    ({"reward": ">=0.125", "phase": "train"}, [0, 1, 2]), ({"end": "answered"}, [0, 1, 2, 3]),
    ({"end": "failed"}, [4]), ({"verdict": "retriever"}, [2]), ({"searches": ">=1"}, [0, 1, 2, 4]),
    ({"searches": "0"}, [3]), ({"contains": "PAINTER 1"}, [1]), ({"contains": "münchenBUCHsee"}, [0]),
    ({"contains": "100%_'"}, []), ({"em": "0", "searches": ">0", "phase": "train"}, [1, 2]),
]  # fmt: skip


def listing(log, chosen, sort="-step", limit=None):
    return page(log, chosen.where(), sort, limit).rows


@pytest.mark.parametrize(("conditions", "numbers"), CONDITIONS)
def test_a_filter_lets_through_what_it_names(log, conditions, numbers):
    listed = listing(log, Filter(**conditions), sort="question_id")
    assert [row["question_id"] for row in listed] == [f"nq-{number}" for number in numbers]
    assert facets(log, Filter(**conditions)).total == len(numbers)


def test_a_listing_is_sorted_and_limited(log):
    listed = listing(log, Filter(), sort="-searches", limit=2)
    assert [row["question_id"] for row in listed] == ["nq-0", "nq-1"]
    assert list(listed[0]) == list(COLUMNS)
    for chosen, sort, key in [
        (Filter(), "-serches", "--sort"), (Filter(), "question", "--sort"),
        (Filter(em="wrong"), "step", "--em"), (Filter(steps="a:b"), "step", "--steps"),
        (Filter(steps="3:1"), "step", "--steps"),
        (Filter(verdict="raeder"), "step", "--verdict"),
        (Filter(end="x"), "step", "--end"),
    ]:  # fmt: skip
        with pytest.raises(UserError) as error:
            listing(log, chosen, sort=sort)
        assert error.value.key == key


@pytest.fixture(scope="module")
def many(log):
    """A table `trajectories` with 40 rows, whose values of every column repeat and are missing in some."""
    connection = duckdb.connect()
    connection.execute("SELECT setseed(0.5)")
    types = {row[0]: row[1] for row in log.execute("DESCRIBE trajectories").fetchall()}
    columns = ", ".join(f'NULL::{types[name]} AS "{name}"' for name in COLUMNS)
    connection.execute(f"""
        CREATE TABLE trajectories AS SELECT * REPLACE (
            printf('%012x', n) AS id, 'run' AS run_id, (n * 7 % 5 % 3)::INTEGER AS step,
            ['train', 'val'][n % 2 + 1] AS phase, [NULL, 'reader', 'correct'][n * 5 % 3 + 1] AS verdict,
            [NULL, 0.0, 0.5, 1.0, 'nan'::DOUBLE][n * 3 % 5 + 1] AS reward, [NULL, 1, 2][n % 3 + 1] AS hops,
            (n % 4)::INTEGER AS position
        ) FROM (SELECT {columns}), range(40) AS numbers(n)
    """)
    return connection


def ids(rows):
    return [row["id"] for row in rows]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("sort", ["-step", "reward", "-verdict", "hops"])
def test_pages_are_the_listing_in_either_direction(many, sort, size):
    whole = page(many, EVERY, sort, 40).rows
    assert sorted(ids(whole)) == [f"{place:012x}" for place in range(40)]
    values = [row[sort.removeprefix("-")] for row in whole]
    assert None not in values[: len(values) - values.count(None)], "rows without a value are last"
    here = page(many, EVERY, sort, size)
    pages = [here]
    while here.after:
        here = page(many, EVERY, sort, size, after=here.after)
        pages.append(here)
    assert [one for each in pages for one in ids(each.rows)] == ids(whole)
    for expected in reversed(pages[:-1]):
        here = page(many, EVERY, sort, size, before=here.before)
        assert ids(here.rows) == ids(expected.rows)
        assert here.after
    assert here.before is None
    place = 1 if size == 1 else 39
    beside = (whole[place - 1]["id"], whole[place + 1]["id"] if place < 39 else None)
    assert neighbours(many, EVERY, sort, whole[place]) == beside


@pytest.mark.parametrize(
    "chosen", [Filter(), Filter(verdict="reader"), Filter(verdict="reader", phase="val")]
)
def test_counts_are_those_of_the_listing_with_another_value(many, chosen):
    counted = facets(many, chosen)
    assert counted.total == len(listing(many, chosen))
    for name, values in {"phase": ("train", "val"), "verdict": ("reader", "correct"), "hops": (1, 2)}.items():
        listed = {value: len(listing(many, replace(chosen, **{name: value}))) for value in values}
        here = {value: count for value, count in counted.counts[name] if value is not None}
        assert here == {value: count for value, count in listed.items() if count}


CONDITIONS_THAT_WRITE = [
    "true; COPY runs TO '{}'", "true) UNION SELECT 1; COPY runs TO '{}'; SELECT (true", "", "emm = 1", "'",
    "id IN (COPY runs TO '{}')", "true) --",
    "em = 0) OR (1=1",
]  # fmt: skip


def test_queries_that_read_are_answered(log):
    for query in ("FROM runs", "DESCRIBE hits", "SHOW TABLES", "SUMMARIZE steps", "-- hello\nSELECT 1;"):
        assert sql(log, query).columns


def test_a_condition_in_sql_chooses_trajectories_and_can_do_no_more(log, tmp_path):
    chosen = page(log, condition("em < 1 AND phase = 'train' -- the wrong ones"), "question_id").rows
    assert [row["question_id"] for row in chosen] == ["nq-1", "nq-2"]
    assert len(page(log, condition(None)).rows) == 5
    for text in CONDITIONS_THAT_WRITE:
        with pytest.raises((duckdb.Error, UserError)):
            page(log, condition(text.format(tmp_path / "written")))
    assert list(tmp_path.iterdir()) == []


def test_json_says_null_where_a_number_is_missing():
    assert json_line({"a": [float("nan"), float("inf"), 1.5]}) == '{"a": [null, null, 1.5]}'
