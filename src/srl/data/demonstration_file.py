"""Demonstrations: questions with the text of each turn, as JSON lines.

The episode runs the turns against real search, so that fine-tuning sees exactly the tokens and masks
of a rollout. How a turn is written is known here only: `turn_text` of one that is made, `turns_of` of those
that were sampled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from srl.data.published_rows import Record, describe
from srl.errors import CheckFailed, UserError
from srl.files import atomic_file, read_jsonl
from srl.protocol import FORMATS, STOP_STRINGS, Format, escape, search_tag
from srl.protocol.calls import opens_thought
from srl.trajectory import Question, Trajectory


def turn_text(thought: str, action: Literal["search", "answer"], content: str) -> str:
    """A turn that ends in an action; without a thought that is all."""
    return f"<think> {thought} </think> " * bool(thought) + f"<{action}> {content} </{action}>"


def turns_of(trajectory: Trajectory) -> list[str]:
    """The text of each turn through its closing tag, without what the last token wrote after it.

    A native search and a native final message become tags. A turn with other calls has none: it stays as it
    is, and only a model with the same format of calls can say it.
    """
    turns, inside_thought = list[str](), trajectory.think_is_open
    for segment in trajectory.segments[1:]:
        if not segment.is_policy:
            inside_thought = opens_thought(segment.text)
        elif trajectory.protocol == "tags":
            turns.append(segment.text[: _end(segment.text)])
        else:
            turns.append(_with_tags(segment.text, inside_thought, FORMATS[trajectory.protocol]))
    return turns


def _with_tags(text: str, inside_thought: bool, form: Format) -> str:
    """A native turn with one search, or with no call, as a demonstration has it."""
    thought, calls, outside = form.read(text, inside_thought)
    outside, call = outside.strip(), calls[0] if calls else None
    if call is None:
        action = outside if "</answer>" in outside else f"<answer> {outside} </answer>"
    elif len(calls) == 1 and call.name == "search" and not call.error:
        tag = search_tag(str(call.arguments.get("retriever", "")))
        action = f"{outside} {tag} {escape(call.query).strip()} </search>".lstrip()
    else:
        return text
    thought = form.bare(thought)
    return f"<think> {thought} </think> " * bool(thought) + action


def _end(text: str) -> int:
    return min((text.index(stop) + len(stop) for stop in STOP_STRINGS if stop in text), default=len(text))


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What was `written` to `file`, by data source, and what was left out, by data source and reason."""

    file: Path
    written: Counter[str]
    left_out: Counter[tuple[str, str]]

    def as_json(self) -> dict[str, Any]:
        reasons = [
            {"source": source, "reason": why, "count": n} for (source, why), n in self.left_out.items()
        ]
        counts = {"demonstrations": self.written.total(), "sources": self.written, "left_out": reasons}
        return {"file": self.file, **counts}


def save_demonstrations(
    path: Path, demonstrations: Sequence[Question], left_out: Counter[tuple[str, str]]
) -> Demonstrations:
    """Write demonstrations, and tell what became of the others. Raises CheckFailed where there is none."""
    if not demonstrations:
        reasons = "; ".join(f"{source}: {count:,}: {why}" for (source, why), count in left_out.most_common(3))
        raise CheckFailed(f"there is no demonstration to write ({reasons})")
    write_demonstrations(path, demonstrations)
    return Demonstrations(path, Counter(question.data_source for question in demonstrations), left_out)


def write_demonstrations(path: Path, questions: Iterable[Question]) -> None:
    """JSON lines `{"id", "question", "golden_answers", "data_source", "turns"}`, and `hops` if known."""
    with atomic_file(path) as file:
        for question in questions:
            row = {
                "id": question.id,
                "question": question.text,
                "golden_answers": list(question.golden_answers),
                "data_source": question.data_source,
                **{key: question.metadata[key] for key in ("hops",) if key in question.metadata},
                "turns": question.metadata["turns"],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_demonstrations(path: Path) -> list[Question]:
    """Questions with `metadata["turns"]`; further demonstrations of an id are `ID#2`, `ID#3`, …

    White space at the end of a turn is left out: a turn ends with its closing tag.

    Raises UserError with file and line, also for a demonstration that an earlier line has.
    """
    questions: dict[str, Question] = {}
    for index, (line, row) in enumerate(read_jsonl(path)):
        record = Record(path, f":{line}", index, row)
        question, number = _demonstration(record, f"{path.stem}/{line}"), 1
        name = question.id
        while (earlier := questions.get(name)) is not None:
            if earlier.metadata["turns"] == question.metadata["turns"] and earlier.text == question.text:
                raise record.error(
                    "a demonstration that no earlier line has", f"that of {question.id!r} again"
                )
            number += 1
            name = f"{question.id}#{number}"
        questions[name] = replace(question, id=name)
    if not questions:
        raise UserError(f"{path}: expected demonstrations, found none")
    return list(questions.values())


def are_demonstrations(path: Path) -> bool:
    """Whether the first line of a file of JSON lines is a demonstration. Raises UserError as reading does."""
    return any("turns" in row for _, row in islice(read_jsonl(path), 1))


def _demonstration(record: Record, name: str) -> Question:
    turns = record.items("turns")
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise record.error("a text for each turn in 'turns'", describe(turns))
    return Question(
        id=record.text("id") if record.row.get("id") is not None else name,
        text=record.text("question"),
        golden_answers=record.answers("golden_answers") if record.row.get("golden_answers") else (),
        data_source=record.text("data_source") if record.row.get("data_source") else record.path.stem,
        metadata={
            "turns": [turn.rstrip() for turn in turns],
            **{key: record.row[key] for key in ("hops",) if key in record.row},
        },
    )
