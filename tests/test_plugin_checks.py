"""The conformance kit: a plugin that keeps its promises passes, and each broken promise is found."""

import random
import re
from collections import Counter

import pytest
from tests.plugin_site import site

from srl.advantage import (
    Advantages,
    Algorithm,
    group_mean,
    group_std,
    over_tokens,
    sequence_score,
    valid_mask,
)
from srl.testing import check_algorithm, check_retriever, check_reward, checks
from srl.testing.retrievers import CORPUS
from srl.trajectory import Hit, Passage, Score

__all__ = ["site"]
ZERO = "is 0 on invalid rows and where the policy did not write"
PADDING = "padding or a retrieved span changes nothing"
SHAPE = "returns two tensors of the shape and dtype of the rewards"
FINITE = "is finite for any group"
SCORES = "gives one finite score for each trajectory"


def failed(kind, given):
    return {check.name for check in checks(kind, given) if not check.passed}


class Overlap:
    """A retriever that does everything right."""

    name = "overlap"

    def build(self, passages, directory, progress):
        self.passages = list(passages)
        (directory / "index").write_text("here")
        progress(len(self.passages))

    def open(self, directory):
        assert (directory / "index").read_text() == "here"

    def search(self, queries, k):
        return [self.one(set(re.findall(r"\w+", query.lower())), k) for query in queries]

    def one(self, words, k):
        counts = Counter()
        for row, passage in enumerate(self.passages):
            counts[row] = len(words & set(re.findall(r"\w+", passage.contents.lower())))
        best = sorted((item for item in counts.items() if item[1]), key=lambda item: (-item[1], item[0]))
        return [Hit(self.passages[row], float(count)) for row, count in best[:k]]


def broken_search(change):
    """`Overlap` with its answer to a call of `search` changed."""

    def search(self, queries, k):
        return change(Overlap.search(self, queries, k), queries, k)

    return type("Broken", (Overlap,), {"search": search})()


def refuses(is_bad):
    """Raises where `is_bad` of the queries."""

    def change(found, queries, k):
        if is_bad(queries):
            raise ValueError("no")
        return found

    return change


def rewritten(found, queries, k):
    shouted = [
        [(hit, Passage(hit.passage.id, hit.passage.contents.upper())) for hit in hits] for hits in found
    ]
    return [[Hit(passage, hit.score) for hit, passage in hits] for hits in shouted]


BROKEN = {
    "orders hits by score and then by corpus": lambda found, *_: [hits[::-1] for hits in found],
    "returns at most k hits": lambda found, *_: [hits + [Hit(CORPUS[0], 0.001)] * 3 for hits in found],
    "returns passages of the corpus unchanged": rewritten,
    "returns no hit with score 0": lambda found, *_: [hits or [Hit(CORPUS[0], 0.0)] for hits in found],
    "repeats itself and after reopening": lambda found, *_: [
        [Hit(hit.passage, hit.score + random.random()) for hit in hits] for hits in found
    ],
    "answers many queries as one by one": lambda found, *_: found[:1] * len(found),
    "any text is a query": refuses(lambda queries: any(not query.strip() for query in queries)),
    "any text is a query at all": refuses(lambda queries: "👩" in "".join(queries)),
    "no queries give no answers": lambda found, *_: found or [[]],
    "finds a passage by its own words": lambda found, *_: [[] for _ in found],
    "a smaller k gives the first of a larger one": lambda found, queries, k: [
        hits[k == 2 :] for hits in found
    ],
}


@pytest.mark.parametrize("check", BROKEN)
def test_broken_retriever_is_found_out(check):
    assert check.removesuffix(" at all") in failed("retriever", broken_search(BROKEN[check]))


class Outside:
    """A live retriever of no more than `open` and `search`; it may not be asked anything by a check."""

    name = "outside"
    live = True

    def open(self, directory):
        assert directory is None

    def search(self, queries, k):
        assert not queries, "a check asked outside"
        return []


class Matching:
    """A reward that does everything right."""

    def score(self, trajectories):
        return [Score(self.one(trajectory), {"match": self.one(trajectory)}) for trajectory in trajectories]

    def one(self, trajectory):
        return float(trajectory.answer in trajectory.question.golden_answers)


def broken_reward(one):
    return type("Broken", (Matching,), {"one": lambda self, trajectory: float(one(trajectory))})()


def of_kind(*kinds):
    def one(trajectory):
        return any(
            "<answer>Genoa" in segment.text for segment in trajectory.segments if segment.kind in kinds
        )

    return one


def changes_them(trajectory):
    trajectory.step += 1
    return 1


@pytest.mark.parametrize("kind", ["observation", "prompt", "feedback"])
def test_reward_that_scores_what_the_policy_only_read_is_found_out(kind):
    check = "what the policy only read earns nothing"
    assert failed("reward", broken_reward(of_kind(kind))) == {check}
    assert check in failed("reward", broken_reward(of_kind("policy", kind)))


@pytest.mark.parametrize(
    ("one", "check"),
    [
        (lambda trajectory: float("nan"), SCORES),
        (lambda trajectory: len(trajectory.answer), SCORES),
        (lambda trajectory: 1 / trajectory.turns, SCORES),
        (lambda trajectory: random.random(), "a score does not depend on what shares the batch"),
        (changes_them, "leaves the trajectories as they were"),
    ],
)
def test_broken_reward_is_found_out(one, check):
    assert check in failed("reward", broken_reward(one))


class Async(Matching):
    async def score(self, trajectories):
        return Matching.score(self, trajectories)


def estimator(change=lambda found, **_: found, mask_of=valid_mask):
    """A mean baseline over the group, with one thing about it changed."""

    def estimate(*, token_level_rewards, response_mask, group_ids, valid, **rest):
        mask = mask_of(response_mask, valid)
        scores = sequence_score(token_level_rewards, mask)
        found = over_tokens(scores - group_mean(scores, group_ids, valid), mask)
        given = {
            "rewards": token_level_rewards,
            "mask": mask,
            "scores": scores,
            "groups": group_ids,
            "valid": valid,
        }
        return Advantages(*[change(found, **given, **rest)] * 2)

    return Algorithm("mean", estimate)


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        (estimator(lambda found, **_: found + 1), ZERO),
        (estimator(mask_of=lambda mask, valid: mask.bool()), ZERO),
        (
            estimator(lambda found, mask, rewards, **_: found - rewards.mean() * mask),
            "an invalid row changes no other",
        ),
        (estimator(lambda found, **_: found.cumsum(0)), "does not depend on the order of rows"),
        (estimator(lambda found, groups, **_: found * groups[:, None]), "group ids are only labels"),
        (estimator(lambda found, **_: found / found.shape[1]), PADDING),
        (estimator(lambda found, **_: found[:, :-1]), SHAPE),
        (estimator(lambda found, scores, **_: found / (scores.unique().numel() - 1)), FINITE),
        (
            estimator(
                lambda found, scores, groups, valid, **_: found / group_std(scores, groups, valid)[:, None]
            ),
            FINITE,
        ),
        (estimator(lambda found, rewards, **_: rewards.zero_() + found), "leaves its inputs as they were"),
        (Algorithm("mean", estimator().estimator, False, {"n": 1}), "is an algorithm with dotted defaults"),
        ("a string is no algorithm".split, "is an algorithm with dotted defaults"),
    ],
)
def test_broken_algorithm_is_found_out(algorithm, check):
    assert check in failed("algorithm", algorithm)


def test_plugins_that_keep_their_promises_pass():
    for kept in (check_retriever(Overlap()), check_retriever(Outside()), check_reward(Async)):
        assert all(check.passed for check in kept)
    assert all(check.passed for check in check_algorithm(estimator()))
