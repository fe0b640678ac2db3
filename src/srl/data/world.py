"""The made-up world: an encyclopedia, and questions of one and two hops about it.

Nothing in it can be known in advance. A name is two words out of 400, and each name belongs to one
role only (the base model's worlds, the cold start, training, validation, test). So an entity that a
validation or test question asks about was never seen before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import combinations

from srl.protocol import template
from srl.trajectory import Passage, Question

ROLES = ("base", "base", "base", "base", "cold-start", "train", "validation", "test")
SIZES = {"person": 600, "company": 150, "city": 150, "country": 40}


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that links two entities, and its wordings."""

    subject: str
    object: str
    sentence: str
    question: str
    phrase: str


RELATIONS = {
    "born_in": Relation(
        "person", "city", "{x} was born in {y} .", "Where was {x} born ?", "the city where {x} was born"
    ),
    "works_for": Relation(
        "person", "company", "{x} works for {y} .",
        "Which company does {x} work for ?", "the company that {x} works for",
    ),
    "based_in": Relation(
        "company", "city", "{x} is based in {y} .", "Where is {x} based ?", "the city where {x} is based"
    ),
    "led_by": Relation(
        "company", "person", "{x} is led by {y} .", "Who leads {x} ?", "the leader of {x}"
    ),
    "founded_by": Relation(
        "company", "person", "{x} was founded by {y} .", "Who founded {x} ?", "the founder of {x}"
    ),
    "country": Relation(
        "city", "country", "{x} is a city in {y} .", "Which country is {x} in ?", "the country of {x}"
    ),
    "mayor": Relation(
        "city", "person", "{x} has the mayor {y} .", "Who is the mayor of {x} ?", "the mayor of {x}"
    ),
    "capital": Relation(
        "country", "city", "{x} has the capital {y} .", "What is the capital of {x} ?", "the capital of {x}"
    ),
    "president": Relation(
        "country", "person", "{x} has the president {y} .",
        "Who is the president of {x} ?", "the president of {x}",
    ),
}  # fmt: skip
ASKED = {"person": 0.6, "company": 0.2, "city": 0.15, "country": 0.05}
"""How often a question starts from an entity of each kind."""


@cache
def name_words() -> tuple[str, ...]:
    """The 400 made-up words that names are made of, the same in every world."""
    rng = random.Random("name words")
    onsets = [*"bdfgklmnprstvz", "br", "dr", "gr", "kr", "st", "tr"]
    vowels, codas = "aeiou", "lmnrstx"
    words: set[str] = set()
    while len(words) < 400:
        words.add("".join(rng.choice(onsets) + rng.choice(vowels) for _ in range(2)) + rng.choice(codas))
    return tuple(sorted(word.capitalize() for word in words))


@cache
def _names(role: str) -> tuple[str, ...]:
    """All names of a role; two names never share both words, since BM25 ignores order."""
    names = []
    for first, second in combinations(name_words(), 2):
        digest = blake2b(f"{first} {second}".encode(), digest_size=2).digest()
        if ROLES[digest[0] % len(ROLES)] == role:
            names.append(f"{first} {second}" if digest[1] % 2 else f"{second} {first}")
    return tuple(names)


def _some_names(role: str, words: int | None, rng: random.Random) -> Sequence[str]:
    if words is None:
        return _names(role)
    name_sample = set(rng.sample(name_words(), words))
    return [name for name in _names(role) if name_sample.issuperset(name.split())]


@dataclass(frozen=True, slots=True)
class Hop:
    """One look-up on the way to an answer: the entity's page, the relation to read, its value."""

    entity: str
    relation: str
    value: str

    @property
    def sentence(self) -> str:
        """The sentence that states the fact on its page."""
        return RELATIONS[self.relation].sentence.format(x=self.entity, y=self.value)


@dataclass(slots=True)
class World:
    """Entities by kind, and `facts[entity][relation] = value`."""

    entities: dict[str, list[str]]
    facts: dict[str, dict[str, str]] = field(default_factory=dict)

    def passages(self) -> Iterator[Passage]:
        for entity, facts in self.facts.items():
            sentences = [Hop(entity, name, value).sentence for name, value in facts.items()]
            yield Passage(id=entity.replace(" ", "_"), contents=f"{entity}\n{' '.join(sentences)}")

    def way(self, entity: str, relations: Sequence[str]) -> tuple[Hop, ...]:
        """The hops from `entity` along `relations`."""
        hops = []
        for relation in relations:
            hops.append(Hop(entity, relation, self.facts[entity][relation]))
            entity = hops[-1].value
        return tuple(hops)


def make_world(role: str, seed: int, sizes: dict[str, int] = SIZES, words: int | None = None) -> World:
    """A world whose names all belong to `role`; each entity has every relation of its kind.

    `words` is how many of `name_words` its names are made of. The fewer, the more pages share a word of
    their names, and the more pages a search finds beside the right one.
    """
    rng = random.Random(f"world {role} {seed}")
    names = iter(rng.sample(_some_names(role, words, rng), sum(sizes.values())))
    world = World({kind: [next(names) for _ in range(size)] for kind, size in sizes.items()})
    for kind, entities in world.entities.items():
        relations = [(name, relation) for name, relation in RELATIONS.items() if relation.subject == kind]
        for entity in entities:
            facts = [(name, rng.choice(world.entities[relation.object])) for name, relation in relations]
            rng.shuffle(facts)
            world.facts[entity] = dict(facts)
    return world


def ask(world: World, hops: int, rng: random.Random) -> tuple[str, tuple[Hop, ...]]:
    """A question of one or two hops, and the way to its answer."""
    kind = rng.choices(list(ASKED), weights=list(ASKED.values()))[0]
    entity = rng.choice(world.entities[kind])
    path = [_relation_of(kind, rng)]
    if hops == 2:
        path.append(_relation_of(RELATIONS[path[0]].object, rng))
    words = RELATIONS[path[0]].phrase.format(x=entity) if hops == 2 else entity
    return RELATIONS[path[-1]].question.format(x=words), world.way(entity, path)


def _relation_of(kind: str, rng: random.Random) -> str:
    return rng.choice([name for name, relation in RELATIONS.items() if relation.subject == kind])


def questions(
    world: World, role: str, seed: int, count: int, two_hop: float = 0.5, phrased: float = 0.0
) -> list[Question]:
    """`count` different questions about `world`, the share `two_hop` of them with two hops.

    The share `phrased` of those of one hop ask by a phrase, "What is the leader of X ?", as those of two hops
    name their first one.

    `metadata` has the number of hops, the way to the answer and the gold passages.
    """
    rng = random.Random(f"questions {role} {seed}")
    by_text: dict[str, Question] = {}
    while len(by_text) < count:
        hops = 2 if len(by_text) < count * two_hop else 1
        text, way = ask(world, hops, rng)
        if phrased and hops == 1 and rng.random() < phrased:
            text = f"What is {RELATIONS[way[0].relation].phrase.format(x=way[0].entity)} ?"
        if text in by_text or way[-1].value in text:
            continue
        metadata = {
            "hops": hops,
            "way": [[hop.entity, hop.relation, hop.value] for hop in way],
            "supporting_ids": [hop.entity.replace(" ", "_") for hop in way],
        }
        by_text[text] = Question(
            id=f"world/{role}/{len(by_text)}",
            text=text,
            golden_answers=(way[-1].value,),
            data_source="world",
            split=role,
            prompt=template("tiny").messages(text),
            metadata=metadata,
        )
    ordered = list(by_text.values())
    rng.shuffle(ordered)
    return ordered


def way_of(question: Question) -> tuple[Hop, ...]:
    """The way to the answer of a question made here."""
    return tuple(Hop(*hop) for hop in question.metadata["way"])
