"""Printing a transcript: coloured text, with marks that say the same without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from srl.answers import contains_answer
from srl.browse.formatting import counted
from srl.browse.transcript import Step, Transcript, describe, facts, marked
from srl.safe import one_line, safe
from srl.trajectory import Search

WROTE, READ = "┃ ", "┊ "
"""The marks before lines that the policy wrote, and before lines that it only read."""

_STYLES = {"thought": "cyan", "search": "yellow", "answer": "bold magenta", "other": ""}
_SHOWN_AS = {"none": "not shown: it did not fit", "part": "shown without its middle"}
_TITLE = 60


def render(console: Console, transcript: Transcript) -> None:
    """Print the transcript."""
    row = transcript.row
    head = Text(f"trajectory {row['id']}", style="bold").append(
        f" of {safe(row['run_id'])}", style="not bold"
    )
    console.print(head, soft_wrap=True)
    for name, value in (("question", row["question"]), *facts(row)):
        line = Text(f"{name:<11}", style="dim")
        style = ("green" if row["verdict"] == "correct" else "red") if name == "answer" else ""
        console.print(line.append(one_line(value), style=f"not dim {style}".strip()), soft_wrap=True)
    searched = 0
    for step in transcript.steps:
        console.print()
        console.print(Text(_heading(step), style="bold" if step.segment.is_policy else "dim"), soft_wrap=True)
        _print_body(console, step, row["golden_answers"])
        for search in step.searches:
            searched += 1
            console.print()
            _print_search(console, search, searched, row["golden_answers"])


def _heading(step: Step) -> str:
    segment = step.segment
    writer = "prompt" if segment.kind == "prompt" else f"turn {segment.turn + 1}: {segment.kind}"
    heading = f"── {writer}, {counted(len(segment.token_ids), 'token')}"
    if not segment.is_policy:
        return f"{heading}, masked"
    numbers = {"advantage": describe(step.advantages), "return": describe(step.returns)}
    return heading + "".join(f", {name} {value}" for name, value in numbers.items() if value)


def _print_body(console: Console, step: Step, golds: Sequence[str]) -> None:
    """Print the text with its mark before every line, also before wrapped ones."""
    body, wrote = Text(), step.segment.is_policy
    for span in step.spans:
        body.append(safe(span.text), style=_STYLES[span.kind])
    if not wrote:
        for piece, is_gold in marked(safe(step.segment.text.strip("\n")), golds):
            body.append(piece, style="bold green" if is_gold else "dim")
    body.expand_tabs(4)
    for line in body.split("\n", allow_blank=True):
        for part in line.wrap(console, max(console.width - len(WROTE), 20)):
            mark = (WROTE, "bold") if wrote else (READ, "dim")
            console.print(Text.assemble(mark, part), soft_wrap=True)


def _print_search(console: Console, search: Search, number: int, golds: Sequence[str]) -> None:
    about = [search.status, counted(len(search.hits), "passage"), f"{search.latency_s * 1000:.0f} ms"]
    about += [f"{search.attempts} attempts"] if search.attempts != 1 else []
    about += [f"index {one_line(search.index_digest, 12)}"] if search.index_digest else []
    retriever = f" by {one_line(search.retriever)}" if search.retriever else ""
    heading = f"── search {number}{retriever}: {one_line(search.query)} ({', '.join(about)})"
    style = "yellow" if search.status in ("ok", "empty") else "red"
    console.print(Text(heading, style=style), soft_wrap=True)
    if search.error:
        console.print(Text(f"   {one_line(search.error)}", style="red"), soft_wrap=True)
    texts = dict(enumerate(search.shown_texts, start=1))
    for rank, hit in enumerate(search.hits, start=1):
        line = Text(f"{rank:>4}. {hit.score:>9.3f}  {one_line(hit.passage.title, _TITLE)}")
        line.append(f"  {one_line(hit.passage.id, _TITLE)}", style="dim")
        if note := _SHOWN_AS.get(search.shown_as(rank) or ""):
            line.append(f"  ← {note}", style="yellow")
        if contains_answer(texts.get(rank, hit.passage.contents), golds):
            line.append("  ← contains a golden answer", style="green")
        console.print(line, soft_wrap=True)
