"""Printing a transcript: coloured text, with marks that say the same without colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from srl.answers import contains_answer
from srl.browse.formatting import number, signed
from srl.browse.transcript import Step, Transcript, describe
from srl.safe import one_line, safe
from srl.store.verdict import VERDICTS
from srl.trajectory import Search

WROTE, READ = "┃ ", "┊ "
"""The marks before lines that the policy wrote, and before lines that it only read."""

_STYLES = {"thought": "cyan", "search": "yellow", "answer": "bold magenta", "other": ""}
_SHOWN_AS = {"none": "not shown: it did not fit", "part": "shown without its middle"}
_INDENT = 11
_TITLE = 60


def render(console: Console, shown: Transcript, tokens: bool = False) -> None:
    """Print the transcript; with `tokens` also each token's id, mask, log-prob, advantage and return."""
    for line in _head(shown):
        console.print(line, soft_wrap=True)
    asked = 0
    for step in shown.steps:
        console.print()
        console.print(Text(_heading(step), style="bold" if step.segment.is_policy else "dim"), soft_wrap=True)
        _print_body(console, step)
        if tokens:
            _print_tokens(console, step)
        for search in step.searches:
            asked += 1
            console.print()
            _print_search(console, search, asked, shown.row["golden_answers"])


def _head(shown: Transcript) -> Iterator[Text]:
    row = shown.row
    yield Text(f"trajectory {row['id']}", style="bold").append(
        f" of {safe(row['run_id'])}, {row['phase']} step {row['step']}, sample {row['sample']}",
        style="not bold",
    )
    about = [
        row["data_source"],
        row["question_id"],
        "" if row["hops"] is None else _count(row["hops"], "hop"),
    ]
    yield _field("question", f"{one_line(row['question'])}  ({one_line(', '.join(filter(None, about)))})")
    yield _field("gold", one_line(" | ".join(row["golden_answers"])))
    answer = "(none)" if row["answer"] is None else one_line(row["answer"])
    yield _field("answer", answer, "green" if row["verdict"] == "correct" else "red")
    yield _field("verdict", VERDICTS.get(row["verdict"], "(no golden answers)"))
    yield _field("reward", _reward(shown))
    yield _field("end", _ending(shown))


def _field(name: str, value: str, style: str = "") -> Text:
    return Text(f"{name:<{_INDENT}}", style="dim").append(value, style=f"not dim {style}".strip())


def _reward(shown: Transcript) -> str:
    row, parts = shown.row, shown.row["parts"]
    values = ", ".join(f"{safe(name)} {number(value)}" for name, value in parts.items())
    others = [name for name in ("em", "f1") if name not in parts and row[name] is not None]
    measures = ", ".join(f"{name} {number(row[name])}" for name in others)
    scored = "(not scored)" if row["reward"] is None else number(row["reward"])
    return "; ".join(filter(None, (scored, f"parts before weights: {values}" if values else "", measures)))


def _ending(shown: Transcript) -> str:
    row = shown.row
    counts = [_count(row["turns"], "turn"), _count(row["searches"], "search", "searches")]
    tokens = f"{row['tokens']} of {_count(row['total_tokens'], 'token')} written by the policy"
    return f"{row['end']} after {' and '.join(counts)}; {tokens}"


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def _heading(step: Step) -> str:
    segment = step.segment
    size = _count(len(segment.token_ids), "token")
    who = "prompt" if segment.kind == "prompt" else f"turn {segment.turn + 1}: {segment.kind}"
    if not segment.is_policy:
        return f"── {who}, {size}, masked"
    said = {"advantage": describe(step.advantages), "return": describe(step.returns)}
    values = "".join(f", {name} {value}" for name, value in said.items() if value)
    return f"── {who}, {size}{values}"


def _print_body(console: Console, step: Step) -> None:
    """Print the text with its mark before every line, also before wrapped ones."""
    body, wrote = Text(), step.segment.is_policy
    if wrote:
        for span in step.spans:
            body.append(safe(span.text), style=_STYLES[span.kind])
    else:
        body.append(safe(step.segment.text.strip("\n")), style="dim")
    body.expand_tabs(4)
    for line in body.split("\n", allow_blank=True):
        for piece in line.wrap(console, max(console.width - len(WROTE), 20)):
            mark = (WROTE, "bold") if wrote else (READ, "dim")
            console.print(Text.assemble(mark, piece), soft_wrap=True)


def _print_search(console: Console, search: Search, position: int, golds: Sequence[str]) -> None:
    how = f"{search.status}, {_count(len(search.hits), 'passage')}, {search.latency_s * 1000:.0f} ms"
    tried = f", {search.attempts} attempts" if search.attempts != 1 else ""
    index = f", index {one_line(search.index_digest, 12)}" if search.index_digest else ""
    style = "yellow" if search.status in ("ok", "empty") else "red"
    retriever = f" by {one_line(search.retriever)}" if search.retriever else ""
    heading = f"── search {position}{retriever}: {one_line(search.query)} ({how}{tried}{index})"
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


def _print_tokens(console: Console, step: Step) -> None:
    segment = step.segment
    if not segment.is_policy:
        ids = " ".join(map(str, segment.token_ids))
        console.print(Text(f"  mask 0, ids {ids}", style="dim"), soft_wrap=True)
        return
    columns = [
        ("logprob", segment.logprobs), ("trainer's", step.trainer_logprobs), ("entropy", step.entropies),
        ("advantage", step.advantages), ("return", step.returns),
    ]  # fmt: skip
    present = [(name, values) for name, values in columns if values]
    console.print(Text("      id  mask" + "".join(f"{name:>11}" for name, _ in present), style="dim"))
    for place, token in enumerate(segment.token_ids):
        numbers = "".join(f"{signed(values[place]):>11}" for _, values in present)
        console.print(Text(f"{token:>8}     1{numbers}"))
