"""What a scripted policy says, turn by turn: the texts from which a cold start is trained.

A demonstration is a question with its `turns`; the episode runs them against real search, so that
fine-tuning sees the very tokens and masks of a rollout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from srl.data.encyclopedia import Hop, World, way_of
from srl.data.records import Record, describe
from srl.errors import UserError
from srl.files import atomic_file, read_jsonl
from srl.trajectory import Question


@dataclass(frozen=True, slots=True)
class Noise:
    """How often a demonstrator decides well; what it does, it does without slips.

    The first action is right, or a search for a wrong span of the question, or a guess with no
    search; a second hop is taken with `second_hop`; the right field of a page is read with
    `right_field`.
    """

    right: float = 0.4
    wrong_span: float = 0.25
    second_hop: float = 0.2
    right_field: float = 0.5


CLEAN = Noise(right=1.0, wrong_span=0.0, second_hop=1.0, right_field=1.0)


def look_up(entity: str) -> str:
    return f"<think> I need to look up {entity} . </think> <search> {entity} </search>"


def follow(read: Hop) -> str:
    """Say what the page said, and look up what it named."""
    value = read.value
    return f"<think> {read.sentence} I need to look up {value} . </think> <search> {value} </search>"


def conclude(read: Hop) -> str:
    """Say what the page said, and answer with it."""
    return f"<think> {read.sentence} </think> <answer> {read.value} </answer>"


def hazard(name: str) -> str:
    """Answer without having read anything."""
    return f"<think> I guess {name} . </think> <answer> {name} </answer>"


def demonstrate(question: Question, world: World, noise: Noise, rng: random.Random) -> list[str]:
    """The turns of one demonstration of `question`.

    A wrong guess names what the question asks about: no name comes from anywhere but the text, so that
    only decisions are noisy.
    """
    way = way_of(question)
    draw = rng.random()
    if draw < noise.right:
        return _search(way, world, noise, rng)
    guess = hazard(way[0].entity)
    if draw < noise.right + noise.wrong_span:
        return [look_up(_wrong_span(question, way[0].entity, rng)), guess]
    return [guess]


def _search(way: Sequence[Hop], world: World, noise: Noise, rng: random.Random) -> list[str]:
    """Look up the first page, follow it or not, and read a field of the last page, right or not."""
    turns = [look_up(way[0].entity)]
    for hop in way[:-1]:
        if rng.random() >= noise.second_hop:
            break
        turns.append(follow(hop))
    last = way[len(turns) - 1]
    facts = world.facts[last.entity]
    others = [Hop(last.entity, name, facts[name]) for name in facts if name != last.relation]
    read = last if rng.random() < noise.right_field else rng.choice(others)
    return [*turns, conclude(read)]


def _wrong_span(question: Question, entity: str, rng: random.Random) -> str:
    """One to three words of the question that are not the entity's."""
    words = question.text.replace("?", "").replace(entity, "").split()
    start = rng.randrange(len(words))
    return " ".join(words[start : start + rng.randint(1, 3)])


def demonstrations(
    questions: Iterable[Question], world: World, noise: Noise | None, seed: int
) -> list[Question]:
    """The questions with `metadata["turns"]`; `noise=None` answers with any name, without searching."""
    rng = random.Random(f"demonstrations {seed}")
    names = list(world.facts)
    out = []
    for question in questions:
        turns = [hazard(rng.choice(names))] if noise is None else demonstrate(question, world, noise, rng)
        out.append(replace(question, metadata={**question.metadata, "turns": turns}))
    return out


def write_demonstrations(path: Path, questions: Iterable[Question]) -> None:
    """JSON lines `{"id", "question", "golden_answers", "turns"}`."""
    with atomic_file(path) as file:
        for question in questions:
            row = {
                "id": question.id,
                "question": question.text,
                "golden_answers": list(question.golden_answers),
                "turns": question.metadata["turns"],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_demonstrations(path: Path) -> list[Question]:
    """Questions with `metadata["turns"]`. Raises UserError with file and line, also for an id met before."""
    found: dict[str, Question] = {}
    for index, (line, row) in enumerate(read_jsonl(path)):
        record = Record(path, f":{line}", index, row)
        question = _demonstration(record, f"{path.stem}/{line}")
        if question.id in found:
            raise record.error("an id that no demonstration before it has", repr(question.id))
        found[question.id] = question
    if not found:
        raise UserError(f"{path}: expected demonstrations, found none")
    return list(found.values())


def _demonstration(record: Record, name: str) -> Question:
    turns = record.items("turns")
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise record.error("a text for each turn in 'turns'", describe(turns))
    return Question(
        id=record.text("id") if record.row.get("id") is not None else name,
        text=record.text("question"),
        golden_answers=record.texts("golden_answers") if record.row.get("golden_answers") is not None else (),
        data_source=record.path.stem,
        metadata={"turns": turns},
    )
