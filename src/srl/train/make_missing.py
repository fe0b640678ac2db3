"""What a run needs on disk before it starts: its files, models of the hub, and the made-up world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.errors import UserError
from srl.files import check_input
from srl.models.hub import HubName, What, fetched
from srl.progress import Note
from srl.workspace import Workspace

WORLD_SEED = 0
NOTHING_TO_SEARCH = (
    "nothing to search: set search.index (a directory made by `srl index build`), search.url (a server), or "
    "data.corpus (a file or folder of passages); or rollout.search=false"
)
PRESETS = Path(__file__).parent.parent / "presets"
BASE_MODEL = PRESETS / "base"
"""The small base model of the world `tiny`."""
BASE_MODELS = {"tiny": BASE_MODEL, "tiny-hard": PRESETS / "base-hard"}
"""By `data.world`."""
HERMES = PRESETS / "hermes"
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


def demonstration_file(config: Config, workspace: Workspace, note: Note) -> Path:
    """`sft.train_files`, or the world's demonstrations: noisy searches, or guesses if search is off."""
    if config.sft.train_files is not None:
        file = Path(config.sft.train_files)
        check_input(file)
        return file
    return world_directory(config, workspace, note) / (
        "cold-start.jsonl" if config.rollout.search else "no-search.jsonl"
    )


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


def with_world(config: Config, workspace: Workspace, note: Note) -> Config:
    """`config` with the made-up world's questions and corpus filled in if they are missing.

    The user's files are never mixed with the world's: with `data.train_files` set nothing is filled in, and
    `data.corpus` alone is an error.
    """
    check_data(config)
    check_files(config)
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
    if (sft.train_files is None) == (data.train_files is None):
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


def check_files(config: Config) -> None:
    """Raises UserError for files of questions that are missing."""
    for name in ("train_files", "val_files", "test_files", "exclude_files"):
        for file in getattr(config.data, name) or ():
            if not Path(file).exists():
                hint = "`srl data prepare SOURCE --val 512 --out DIR` writes them"
                raise UserError(f"{file}: no such file (data.{name})", key=f"data.{name}", hint=hint)


def check_corpus_exists(corpus: Path) -> None:
    if not corpus.exists():
        raise UserError(f"no corpus at {corpus}; set data.corpus to a JSONL file of {{id, contents}}")


def with_local_models(config: Config, note: Note) -> Config:
    """`config` with a directory for each model that it names on the hub, fetched where it is missing.

    `note` is told. An existing directory takes precedence over a name. Raises UserError.
    """
    directories = {}
    for key, (name, what) in _models_of_hub(config).items():
        if what == "model" and name.snapshot(what) is None:
            note(f"fetching {name} from the hub")
        directories[key] = str(fetched(name, what, trust_remote_code=config.model.trust_remote_code))
    return config.with_settings(directories)


def with_cached_models(config: Config) -> Config:
    """`config` with a directory for each model that the hub's cache has, for a dry run. No network."""
    snapshots = {key: name.snapshot(what) for key, (name, what) in _models_of_hub(config).items()}
    return config.with_settings({key: str(folder) for key, folder in snapshots.items() if folder})


def _models_of_hub(config: Config) -> dict[str, tuple[HubName, What]]:
    """The keys that name a model on the hub, and what is wanted of it: no weights where a server has them."""
    of_policy: What = "tokenizer" if config.rollout.engine == "openai" else "model"
    models: dict[str, tuple[str | None, What]] = {
        "model.path": (config.model.path, of_policy),
        "model.tokenizer": (config.model.tokenizer, "tokenizer"),
        "ref.path": (config.ref.path if config.needs_reference else None, "model"),
    }
    names = {key: (HubName.parse(path), what) for key, (path, what) in models.items() if path is not None}
    return {key: (name, what) for key, (name, what) in names.items() if name}
