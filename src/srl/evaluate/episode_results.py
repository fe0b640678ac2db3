"""What one episode came to, without its text: the input of all metrics, statistics and tables.

`EpisodeResult.of` makes it of a trajectory, `read_results` of a log. Both give the same, so a table made
while an evaluation runs, after it, or of a resumed one is the same.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from srl.answers import contains_answer, cover_exact_match, exact_match, f1
from srl.data.corpus import title_key
from srl.evaluate.retrieval_metrics import document_of, recall_at_k, supporting_ids
from srl.trajectory import FAULTS, EndReason, Phase, Question, Trajectory

_BATCH = 2048
"""Rows of a log that are held in memory at a time."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One episode measured. An episode that a fault ended (`valid` is false) has `em`, `f1`, `cover_em` 0."""

    question_id: str
    sample: int
    data_source: str
    split: str
    hops: int | None
    """Hops that the question needs, if its metadata says so."""
    kind: str
    """The type of the question, such as `comparison` (metadata `type`); empty if unknown."""
    document: str
    """The document that the question was written from (`document_of`); empty if unknown."""
    valid: bool
    end: EndReason
    em: float
    f1: float
    cover_em: float
    answer_shown: bool
    """Whether a passage that the policy was shown contains a golden answer."""
    evidence_recall: float | None
    """The share of the question's gold passages that were shown, a part being enough; None if it names
    none."""
    searches: int
    """Searches with any outcome."""
    valid_searches: int
    failed_searches: int
    """Searches that failed because of the infrastructure."""
    named_searches: tuple[tuple[str, int], ...]
    """How many answered searches asked each retriever by its name."""
    turns: int
    valid_actions: int
    tokens: int
    """Tokens that the policy wrote."""
    total_tokens: int
    """All tokens: prompt, policy and observations."""
    seconds: float | None
    """From the prompt to the end, beside the episodes that ran at the same time; None if unknown."""
    protocol: str = "tags"
    malformed: int = 0
    """Calls that could not be read, or that no tool takes."""

    @property
    def cluster(self) -> Hashable:
        """What the question depends on together with others: its document, if known, else itself."""
        return self.document or (self.question_id,)

    @classmethod
    def of(cls, trajectory: Trajectory) -> EpisodeResult:
        """What this trajectory came to."""
        question, searches = trajectory.question, trajectory.searches
        passages = [hit.passage for search in searches for hit in search.shown_hits]
        golds = question.golden_answers
        return cls(
            **_of_question(question),
            **_correctness(trajectory.answer if trajectory.valid else None, golds),
            sample=trajectory.sample,
            valid=trajectory.valid,
            end=trajectory.end,
            answer_shown=any(
                contains_answer(text, golds) for search in searches for text in search.shown_texts
            ),
            evidence_recall=evidence_recall(
                question, {passage.id for passage in passages}, {passage.title for passage in passages}
            ),
            searches=len(searches),
            valid_searches=trajectory.valid_searches,
            failed_searches=sum(search.is_fault for search in searches),
            named_searches=_counted(
                search.retriever for search in searches if search.status in ("ok", "empty")
            ),
            turns=trajectory.turns,
            valid_actions=trajectory.valid_actions,
            tokens=trajectory.policy_tokens,
            total_tokens=sum(len(segment.token_ids) for segment in trajectory.segments),
            seconds=trajectory.seconds,
            protocol=trajectory.protocol,
            malformed=trajectory.malformed,
        )


def results_of(episodes: Sequence[EpisodeResult] | Sequence[Trajectory]) -> list[EpisodeResult]:
    """The results of `episodes`, which may be results already."""
    return [each if isinstance(each, EpisodeResult) else EpisodeResult.of(each) for each in episodes]


def evidence_recall(question: Question, ids: Collection[str], titles: Collection[str]) -> float | None:
    """The share of the question's gold passages among the passages with these ids and titles.

    Of a question that names only titles, or beside them the ids of another corpus, it is the share of titles;
    None for one that names neither.
    """
    supporting, gold_titles = supporting_ids(question), {title_key(title) for title in _titles(question)}
    if supporting and not (gold_titles and _of_another_corpus(supporting, ids)):
        return recall_at_k(list(ids), supporting)
    return recall_at_k([title_key(title) for title in titles], gold_titles) if gold_titles else None


def _of_another_corpus(supporting: Collection[str], ids: Collection[str]) -> bool:
    """Whether `supporting` begin with a data source, as `srl data prepare` writes ids, and no id does.

    Which one does not matter: in a corpus of several sources a passage of another may be shown first.
    """
    return bool(ids) and any(map(_OF_SOURCE, supporting)) and not any(map(_OF_SOURCE, ids))


_OF_SOURCE = re.compile(r"[\w.-]+/[^/]").match
"""`SOURCE/NAME`; the address of a page begins with `https://`."""


def _titles(question: Question) -> list[str]:
    return [str(title) for title in question.metadata.get("supporting_titles") or ()]


def _of_question(question: Question) -> dict[str, Any]:
    metadata = question.metadata
    return {
        "question_id": question.id,
        "data_source": question.data_source,
        "split": question.split,
        "hops": question.hops,
        "kind": str(metadata.get("type") or ""),
        "document": document_of(metadata),
    }


def _correctness(answer: str | None, golds: Sequence[str]) -> dict[str, Any]:
    return {
        "em": exact_match(answer, golds),
        "f1": f1(answer, golds),
        "cover_em": cover_exact_match(answer, golds),
    }


def _counted(names: Iterator[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(filter(None, names)).items()))


_QUERY = """
SELECT question_id, sample, data_source, split, metadata, golden_answers, answer, "end", valid,
    gold_in_passages AS answer_shown, searches, valid_searches, coalesce(failed, 0) AS failed_searches, named,
    turns, valid_actions, tokens, total_tokens, seconds, protocol, malformed, ids, titles
FROM trajectories LEFT JOIN (
    SELECT run_id, trajectory_id AS id,
        count(*) FILTER (status IN ({faults})) AS failed,
        list(retriever) FILTER (status IN ('ok', 'empty')) AS named,
        flatten(list([hit.passage_id FOR hit IN hits[:coalesce(shown, len(hits))]])) AS ids,
        flatten(list([hit.title FOR hit IN hits[:coalesce(shown, len(hits))]])) AS titles
    FROM raw.searches WHERE phase = $phase GROUP BY run_id, trajectory_id
) USING (run_id, id)
WHERE phase = $phase ORDER BY question_id, sample, run_id, step
"""


def read_results(connection: duckdb.DuckDBPyConnection, phase: Phase = "eval") -> list[EpisodeResult]:
    """The episodes of `phase` in a log (`srl.store.open`), in the order of question ids and samples."""
    faults = ", ".join(f"'{status}'" for status in sorted(FAULTS))
    cursor = connection.execute(_QUERY.format(faults=faults), {"phase": phase})
    names = [column[0] for column in cursor.description or ()]
    results: list[EpisodeResult] = []
    while batch := cursor.fetchmany(_BATCH):
        results += [_of_row(dict(zip(names, row, strict=True))) for row in batch]
    return results


def _of_row(row: Mapping[str, Any]) -> EpisodeResult:
    golds = tuple(row["golden_answers"])
    question = Question(
        row["question_id"], "", golds, row["data_source"], row["split"], metadata=json.loads(row["metadata"])
    )
    same = (
        "sample", "valid", "end", "answer_shown", "searches", "valid_searches", "failed_searches",
        "turns", "valid_actions", "tokens", "total_tokens", "seconds", "protocol", "malformed",
    )  # fmt: skip
    return EpisodeResult(
        **_of_question(question),
        **_correctness(row["answer"] if row["valid"] else None, golds),
        **{name: row[name] for name in same},
        evidence_recall=evidence_recall(question, set(row["ids"] or ()), set(row["titles"] or ())),
        named_searches=_counted(iter(row["named"] or ())),
    )
