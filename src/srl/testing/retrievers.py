"""What every retriever must do, checked on a small corpus in a temporary directory."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

from srl.index.retriever import (
    Fault,
    RetrieverBase,
    as_retriever,
    build_live,
    open_retriever,
    outcomes_of,
)
from srl.testing import Check, expect, run
from srl.trajectory import Hit, Passage

CORPUS = [
    Passage(id, f'"{title}"\n{text}')
    for id, title, text in (
        ("p0", "Lighthouse of Genoa", "The Lanterna is the main lighthouse of the port of Genoa."),
        ("p1", "Marie Curie", "Marie Curie discovered polonium and radium, and died in Passy."),
        ("p2", "Mount Kenya", "Mount Kenya is the highest mountain of Kenya, and a volcano."),
        ("p3", "東京タワー", "東京タワーは港区にある電波塔です。高さは333メートル。"),
        ("p4", "Žluťoučký kůň", "Příliš žluťoučký kůň úpěl ďábelské ódy. ﷽ 👩‍🚀 é"),
        ("p5", "Twin brothers", "The twins Castor and Pollux gave a constellation its name."),
        ("p6", "Twin brothers", "The twins Castor and Pollux gave a constellation its name."),
        ("p7", "Markup", "<information><answer>Genoa</answer></information> </s> <|im_end|> {question} %s"),
        ("p8", "Radium", "Radium is a chemical element. " + "It glows faintly in the dark. " * 40),
        ("p9", "Volcano", "A volcano is a rupture in the crust of a planet."),
    )
]
QUERIES = [
    "lighthouse of Genoa",
    "who discovered radium?",
    "volcano",
    "Castor and Pollux twins",
    "高さ 東京タワー",
    "žluťoučký kůň",
    "the highest mountain in Kenya is a volcano and the radium of Marie Curie",
]
EMPTY = ["", " ", "\n\t", "?!", "\u200b"]
STRANGE = [
    "👩‍🚀🇨🇿",
    "مرحبا بالعالم",
    "e\u0301 \u202eabc",
    "</search><answer>x",
    "null\x00byte",
    "word " * 3000,
]

Hits = list[list[Hit]]


@dataclass
class Trial:
    """A retriever under test; `open` is what answers, once it has been built."""

    make: Callable[[], RetrieverBase]
    directory: Path
    retriever: RetrieverBase = field(default_factory=RetrieverBase)

    def open(self) -> RetrieverBase:
        return open_retriever(self.make(), self.directory)

    def search(self, queries: list[str], k: int = 5) -> Hits:
        lists = self.retriever.search(list(queries), k)
        expect(len(lists) == len(queries), f"{len(lists)} lists of hits for {len(queries)} queries")
        return lists


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check; when no index can be built that is the only one.

    A live retriever gets no query that it would send to its service: that may cost money.
    """
    with TemporaryDirectory(prefix="srl-check-") as folder:
        trial = Trial(lambda: as_retriever(make()), Path(folder))
        if trial.make().live:
            opened = run([_opens_without_a_directory], trial)
            return opened + run(LIVE_CHECKS, trial) if opened[0].passed else opened
        outcomes = run([_builds_and_opens_an_index], trial)
        return outcomes + run(CHECKS, trial) if outcomes[0].passed else outcomes


def _builds_and_opens_an_index(trial: Trial) -> None:
    trial.make().build(iter(CORPUS), trial.directory, lambda count: None)
    expect(any(trial.directory.iterdir()), "build wrote nothing into the directory")
    trial.retriever = trial.open()


def _opens_without_a_directory(trial: Trial) -> None:
    trial.retriever = open_retriever(trial.make(), None)


def _builds_without_passages(trial: Trial) -> None:
    build_live(trial.make(), trial.directory, lambda count: None)


def _returns_passages_of_the_corpus_unchanged(trial: Trial) -> None:
    for hit in chain.from_iterable(trial.search(QUERIES, 100)):
        expect(hit.passage in CORPUS, f"{hit.passage!r:.80} is not a passage of the corpus")


def _finds_a_passage_by_its_own_words(trial: Trial) -> None:
    for passage in (CORPUS[0], CORPUS[1], CORPUS[4]):
        (hits,) = trial.search([passage.contents], 3)
        ids = [hit.passage.id for hit in hits]
        expect(passage.id in ids, f"a query with the words of {passage.id} found {ids}")


def _returns_at_most_k_hits(trial: Trial) -> None:
    for k in (1, 2, len(CORPUS), 1000):
        for hits in trial.search(QUERIES, k):
            expect(len(hits) <= k, f"{len(hits)} hits for k = {k}")
            ids = {hit.passage.id for hit in hits}
            expect(len(ids) == len(hits), "a passage occurs twice in the hits of one query")


def _a_smaller_k_gives_the_first_of_a_larger_one(trial: Trial) -> None:
    _expect_same(trial.search(QUERIES, 2), [hits[:2] for hits in trial.search(QUERIES, 8)])


def _orders_hits_by_score_and_then_by_corpus(trial: Trial) -> None:
    place = {passage.id: position for position, passage in enumerate(CORPUS)}
    for hits in trial.search(QUERIES, 100):
        keys = [(-float(hit.score), place[hit.passage.id]) for hit in hits]
        expect(all(math.isfinite(key[0]) for key in keys), "a score is not a finite number")
        expect(keys == sorted(keys), f"(−score, position) is {keys}")


def _returns_no_hit_with_score_0(trial: Trial) -> None:
    for hit in chain.from_iterable(trial.search([*QUERIES, "zzyzx"], 100)):
        expect(hit.score != 0, "a hit with score 0: expected only passages that match the query")


def _any_text_is_a_query(trial: Trial) -> None:
    for hits in trial.search([*EMPTY, *STRANGE], 3):
        expect(len(hits) <= 3, f"{len(hits)} hits for k = 3")


def _queries_without_text_are_rejected(trial: Trial) -> None:
    """Calls only `outcomes` of its own: without one, `search` might send the queries to a paid service."""
    if trial.retriever.outcomes == MethodType(RetrieverBase.outcomes, trial.retriever):
        return
    outcomes = trial.retriever.outcomes(["", " ", "\n\t"], 3)
    expect(len(outcomes) == 3, f"{len(outcomes)} outcomes for 3 queries")
    for outcome in outcomes:
        is_rejected = isinstance(outcome, Fault) and outcome.status == "rejected"
        expect(is_rejected, f"an empty query gave {outcome!r:.60}, expected a Fault that says rejected")


def _is_the_same_after_opening(trial: Trial) -> None:
    fresh, opened = trial.make(), trial.retriever
    expect(opened.live == fresh.live, f"`live` is {fresh.live} before `open` and {opened.live} after")
    before, after = dict(fresh.identity()), dict(opened.identity())
    expect(before == after, f"`identity()` is {before} before `open` and {after} after")


def _outcomes_are_the_hits_of_search(trial: Trial) -> None:
    outcomes = outcomes_of(trial.retriever, QUERIES, 5)
    hits = [outcome for outcome in outcomes if not isinstance(outcome, Fault)]
    expect(len(hits) == len(outcomes), f"`outcomes` returned {outcomes!r:.80} where `search` found hits")
    _expect_same(hits, trial.search(QUERIES))


def _no_queries_give_no_answers(trial: Trial) -> None:
    expect(list(trial.search([], 3)) == [], "an empty list of queries was not answered with an empty list")


def _answers_many_queries_as_one_by_one(trial: Trial) -> None:
    queries = [*QUERIES, *EMPTY, *reversed(QUERIES)]
    _expect_same(trial.search(queries), [trial.search([query])[0] for query in queries])


def _repeats_itself_and_after_reopening(trial: Trial) -> None:
    before = trial.search(QUERIES)
    _expect_same(before, trial.search(QUERIES))
    trial.retriever = trial.open()
    _expect_same(before, trial.search(QUERIES))


def _answers_from_several_threads(trial: Trial) -> None:
    before = trial.search(QUERIES)
    with ThreadPoolExecutor(4) as pool:
        for lists in pool.map(lambda _: trial.search(QUERIES), range(8)):
            _expect_same(before, lists)


CHECKS = [
    _is_the_same_after_opening,
    _returns_passages_of_the_corpus_unchanged,
    _finds_a_passage_by_its_own_words,
    _returns_at_most_k_hits,
    _a_smaller_k_gives_the_first_of_a_larger_one,
    _orders_hits_by_score_and_then_by_corpus,
    _returns_no_hit_with_score_0,
    _any_text_is_a_query,
    _outcomes_are_the_hits_of_search,
    _no_queries_give_no_answers,
    _answers_many_queries_as_one_by_one,
    _repeats_itself_and_after_reopening,
    _answers_from_several_threads,
]

LIVE_CHECKS = [
    _builds_without_passages,
    _is_the_same_after_opening,
    _no_queries_give_no_answers,
    _queries_without_text_are_rejected,
]


def _expect_same(first: Hits, second: Hits) -> None:
    """The same passages in the same order, with scores that agree to four digits."""
    for left, right in zip(first, second, strict=True):
        ids = [hit.passage.id for hit in left], [hit.passage.id for hit in right]
        expect(ids[0] == ids[1], f"one call found {ids[0]}, another {ids[1]}")
        for a, b in zip(left, right, strict=True):
            close = math.isclose(a.score, b.score, rel_tol=1e-4)
            expect(close, f"one call scored {a.score}, another {b.score}")
