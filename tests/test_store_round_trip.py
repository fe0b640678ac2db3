"""What is written is read back identically, from the parts and from the finished log."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store_builder import episode, new_log, question, read, record

import srl.store
from srl.store import Record
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text("abc/_=é", min_size=1, max_size=4)
singles = st.floats(width=32, allow_nan=False)
halves = st.floats(width=16, allow_nan=False)
doubles = st.floats(allow_nan=False)
counts = st.integers(0, 2**31 - 1)
plain = st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda x: st.lists(x, max_size=2))
ends = st.sampled_from(["answered", "unanswered", "truncated", "failed"])
statuses = st.sampled_from(["ok", "empty", "rejected", "timed_out", "refused", "failed"])

questions = st.builds(
    Question,
    id=texts,
    text=texts,
    golden_answers=st.lists(texts, max_size=3).map(tuple),
    data_source=texts,
    split=texts,
    prompt=st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2).map(tuple),
    metadata=st.dictionaries(names | st.just("hops"), plain, max_size=3),
)
hits = st.builds(Hit, st.builds(Passage, texts, texts), doubles)
searches = st.builds(
    Search,
    texts,
    st.lists(hits, max_size=3).map(tuple),
    statuses,
    st.floats(0, 60),
    counts,
    texts,
    texts,
    counts,
    texts,
)
scores = st.none() | st.builds(
    Score,
    doubles,
    st.dictionaries(names, doubles, max_size=3),
    st.none() | st.lists(doubles, max_size=3).map(tuple),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    kind = draw(st.sampled_from(["prompt", "policy", "observation", "feedback"]))
    ids = tuple(draw(st.lists(counts, max_size=4)))
    logprobs = tuple(draw(singles) for _ in ids) if kind == "policy" else ()
    return Segment(kind, ids, draw(texts), draw(counts), logprobs)


@st.composite
def records(draw: st.DrawFn) -> Record:
    trajectory = Trajectory(
        draw(questions),
        draw(st.lists(segments(), max_size=4)),
        draw(st.lists(searches, max_size=2)),
        draw(ends),
        draw(st.none() | texts),
        sample=draw(counts),
        step=4,
        valid_actions=draw(counts),
        valid_searches=draw(counts),
        attempt=draw(counts),
        think_is_open=draw(st.booleans()),
    )
    values = [draw(singles) if bit else 0.0 for bit in trajectory.response_mask]
    by_policy = any(segment.is_policy for segment in trajectory.segments)
    entropies = [draw(halves) if bit else 0.0 for bit in trajectory.response_mask]
    return Record(
        trajectory, draw(scores), values if by_policy else None, draw(st.none() | st.just(values)),
        values if by_policy else None, entropies if by_policy else None,
    )  # fmt: skip


def key(record: Record) -> str:
    return record.trajectory.id


@settings(max_examples=25, deadline=None)
@given(
    st.lists(records(), max_size=4, unique_by=key), st.dictionaries(names, doubles, max_size=3), st.booleans()
)
def test_what_is_written_is_read_back(batch, metrics, finished):
    batch = [replace_returns(record) for record in batch]
    with tempfile.TemporaryDirectory() as directory:
        log = new_log(Path(directory))
        log.write(4, "train", batch, metrics)
        if finished:
            log.finish()
        with srl.store.open(directory) as connection:
            assert srl.store.read_records(connection) == batch
            found = connection.execute("SELECT name, value FROM metrics").fetchall()
            assert dict(found) == metrics


def replace_returns(record: Record) -> Record:
    """A trajectory in which the policy wrote nothing has no return of a token to keep."""
    by_policy = any(segment.is_policy for segment in record.trajectory.segments)
    return record if by_policy else replace(record, returns=None)


def test_records_come_back_in_the_order_written(tmp_path):
    log = new_log(tmp_path)
    order = [7, 3, 9, 0, 5]
    log.write(2, "train", [record(episode(n, step=2)) for n in order], {})
    log.write(1, "train", [record(episode(n, step=1)) for n in order], {})
    with srl.store.open(tmp_path) as connection:
        found = [(r.trajectory.step, r.trajectory.question.id) for r in srl.store.read_records(connection)]
    assert found == [(step, f"nq-{n}") for step in (1, 2) for n in order]


def test_records_are_chosen_by_a_condition(tmp_path):
    log = new_log(tmp_path)
    log.write(1, "train", [record(episode(n, answer=a)) for n, a in enumerate(["Bern", None])], {})
    with srl.store.open(tmp_path) as connection:
        (found,) = srl.store.read_records(connection, "verdict = ?", ["unanswered"])
    assert found.trajectory.answer is None


def test_records_without_tokens_have_everything_else(tmp_path):
    made = record(episode())
    new_log(tmp_path).write(1, "train", [made], {})
    with srl.store.open(tmp_path) as connection:
        ((found, row),) = srl.store.read_with_rows(connection, reads="texts")
        (shown,) = srl.store.rows(connection, "FROM trajectories")
    bare = [replace(one, token_ids=(), logprobs=()) for one in made.trajectory.segments]
    assert found == Record(replace(made.trajectory, segments=bare), made.score)
    assert row == shown


def test_only_tokens_of_the_policy_keep_an_advantage(tmp_path):
    trajectory = episode()
    everywhere = [1.0] * len(trajectory.token_ids)
    new_log(tmp_path).write(1, "train", [Record(trajectory, None, everywhere)], {})
    with srl.store.open(tmp_path) as connection:
        (found,) = srl.store.read_records(connection)
        rows = connection.execute("SELECT kind, advantages IS NULL, mask FROM segments").fetchall()
    assert found.advantages == [float(bit) for bit in trajectory.response_mask]
    assert {(kind, missing) for kind, missing, _ in rows} == {
        ("prompt", True),
        ("observation", True),
        ("policy", False),
    }
    assert all(mask == (kind == "policy") for kind, _, mask in rows)


@pytest.mark.parametrize("hops", [2, "many", None, 2**40, True])
def test_hops_are_a_number_or_nothing(tmp_path, hops):
    new_log(tmp_path).write(1, "train", [record(episode(asked=question(1, hops=hops, level="hard")))], {})
    with srl.store.open(tmp_path) as connection:
        ((found, metadata),) = connection.execute("SELECT hops, metadata FROM trajectories").fetchall()
    assert found == (2 if hops == 2 else None)
    assert json.loads(metadata) == {"hops": hops, "level": "hard"}


def test_metadata_that_json_does_not_know_is_kept_as_text(tmp_path):
    new_log(tmp_path).write(1, "train", [record(episode(asked=question(1, path=Path("a/b"))))], {})
    with srl.store.open(tmp_path) as connection:
        (found,) = srl.store.read_records(connection)
    assert found.trajectory.question.metadata == {"path": "a/b"}


def test_long_batches_are_read_whole(tmp_path):
    trajectory = episode()
    trajectory.segments = [read("feedback", "again", turn) for turn in range(3000)]
    new_log(tmp_path).write(1, "train", [record(trajectory, advantage=None)], {})
    with srl.store.open(tmp_path) as connection:
        (found,) = srl.store.read_records(connection)
    assert [segment.turn for segment in found.trajectory.segments] == list(range(3000))


def test_sql_types_cover_every_column():
    kinds = {column.sql_type for table in srl.store.TABLES for column in table.columns}
    assert {"VARCHAR", "INTEGER[]", "MAP(VARCHAR, DOUBLE)", "FLOAT[]", "TIMESTAMP"} <= kinds
    struct = pa.list_(pa.struct([("a", pa.string())]))
    assert srl.store.schema.sql_type(struct) == "STRUCT(a VARCHAR)[]"
