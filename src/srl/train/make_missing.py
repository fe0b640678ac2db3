"""What a run needs on disk before it starts, and what is made if missing: the made-up world, the index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.data.corpus import digest_corpus
from srl.errors import UserError
from srl.files import check_input, digest_text
from srl.index import build_index, load_retriever
from srl.index.build import build_parameters
from srl.index.retriever import identity_of
from srl.plugins import manager
from srl.progress import counted_stages
from srl.workspace import Workspace

Note = Callable[[str], None]
WORLD_SEED = 0
NOTHING_TO_SEARCH = (
    "nothing to search: set search.index (a directory made by `srl index build`), search.url (a server), or "
    "data.corpus (a JSONL file); or rollout.search=false"
)
_PRESETS = Path(__file__).parent.parent / "presets"
BASE_MODEL = _PRESETS / "base"
"""The small base model of the world `tiny`."""
BASE_MODELS = {"tiny": BASE_MODEL, "tiny-hard": _PRESETS / "base-hard"}
"""By `data.world`."""
HERMES = _PRESETS / "hermes"
"""The tokenizer with which they call tools: their ids, with hermes calls for tags, and a chat template."""


def start_of(config: Config) -> str | Path:
    """The model that `config` starts from: `model.path`, or the small base model of its made-up world."""
    return config.model.path or BASE_MODELS[config.data.world]


def world_directory(config: Config, workspace: Workspace, note: Note) -> Path:
    """The directory of the made-up world's questions and pages; written first if missing."""
    from srl.data.write_world import world_name, write_world

    kind = config.data.world

    def write(path: Path) -> None:
        note(f"writing the world to {path}")
        write_world(path, WORLD_SEED, kind)

    return make_if_missing(workspace.worlds / world_name(kind, WORLD_SEED), write)


def make_if_missing(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made first if missing. It may also be made meanwhile by another run that started just now."""
    if path.is_dir():
        return path
    try:
        make(path)
    except UserError:
        if not path.is_dir():
            raise
    return path


def with_data(config: Config, workspace: Workspace, note: Note) -> Config:
    """`config` with the made-up world's questions and corpus filled in if they are missing.

    The user's files are never mixed with the world's: with `data.train_files` set nothing is filled in, and
    `data.corpus` alone is an error.
    """
    check_data(config)
    for complaint in unusable_files(config):
        raise UserError(complaint)
    if config.data.train_files is not None:
        return config
    if config.search.index is not None or config.search.url is not None:
        note("data.train_files is not set: using the questions and pages of the made-up world")
    folder = world_directory(config, workspace, note)
    files = {"train_files": "train", "val_files": "validation", "test_files": "test"}
    data: dict[str, Any] = {key: (str(folder / f"{name}.parquet"),) for key, name in files.items()}
    if config.search.index is None and config.search.url is None:
        data["corpus"] = str(folder / "corpus.jsonl")
    section = config.data.model_dump(exclude_none=True)
    return config.with_settings({f"data.{key}": value for key, value in data.items() if key not in section})


def check_demonstrations(config: Config, workspace: Workspace) -> None:
    """Raises UserError where fine-tuning would mix the user's files with those of the made-up world."""
    data, search, sft = config.data, config.search, config.sft
    if sft.log is not None or (sft.train_files is None) == (data.train_files is None):
        return
    if sft.train_files is None:
        raise UserError(
            "data.train_files without sft.train_files: the demonstrations would be the made-up world's",
            key="sft.train_files", hint="a file that `srl data demonstrations` writes",
        )  # fmt: skip
    of_world = Path(str(sft.train_files)).resolve().is_relative_to(workspace.worlds.resolve())
    searches = config.rollout.search and not search.replays
    if searches and search.index is None and search.url is None and not of_world:
        raise UserError(
            f"sft.train_files={sft.train_files} without data.train_files: the made-up world's passages would "
            "answer its searches", key="data.train_files", hint="set it and search.index",
        )  # fmt: skip


def check_data(config: Config) -> None:
    """Raises UserError for the world's questions with another corpus, or questions with nothing to search."""
    data, search = config.data, config.search
    if data.train_files is None and data.corpus is not None:
        raise UserError(
            f"data.corpus={data.corpus} without data.train_files: the made-up world's questions are not "
            "about that corpus", key="data.train_files", hint="set it too, or leave both out",
        )  # fmt: skip
    sources = (data.corpus, search.index, search.url)
    if data.train_files is not None and config.rollout.search and not any(sources) and not search.replays:
        raise UserError(NOTHING_TO_SEARCH)


def unusable_files(config: Config) -> Iterator[str]:
    """A line for each missing file of questions, and for each pipe, which `--resume` could not read again."""
    data = config.data
    files = [(f"data.{key}", file) for key in ("train_files", "val_files", "test_files", "exclude_files")
             for file in getattr(data, key) or ()]  # fmt: skip
    for key, file in files:
        if not Path(file).exists():
            hint = "" if "exclude" in key else "; `srl data prepare SOURCE --val 512 --out DIR` writes such"
            yield f"{file}: no such file ({key}){hint}"
    corpus = [data.corpus] if data.corpus is not None and not Path(data.corpus).is_dir() else []
    for file in (*corpus, *filter(None, [config.sft.train_files]), *(file for _, file in files)):
        try:
            if Path(file).exists():
                check_input(Path(file))
        except UserError as error:
            yield str(error)


def check_corpus(corpus: Path) -> None:
    if not corpus.exists():
        raise UserError(f"no corpus at {corpus}; set data.corpus to a JSONL file of {{id, contents}}")


def find_or_build_index(config: Config, workspace: Workspace, note: Note) -> Path:
    """The index directory to search: the one configured, or that of the corpus, built first if missing."""
    if config.search.index is not None:
        return Path(config.search.index)
    if config.data.corpus is None:
        raise UserError(NOTHING_TO_SEARCH)
    corpus, name = Path(config.data.corpus), config.retriever.name
    check_corpus(corpus)
    if not corpus.is_dir():
        check_input(corpus)
    options = config.retriever.options(name)
    identity = identity_of(name, load_retriever(name, options))
    shaping = json.dumps([build_parameters(name, options), identity], sort_keys=True)
    code = [manager.find("retriever", name).version] if manager.is_import_path(name) else []
    key = digest_text(digest_corpus(corpus), name, shaping, *code)[:8]

    def build(path: Path) -> None:
        note(f"building the index {path}")
        with counted_stages("passages") as progress:
            build_index(corpus, path, name, options, progress)

    return make_if_missing(workspace.indexes / f"{corpus.resolve().parent.name}-{name}-{key}", build)
