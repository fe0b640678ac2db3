"""The reward `evidence` on numbers worked out by hand."""

from dataclasses import replace

import pytest

from srl.evaluate.episode_results import EpisodeResult
from srl.testing import check_reward
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory
from srl_format.evidence import Evidence

QUESTION = Question(
    "q", "Who is the mother of the builder?", ("Ada",), metadata={"supporting_ids": ["a", "b"]}
)


def search(turn: int, *ids: str, **fields: object) -> Search:
    hits = tuple(Hit(Passage(name, f'"Title {name}"\ntext'), 1.0) for name in ids)
    return Search("query", hits, turn=turn, **{"shown": len(hits), **fields})  # type: ignore[arg-type]


def episode(*searches: Search, turns: int, question: Question = QUESTION, **fields: object) -> Trajectory:
    """Turns of the policy; after those that searched, what they were shown."""
    segments = [Segment("prompt", (0,), "Q", 0)]
    for turn in range(turns):
        segments.append(Segment("policy", (1,), "…", turn, (-1.0,)))
        if any(item.turn == turn for item in searches) and turn < turns - 1:
            segments.append(Segment("observation", (2,), "…", turn))
    return Trajectory(question, segments, list(searches), **{"end": "answered", **fields})  # type: ignore[arg-type]


def scored(trajectory: Trajectory) -> Score:
    [score] = Evidence().score([trajectory])
    return score


@pytest.mark.parametrize(
    ("searches", "credit"),
    [
        ([search(0, "a", "x"), search(1, "b")], (0.5, 0.5, 0)),
        ([search(0, "a"), search(1, "a", "x")], (0.5, 0, 0)),
        ([search(0, "x"), search(1, "b", "a")], (0, 1, 0)),
        ([search(0, "a", "b"), search(1, "a", "b")], (1, 0, 0)),
        ([search(0, "x", "a", shown=1), search(1, "a")], (0, 0.5, 0)),
        ([search(1, "a")], (0, 0.5, 0)),
        ([], (0, 0, 0)),
    ],
)
def test_a_turn_gets_what_its_search_was_the_first_to_show(
    searches: list[Search], credit: tuple[float, ...]
) -> None:
    found = episode(*searches, turns=3)
    assert scored(found) == Score(sum(credit), {"known": 1.0}, credit)
    assert EpisodeResult.of(found).evidence_recall == scored(found).value


def test_titles_name_the_passages_where_ids_do_not() -> None:
    titled = replace(QUESTION, metadata={"supporting_titles": ["Title a", "Title c"]})
    assert scored(episode(search(0, "a"), turns=2, question=titled)).per_turn == (0.5, 0)


def test_no_turn_pays_for_what_another_showed() -> None:
    """By title the first search showed half; ids of the question's own kind then say that it did not."""
    metadata = {"supporting_ids": ["wiki/Bern-1", "wiki/Basel-2"], "supporting_titles": ["Title 17", "Basel"]}
    found = episode(
        search(0, "17"), search(1, "wiki/Klee-3"), turns=3, question=replace(QUESTION, metadata=metadata)
    )
    assert scored(found).per_turn == (0.5, 0, 0)


def test_what_the_prompt_showed_is_credited_to_no_turn() -> None:
    """A template may search for the question itself; the policy searches again in its first turn."""
    prompt = search(0, "a")
    assert scored(episode(prompt, search(0, "a", "b"), turns=2)).per_turn == (0.5, 0)
    alone = episode(turns=2)
    alone.searches = [prompt]
    assert scored(alone) == Score(0, {"known": 1.0}, (0, 0))


def test_a_question_without_supporting_passages_has_no_credit_and_says_so() -> None:
    unknown = replace(QUESTION, metadata={})
    assert scored(episode(search(0, "a"), turns=2, question=unknown)) == Score(0, {"known": 0.0})


def test_conforms_to_the_reward_seam() -> None:
    check_reward("evidence")
