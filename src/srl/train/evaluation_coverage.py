"""The coverage of an evaluation's questions: what the corpus that is searched has of them at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from srl.errors import UserError
from srl.evaluate.corpus_scan import Stores
from srl.evaluate.coverage import CoverageShares, WrittenCoverage, coverage, coverage_key, read_coverage
from srl.progress import counted
from srl.serve.named_retrievers import indexes_of
from srl.train.make_missing import Note
from srl.trajectory import Question, SearchTool
from srl.workspace import Workspace, is_evaluation


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
        note(
            "coverage unknown: the passages that are searched are not at hand; with a corpus file type "
            "srl data coverage DATA --corpus FILE"
        )
        return None
    key = coverage_key(questions, [index.manifest.corpus_digest for index in indexes])
    written = _earlier(key, questions, workspace)
    if written is None:
        passages = Stores(index.passages for index in indexes if index.passages is not None)
        notes: list[str] = []
        with counted("reading the corpus for its coverage", len(passages)) as count:
            written = WrittenCoverage(coverage(questions, passages, notes.append, count), notes, key)
    for text in written.notes:
        note(f"note: {text}")
    covered, known = CoverageShares.of(written.found.values()).answerable
    if known:
        note(f"answerable from the corpus: {covered / known:.1%} of {known:,} questions")
    else:
        note("coverage: no question names a gold passage, or has an answer to look for")
    return written


def _earlier(key: str, questions: Sequence[Question], workspace: Workspace) -> WrittenCoverage | None:
    """What the newest evaluation with this key wrote of `questions`; a damaged file is as good as none."""
    for run in reversed(workspace.all_runs()):
        with suppress(UserError):
            if is_evaluation(run) and (written := read_coverage(run, key)) is not None:
                return written._replace(found={item.id: written.found[item.id] for item in questions})
    return None
