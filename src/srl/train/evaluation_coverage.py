"""The coverage of an evaluation's questions: what the corpus that is searched has of them at all."""

from __future__ import annotations

from collections.abc import Sequence

from srl.errors import UserError
from srl.evaluate.corpus_scan import Stores
from srl.evaluate.coverage import CoverageShares, WrittenCoverage, coverage, coverage_key, read_coverage
from srl.index import Index
from srl.progress import counted
from srl.serve.named_retrievers import indexes_of
from srl.train.make_missing import Note
from srl.trajectory import Question, SearchTool
from srl.workspace import Workspace, is_evaluation

_UNKNOWN = (
    "coverage unknown: the passages that are searched are not at hand; with a corpus file type "
    "srl data coverage DATA --corpus FILE"
)


def evaluation_coverage(
    questions: Sequence[Question], search: SearchTool | None, workspace: Workspace, note: Note
) -> WrittenCoverage | None:
    """The coverage of `questions` in the corpora of all indexes behind `search`; None without search.

    It is taken from an evaluation that had the same questions and corpora, if there is one. Of a server, a
    live index or a cassette it is unknown: `note` is told, and the result is None.
    """
    if search is None:
        return None
    indexes = indexes_of(search)
    if indexes is None or any(index.passages is None for index in indexes):
        note(_UNKNOWN)
        return None
    key = coverage_key(questions, [index.manifest.corpus_digest for index in indexes])
    written = _earlier(key, questions, workspace) or _made(questions, indexes, key)
    for text in written.notes:
        note(f"note: {text}")
    note(_in_words(CoverageShares.of(written.found.values())))
    return written


def _earlier(key: str, questions: Sequence[Question], workspace: Workspace) -> WrittenCoverage | None:
    """What the newest evaluation with this key wrote of `questions`; a damaged file is as good as none."""
    for run in reversed(workspace.all_runs()):
        try:
            written = read_coverage(run, key) if is_evaluation(run) else None
        except UserError:
            continue
        if written is not None:
            return written._replace(found={item.id: written.found[item.id] for item in questions})
    return None


def _made(questions: Sequence[Question], indexes: Sequence[Index], key: str) -> WrittenCoverage:
    passages = Stores(index.passages for index in indexes if index.passages is not None)
    notes: list[str] = []
    with counted("reading the corpus for its coverage", len(passages)) as count:
        return WrittenCoverage(coverage(questions, passages, notes.append, count), notes, key)


def _in_words(shares: CoverageShares) -> str:
    """`answerable from the corpus: 97.0% of 1,000 questions`."""
    covered, known = shares.answerable
    if not known:
        return "coverage: no question names a gold passage, or has an answer to look for"
    return f"answerable from the corpus: {covered / known:.1%} of {known:,} questions"
