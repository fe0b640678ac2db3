"""Writes a made-up world: the corpus, questions for each split, demonstrations for the cold start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from srl.data.corpus import write_corpus
from srl.data.demonstration_file import write_demonstrations
from srl.data.demonstrations import CLEAN, Noise, demonstrations
from srl.data.parquet import write_questions
from srl.data.world import SIZES, World, make_world, questions
from srl.files import atomic_directory, write_manifest

QUESTIONS = {"train": 4000, "validation": 1024, "test": 1024}
DEMONSTRATED = 2560
"""Questions with a demonstration: 80 batches of 32."""


@dataclass(frozen=True, slots=True)
class WorldKind:
    """What the worlds of a kind have in common.

    `words` is that of `make_world`, `cold_start` the noise of the demonstrations. `base` is that of the
    episodes of its small base model, the share `two_hop` of them with two hops, the share `phrased` of the
    others with a phrase as in those.
    """

    cold_start: Noise
    base: Noise = CLEAN
    words: int | None = None
    two_hop: float = 0.4
    phrased: float = 0.0


KINDS: Mapping[str, WorldKind] = {
    "tiny": WorldKind(cold_start=Noise()),
    "tiny-hard": WorldKind(
        cold_start=Noise(right=0.45, right_field=0.5, second_hop=0.0, stray=0.4),
        base=replace(CLEAN, retry=0.2, stray=0.2, back=1.0), words=200, two_hop=0.0, phrased=0.5,
    ),
}  # fmt: skip
"""By name. In `tiny-hard` names are alike, and only a stray search is a right second one by chance."""


def world_name(kind: str, seed: int) -> str:
    """The name of a world's directory in the workspace."""
    return f"world-s{seed}" if kind == "tiny" else f"{kind}-s{seed}"


def write_world(directory: Path, seed: int = 0, kind: str = "tiny") -> None:
    """Write the world of `seed`, of a kind in `KINDS`, into `directory`, atomically.

    `corpus.jsonl` has the pages of all parts. `train`, `validation` and `test.parquet` each ask about a part
    of their own; `cold-start`, `clean` and `no-search.jsonl` are demonstrations on a fourth part.
    """
    world_kind = KINDS[kind]
    worlds = {role: make_world(role, seed, words=world_kind.words) for role in ("cold-start", *QUESTIONS)}
    with atomic_directory(directory) as folder:
        write_corpus(
            folder / "corpus.jsonl", (page for world in worlds.values() for page in world.passages())
        )
        for role, count in QUESTIONS.items():
            write_questions(folder / f"{role}.parquet", questions(worlds[role], role, seed, count))
        _write_demonstrations(folder, worlds["cold-start"], world_kind.cold_start, seed)
        write_manifest(folder, "world", {"seed": seed, "world": kind, "sizes": SIZES, "questions": QUESTIONS})


def _write_demonstrations(folder: Path, world: World, cold_start: Noise, seed: int) -> None:
    demonstrated = questions(world, "cold-start", seed, DEMONSTRATED)
    for name, noise in {"cold-start": cold_start, "clean": CLEAN, "no-search": None}.items():
        write_demonstrations(folder / f"{name}.jsonl", demonstrations(demonstrated, world, noise, seed))
