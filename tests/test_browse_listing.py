"""Pages of a listing: walked forwards and backwards they are the whole of it, whatever it is sorted by."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import duckdb
import pytest

from srl.browse.listing import SORTS, facets, listing, neighbours, page
from srl.browse.trajectories import COLUMNS, Filter
from srl.errors import UserError

SIZE = 40
TYPES = {
    "id": "VARCHAR", "run_id": "VARCHAR", "phase": "VARCHAR", "question_id": "VARCHAR", "end": "VARCHAR",
    "data_source": "VARCHAR", "question": "VARCHAR", "verdict": "VARCHAR", "answer": "VARCHAR",
    "golden_answers": "VARCHAR[]", "em": "DOUBLE", "f1": "DOUBLE", "reward": "DOUBLE", "seconds": "DOUBLE",
    "gold_in_passages": "BOOLEAN",
}  # fmt: skip


@pytest.fixture(scope="module")
def log():
    """A table `trajectories` with 40 rows, whose values of every column repeat and are missing in some."""
    connection = duckdb.connect()
    names = dict.fromkeys((*COLUMNS, *SORTS, "position"))
    columns = ", ".join(f'"{name}" {TYPES.get(name, "INTEGER")}' for name in names)
    connection.execute(f"CREATE TABLE trajectories ({columns})")
    draw = Random(7)
    rows = [
        (
            f"{place:012x}",
            "run",
            place % 3,
            draw.choice([None, 0.0, 0.5, 1.0, float("nan")]),
            draw.choice([None, "reader", "correct"]),
            draw.choice([0, 1, 2]),
            draw.choice(["train", "val"]),
            draw.choice([None, 1, 2]),
        )
        for place in range(SIZE)
    ]
    insert = "INSERT INTO trajectories (id, run_id, position, reward, verdict, step, phase, hops) VALUES "
    values = [value for row in rows for value in row]
    connection.execute(insert + ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * SIZE), values)
    return connection


def ids(found):
    return [row["id"] for row in found]


@pytest.mark.parametrize("size", [1, 7, SIZE])
@pytest.mark.parametrize("sort", ["-step", "reward", "-reward", "verdict", "-verdict", "hops"])
def test_pages_are_the_listing_in_either_direction(log, sort, size):
    whole = ids(page(log, Filter(), sort, SIZE).rows)
    assert sorted(whole) == [f"{place:012x}" for place in range(SIZE)]
    here = page(log, Filter(), sort, size)
    assert here.before is None
    pages = [here]
    while here.after:
        here = page(log, Filter(), sort, size, after=here.after)
        pages.append(here)
    assert [one for each in pages for one in ids(each.rows)] == whole
    for expected in reversed(pages[:-1]):
        here = page(log, Filter(), sort, size, before=here.before)
        assert ids(here.rows) == ids(expected.rows)
        assert here.after
    assert here.before is None


@pytest.mark.parametrize(("sort", "column"), [("reward", "reward"), ("-reward", "reward"), ("-hops", "hops")])
def test_rows_without_a_value_are_last_in_either_order(log, sort, column):
    values = [row[column] for row in page(log, Filter(), sort, SIZE).rows]
    missing = values.count(None)
    assert 0 < missing < SIZE
    assert values[-missing:] == [None] * missing


def test_neighbours_are_those_beside_a_row(log):
    whole = page(log, Filter(), "-reward", SIZE).rows
    for place in (0, 1, 20, SIZE - 1):
        beside = (ids(whole[place - 1 : place]) if place else []), ids(whole[place + 1 : place + 2])
        found = neighbours(log, Filter(), "-reward", whole[place])
        assert found == tuple(one[0] if one else None for one in beside)


@pytest.mark.parametrize(
    "chosen", [Filter(), Filter(verdict="reader"), Filter(verdict="reader", phase="val")]
)
def test_counts_are_those_of_the_listing_with_another_value(log, chosen):
    found = facets(log, chosen)
    assert found.total == len(listing(log, chosen, limit=None))
    values = {"phase": ("train", "val"), "verdict": ("reader", "correct"), "hops": (1, 2)}
    for name, known in values.items():
        counted = {value: count for value, count in found.counts[name] if value is not None}
        listed = {value: len(listing(log, replace(chosen, **{name: value}), limit=None)) for value in known}
        assert counted == {value: count for value, count in listed.items() if count}


@pytest.mark.parametrize(
    "cursor", ["", "x", "[]", "{}", "null", '[1, "a", "b", 0, "r", "i"]', "[[1], 1, 2, 3, 4, 5]"]
)
def test_cursor_from_elsewhere_is_refused_in_one_line(log, cursor):
    with pytest.raises(UserError):
        page(log, Filter(), after=cursor)


def test_only_plain_columns_sort(log):
    with pytest.raises(UserError, match="did you mean 'reward'"):
        page(log, Filter(), "rewards")
