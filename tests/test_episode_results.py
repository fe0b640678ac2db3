"""One episode measured: what a trajectory and its rows in the log come to is the same."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store_builder import BERN, KLEE, episode, new_log, question, record, search

import srl.store
from srl.evaluate import EpisodeResult, read_results
from srl.trajectory import Trajectory


def evaluated(number: int = 0, **given: object) -> Trajectory:
    return episode(number, step=0, phase="eval", **given)  # type: ignore[arg-type]


def test_an_episode_by_hand():
    asked = question(4, ("Bern", "Berne"), hops=2, type="bridge", supporting_ids=["p2", "p9"])
    found = EpisodeResult.of(evaluated(4, sample=3, answer="in Bern", asked=asked))
    assert found == EpisodeResult(
        question_id="nq-4", sample=3, data_source="nq", split="train", hops=2, kind="bridge", document="",
        valid=True, end="answered", em=0.0, f1=2 / 3, cover_em=1.0, answer_shown=True, evidence_recall=0.5,
        searches=1, valid_searches=1, failed_searches=0, named_searches=(), turns=2, valid_actions=2,
        tokens=10, total_tokens=20, seconds=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "recall"),
    [
        ({"supporting_ids": ["p1", "p2"]}, 1.0),
        ({"supporting_ids": ["p1", "gone"]}, 0.5),
        ({"supporting_ids": ["gone"], "supporting_titles": ["Bern"]}, 0.0),
        ({"supporting_ids": ["wiki/Bern-1"], "supporting_titles": ["Bern", "Basel"]}, 0.5),
        ({"supporting_ids": ["wiki/Bern-1"]}, 0.0),
        ({"supporting_titles": ["Bern", "Basel", "Basel"]}, 0.5),
        ({"supporting_titles": ["&quot;Bern&quot;"]}, 1.0),
        ({"supporting_ids": [], "supporting_titles": []}, None),
    ],
)
def test_evidence_recall_is_by_passage_or_where_only_titles_are_named_by_title(metadata, recall):
    assert EpisodeResult.of(evaluated(asked=question(**metadata))).evidence_recall == recall
    assert EpisodeResult.of(evaluated(asked=question(**metadata), passages=None)).evidence_recall in (0, None)


_QUESTIONS = st.builds(
    question,
    st.integers(0, 50),
    st.sampled_from([("Bern",), ("Münchenbuchsee", "the"), ("no",), ()]),
    hops=st.sampled_from([None, 2, -1, "three", True]),
    type=st.sampled_from([None, "bridge"]),
    supporting_ids=st.sampled_from([None, ["p1"], ["p1", "p2"]]),
    supporting_titles=st.sampled_from([None, ["Bern"], ["Bern", "Basel"]]),
)
_SEARCHES = st.builds(
    lambda made, fitted, **given: replace(made, shown=fitted[0], cut=fitted[1], **given),
    st.sampled_from([search("a", KLEE, BERN), search("b", BERN, KLEE)]),
    st.sampled_from([(None, None), (0, None), (1, None), (2, None), (1, "Bern …")]),
    status=st.sampled_from(["ok", "empty", "rejected", "timed_out"]),
    retriever=st.sampled_from(["", "web", "paper"]),
)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.builds(
                episode, st.just(0), step=st.just(0), phase=st.just("eval"), sample=st.integers(0, 3),
                answer=st.sampled_from([None, "Bern", "in Bern, no?", "the", ""]), asked=_QUESTIONS,
                passages=st.sampled_from([None, (), (BERN,)]),
                end=st.sampled_from([None, "failed"]),
            ),
            st.lists(_SEARCHES, max_size=3),
        ),
        min_size=1,
        unique_by=lambda made: (made[0].question.id, made[0].sample),
    )
)  # fmt: skip
def test_results_read_from_a_log_are_those_of_its_trajectories(tmp_path_factory, made):
    batch = [trajectory for trajectory, _ in made]
    for number, (trajectory, searches) in enumerate(made):
        trajectory.searches += searches
        trajectory.seconds = 0.5 * number
    run = tmp_path_factory.mktemp("run")
    new_log(run).write(0, "eval", [record(item) for item in batch], {})
    with srl.store.open(run) as connection:
        found = read_results(connection)
    assert found == sorted(map(EpisodeResult.of, batch), key=lambda item: (item.question_id, item.sample))
