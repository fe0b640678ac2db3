"""The figures of an evaluation: hand-computed values, independent formulas, and the names they go by."""

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.evaluate import answer_metrics, env_metrics, pass_at_k, step_metrics
from srl.evaluate.metrics import repetition
from srl.trajectory import Hit, Passage, Question, Search, Segment, Trajectory


def episode(
    answer: str | None = "x",
    question: str = "q",
    source: str = "nq",
    end: str | None = None,
    searches: tuple[Search, ...] = (),
    turns: int = 1,
    valid_actions: int = 1,
    sample: int = 0,
    **metadata: object,
) -> Trajectory:
    """A trajectory whose question has the gold answer `x y`."""
    segments = [Segment("policy", (turn,), "…", turn, (-1.0,)) for turn in range(turns)]
    return Trajectory(
        Question(question, "Q?", ("x y",), source, metadata=metadata),
        [Segment("prompt", (0,), "Q", 0), *segments],
        list(searches),
        end=end or ("unanswered" if answer is None else "answered"),  # type: ignore[arg-type]
        answer=answer,
        sample=sample,
        valid_actions=valid_actions,
        valid_searches=sum(search.status in ("ok", "empty") for search in searches),
    )


def search(*ids: str, status: str = "ok") -> Search:
    hits = tuple(Hit(Passage(passage, f'"{passage}"\ntext'), 1.0) for passage in ids)
    return Search("query", hits, status)  # type: ignore[arg-type]


RIGHT, WRONG = "The X, y!", "z"


def test_em_by_source_and_by_hops_and_the_mean_over_sources() -> None:
    batch = [
        episode(RIGHT, "1", "nq"),
        episode(WRONG, "2", "nq"),
        episode(RIGHT, "3", "nq"),
        episode(WRONG, "4", "hotpotqa", hops=2),
        episode(RIGHT, "5", "hotpotqa", hops=2),
        episode(WRONG, "6", "hotpotqa", hops=3),
    ]
    metrics = answer_metrics(batch, "test")
    assert metrics["test/em/nq"] == pytest.approx(2 / 3)
    assert metrics["test/em/hotpotqa"] == pytest.approx(1 / 3)
    assert metrics["test/em_macro"] == metrics["test/em"] == 0.5
    assert metrics["test/em/hops=2"] == 0.5
    assert metrics["test/em/hops=3"] == 0


def test_a_failed_episode_counts_zero_beside_em_over_the_completed() -> None:
    batch = [
        episode(RIGHT, "1"),
        episode(RIGHT, "2", end="failed"),
        episode(WRONG, "3"),
        episode(None, "4", end="failed"),
    ]
    metrics = answer_metrics(batch)
    assert (metrics["val/em"], metrics["val/em_completed"], metrics["val/failed_share"]) == (0.25, 0.5, 0.5)
    assert metrics["val/f1"] == 0.25


def test_pass_at_k_counts_a_question_once_any_sample_is_right() -> None:
    answers = {"a": [RIGHT, WRONG, WRONG, WRONG], "b": [WRONG] * 4, "c": [RIGHT] * 4}
    batch = [episode(text, q, sample=i) for q, texts in answers.items() for i, text in enumerate(texts)]
    metrics = answer_metrics(batch)
    assert metrics["val/mean@4"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert metrics["val/pass@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert metrics["val/pass@4"] == pytest.approx(2 / 3)
    assert "val/pass@1" not in metrics
    assert "val/pass@3" not in metrics


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(samples: list[bool], k: int) -> None:
    k = min(k, len(samples))
    drawn = fmean(any(draw) for draw in combinations(samples, k))
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(drawn)


def test_env_metrics_by_hand() -> None:
    batch = [
        episode(RIGHT, turns=3, valid_actions=3, searches=(search("a"), search())),
        episode(None, turns=2, valid_actions=0),
        episode(None, turns=1, valid_actions=1, searches=(search("b"),), end="truncated"),
        episode(
            None, turns=2, valid_actions=1, searches=(search("b"), search(status="timed_out")), end="failed"
        ),
    ]
    assert env_metrics(batch) == pytest.approx(
        {
            "env/excluded_share": 1 / 4, "env/excluded_share/searches=0": 0,
            "env/excluded_share/searches=1": 0, "env/excluded_share/searches=2": 1 / 2,
            "env/failed_search_share": 1 / 5, "env/finish_ratio": 1 / 3, "env/truncated_share": 1 / 3,
            "env/number_of_actions/mean": 2, "env/number_of_actions/max": 3, "env/number_of_actions/min": 1,
            "env/number_of_valid_action": 4 / 3, "env/ratio_of_valid_action": (1 + 0 + 1) / 3,
            "env/number_of_valid_search": 1,
        }
    )  # fmt: skip


def recall(*episodes: Trajectory) -> float | None:
    return answer_metrics(episodes).get("val/evidence_recall")


def test_evidence_recall_joins_what_every_search_showed() -> None:
    searches = (search("n1", "p1"), search("p2", "n2"))
    found = episode(searches=searches, supporting_ids=["p1", "p2"])
    missed = episode(supporting_ids=["7"])
    numbered = episode(searches=(search("7"),), supporting_ids=[7])
    first = episode(searches=tuple(replace(one, shown=1) for one in searches), supporting_ids=["p1", "p2"])
    assert recall(found) == 1
    assert recall(first) == 0.5
    assert recall(found, missed, numbered) == pytest.approx(2 / 3)


def test_exact_match_given_that_an_accepted_answer_was_shown() -> None:
    holds, lacks = search("x y"), search("z")
    batch = [
        episode(RIGHT, "1", searches=(lacks, holds)),
        episode(WRONG, "2", searches=(holds,)),
        episode(WRONG, "3", searches=(replace(holds, shown=0),)),
        episode(RIGHT, "4", searches=(lacks,)),
        episode(RIGHT, "5"),
        episode(None, "6", searches=(holds,), end="failed"),
    ]
    metrics = answer_metrics(batch)
    assert (metrics["val/answer_shown"], metrics["val/em_answer_shown"]) == (2 / 5, 1 / 2)
    assert "val/em_answer_shown" not in answer_metrics(batch[2:5])
    assert "val/answer_shown" not in answer_metrics(batch[4:5])


def test_repetition_is_the_share_of_n_grams_that_a_turn_has_before() -> None:
    """Of (1,2) (2,1) (1,2) (2,1) (1,3) two are repeated; other turns and passages do not count."""
    turns = [
        Segment("policy", (1, 2, 1, 2, 1, 3), "…", 0, (-1.0,) * 6),
        Segment("observation", (7, 7, 7, 7), "…", 0),
        Segment("policy", (1, 2), "…", 1, (-1.0,) * 2),
    ]
    trajectory = replace(episode(), segments=turns)
    assert repetition(trajectory, 2) == pytest.approx(2 / 6)
    assert repetition(trajectory, 7) == 0
    assert step_metrics([trajectory])["env/repetition"] == 0
