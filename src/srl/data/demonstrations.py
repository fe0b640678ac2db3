"""Demonstrations for the cold start: a scripted demonstrator with noisy decisions, in the made-up world."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from srl.data.demonstration_file import turn_text
from srl.data.world import Hop, World, way_of
from srl.trajectory import Question


@dataclass(frozen=True, slots=True)
class Noise:
    """The probabilities of a demonstrator's decisions; it carries them out without errors.

    The first action is right with `right`, a search for a wrong span of the question with `wrong_span`, else
    a guess without a search. Before the first right search comes one for a single word of the name with
    `retry`. Then with `stray` the value of any field is looked up, for nothing: the answer is read from the
    first page after all with `back`, else it is any field of what was found. Else a second hop is taken with
    `second_hop`. The right field of the last page is read with `right_field`.
    """

    right: float = 0.4
    wrong_span: float = 0.25
    second_hop: float = 0.2
    right_field: float = 0.5
    retry: float = 0.0
    stray: float = 0.0
    back: float = 0.5


CLEAN = Noise(right=1.0, wrong_span=0.0, second_hop=1.0, right_field=1.0)


def look_up(entity: str) -> str:
    return turn_text(f"I need to look up {entity} .", "search", entity)


def follow(read: Hop) -> str:
    """State the fact that the page says, and look up its value."""
    return turn_text(f"{read.sentence} I need to look up {read.value} .", "search", read.value)


def conclude(read: Hop) -> str:
    """State the fact that the page says, and answer with its value."""
    return turn_text(read.sentence, "answer", read.value)


def guess_turn(name: str) -> str:
    """Answer without having read anything."""
    return turn_text(f"I guess {name} .", "answer", name)


def demonstrate(question: Question, world: World, noise: Noise, rng: random.Random) -> list[str]:
    """The turns of one demonstration of `question`.

    A wrong guess is the entity that the question asks about: all names come from the text, so only the
    decisions are noisy.
    """
    way = way_of(question)
    draw = rng.random()
    if draw < noise.right:
        return _search(way, world, noise, rng)
    guess = guess_turn(way[0].entity)
    if draw < noise.right + noise.wrong_span:
        return [look_up(_wrong_span(question, way[0].entity, rng)), guess]
    return [guess]


def _search(way: Sequence[Hop], world: World, noise: Noise, rng: random.Random) -> list[str]:
    """Look up the first page, follow the hops or stop, and read a field of the last page, right or wrong."""
    turns = [look_up(way[0].entity)]
    if noise.retry and rng.random() < noise.retry:
        turns.insert(0, look_up(rng.choice(way[0].entity.split())))
    elif noise.stray and rng.random() < noise.stray:
        first = _any_field(way[0].entity, world, rng)
        turns.append(follow(first))
        back = rng.random() < noise.back
        return [*turns, conclude(way[0] if back else _any_field(first.value, world, rng))]
    last = way[0]
    for hop, further in pairwise(way):
        if rng.random() >= noise.second_hop:
            break
        turns.append(follow(hop))
        last = further
    facts = world.facts[last.entity]
    wrong_hops = [Hop(last.entity, name, facts[name]) for name in facts if name != last.relation]
    read = last if rng.random() < noise.right_field else rng.choice(wrong_hops)
    return [*turns, conclude(read)]


def _any_field(entity: str, world: World, rng: random.Random) -> Hop:
    return Hop(entity, *rng.choice(list(world.facts[entity].items())))


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
        turns = [guess_turn(rng.choice(names))] if noise is None else demonstrate(question, world, noise, rng)
        out.append(replace(question, metadata={**question.metadata, "turns": turns}))
    return out
