"""The made-up world: an encyclopedia, questions of one and two hops about it, and demonstrations.

Nothing in it can be known in advance. A name is two words out of 400, and each name belongs to one
role only (the base model's worlds, the cold start, training, validation, test). So an entity that a
validation or test question asks about was never seen before.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from itertools import combinations
from pathlib import Path

from srl.data.corpus import write_corpus
from srl.data.demonstrations import write_demonstrations
from srl.data.parquet import write_questions
from srl.files import atomic_directory
from srl.manifests import write_manifest
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
        "person",
        "company",
        "{x} works for {y} .",
        "Which company does {x} work for ?",
        "the company that {x} works for",
    ),
    "based_in": Relation(
        "company", "city", "{x} is based in {y} .", "Where is {x} based ?", "the city where {x} is based"
    ),
    "led_by": Relation("company", "person", "{x} is led by {y} .", "Who leads {x} ?", "the leader of {x}"),
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
        "country",
        "person",
        "{x} has the president {y} .",
        "Who is the president of {x} ?",
        "the president of {x}",
    ),
}
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


def make_world(role: str, seed: int, sizes: dict[str, int] = SIZES) -> World:
    """A world whose names all belong to `role`; each entity has every relation of its kind."""
    rng = random.Random(f"world {role} {seed}")
    names = iter(rng.sample(_names(role), sum(sizes.values())))
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


def questions(world: World, role: str, seed: int, count: int, two_hop: float = 0.5) -> list[Question]:
    """`count` different questions about `world`, the share `two_hop` of them with two hops.

    `metadata` has the number of hops, the way to the answer and the supporting passages.
    """
    rng = random.Random(f"questions {role} {seed}")
    found: dict[str, Question] = {}
    while len(found) < count:
        hops = 2 if len(found) < count * two_hop else 1
        text, way = ask(world, hops, rng)
        if text in found or way[-1].value in text:
            continue
        metadata = {
            "hops": hops,
            "way": [[hop.entity, hop.relation, hop.value] for hop in way],
            "supporting_ids": [hop.entity.replace(" ", "_") for hop in way],
        }
        found[text] = Question(
            id=f"world/{role}/{len(found)}",
            text=text,
            golden_answers=(way[-1].value,),
            data_source="world",
            split=role,
            prompt=template("tiny").messages(text),
            metadata=metadata,
        )
    ordered = list(found.values())
    rng.shuffle(ordered)
    return ordered


def way_of(question: Question) -> tuple[Hop, ...]:
    """The way to the answer of a question made here."""
    return tuple(Hop(*hop) for hop in question.metadata["way"])


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


QUESTIONS = {"train": 4000, "validation": 1024, "test": 1024}
DEMONSTRATED = 2560
"""Questions with a demonstration: 80 batches of 32."""
DEMONSTRATIONS = {"cold-start": Noise(), "clean": CLEAN, "no-search": None}


def write_world(directory: Path, seed: int = 0) -> None:
    """Write the world of `seed` into `directory`, atomically.

    `corpus.jsonl` has the pages of all parts. `train`, `validation` and `test.parquet` each ask about a part
    of their own; `cold-start`, `clean` and `no-search.jsonl` are demonstrations on a fourth part.
    """
    worlds = {role: make_world(role, seed) for role in ("cold-start", *QUESTIONS)}
    with atomic_directory(directory) as folder:
        write_corpus(
            folder / "corpus.jsonl", (page for world in worlds.values() for page in world.passages())
        )
        for role, count in QUESTIONS.items():
            write_questions(folder / f"{role}.parquet", questions(worlds[role], role, seed, count))
        _write_demonstrations(folder, worlds["cold-start"], seed)
        write_manifest(folder, "world", {"seed": seed, "sizes": SIZES, "questions": QUESTIONS})


def _write_demonstrations(folder: Path, world: World, seed: int) -> None:
    asked = questions(world, "cold-start", seed, DEMONSTRATED)
    for name, noise in DEMONSTRATIONS.items():
        write_demonstrations(folder / f"{name}.jsonl", demonstrations(asked, world, noise, seed))
