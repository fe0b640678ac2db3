"""Demonstrations for the cold start: a scripted demonstrator with noisy decisions, in the made-up world."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from srl.data.world import Hop, World, way_of
from srl.trajectory import Question


@dataclass(frozen=True, slots=True)
class Noise:
    """The probabilities of a demonstrator's decisions; it carries them out without errors.

    The first action is right with `right`, a search for a wrong span of the question with `wrong_span`, else
    a guess without a search. A second hop is taken with `second_hop`; the right field of a page is read with
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
    """State the fact that the page says, and look up its value."""
    value = read.value
    return f"<think> {read.sentence} I need to look up {value} . </think> <search> {value} </search>"


def conclude(read: Hop) -> str:
    """State the fact that the page says, and answer with its value."""
    return f"<think> {read.sentence} </think> <answer> {read.value} </answer>"


def hazard(name: str) -> str:
    """Answer without having read anything."""
    return f"<think> I guess {name} . </think> <answer> {name} </answer>"


def demonstrate(question: Question, world: World, noise: Noise, rng: random.Random) -> list[str]:
    """The turns of one demonstration of `question`.

    A wrong guess is the entity that the question asks about: all names come from the text, so only the
    decisions are noisy.
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
    """Look up the first page, follow the hops or stop, and read a field of the last page, right or wrong."""
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
