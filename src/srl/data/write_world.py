"""Writes the made-up world: the corpus, questions for each split, demonstrations for the cold start."""

from __future__ import annotations

from pathlib import Path

from srl.data.corpus import write_corpus
from srl.data.demonstration_file import write_demonstrations
from srl.data.demonstrations import CLEAN, Noise, demonstrations
from srl.data.parquet import write_questions
from srl.data.world import SIZES, World, make_world, questions
from srl.files import atomic_directory
from srl.manifests import write_manifest

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
