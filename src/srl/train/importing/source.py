"""A file of verl's or Search-R1's as flat settings: YAML, a list of overrides, or a training script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srl.config.keys import flat
from srl.config.yaml12 import parse
from srl.errors import UserError, parsing
from srl.train.importing.hydra import read_override, resolved
from srl.train.importing.key_table import SEARCH_R1, SEARCH_R1_ONLY, VERL, defaults_of
from srl.train.importing.shell import read_script

MAX_BYTES = 2**18
"""The largest file that is read."""
_MAX_SETTINGS = 20_000
"""A YAML file whose aliases multiply has more settings than any run."""
_BARE = frozenset(key for key in SEARCH_R1_ONLY if "." not in key)
_YAML = {".yaml", ".yml"}
_HYDRA = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


@dataclass
class Source:
    """The settings of the file `name` by their dotted names; `read_source` resolves their references.

    `program` is the one that the file's command runs (`""` without a command), `bases` the configurations
    below the file, which are not read. `added` are keys that a `+` adds to verl's own. `notes` are sentences
    about what was not read, `undefined` the keys left out because they refer to something undefined.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)
    program: str = ""
    notes: list[str] = field(default_factory=list)
    undefined: dict[str, str] = field(default_factory=dict)

    @property
    def dialect(self) -> str:
        """`verl` or `Search-R1`."""
        keys = self.settings.keys() | self.undefined.keys()
        return SEARCH_R1 if self.program == "main_ppo_format" or keys & SEARCH_R1_ONLY else VERL

    def guess_megatron(self) -> None:
        """Keys of Megatron, or a base of that name, imply the strategy `megatron` where none is set."""
        keys = any(".megatron." in key for key in self.settings)
        if keys or any("megatron" in base for base in self.bases):
            self.settings.setdefault("actor_rollout_ref.actor.strategy", "megatron")


def read_source(path: Path, given: Mapping[str, str]) -> Source:
    """Read the file at `path`; `given` are the values of `--define`. Raises UserError in one line."""
    text = _text(path)
    with parsing(path):
        source = _parsed(path, text, given)
    source.guess_megatron()
    known = {**defaults_of(source.dialect), **source.settings}
    source.settings, source.undefined = resolved(source.settings, known, given)
    source.name = path.name
    return source


def _text(path: Path) -> str:
    with parsing(path):
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(
                f"{path} has {size:,} bytes; expected a configuration or a script of at most {MAX_BYTES:,}"
            )
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    if "\0" in text:
        raise UserError(f"{path}: expected text in UTF-8, found bytes of 0")
    if not text.strip():
        raise UserError(f"{path} is empty; expected verl's configuration, or a script that runs it")
    return text


def _parsed(path: Path, text: str, given: Mapping[str, str]) -> Source:
    if path.suffix.lower() in _YAML:
        return _of_yaml(path, text, given)
    training = read_script(text, str(path), given, _BARE)
    words, options = _options_apart(training.words)
    source = _of_overrides(words, str(path))
    source.program = training.program
    source.bases = [option for option in options if option.startswith(_HYDRA)]
    if source.bases:
        source.notes.append(
            f"the base configuration of the command is not read ({' '.join(source.bases)}): "
            "what only it sets has verl's default here"
        )
    if training.left_behind:
        source.notes.append(
            f"settings below the training command are not part of it; a shell does not pass them on: "
            f"{'; '.join(training.left_behind)}"
        )
    return source


def _of_yaml(path: Path, text: str, given: Mapping[str, str]) -> Source:
    tree = parse(text, str(path))
    if isinstance(tree, list):
        if not all(isinstance(item, str) for item in tree):
            raise UserError(
                f"{path}: expected sections with keys under them, or a list of overrides such as a.b=c"
            )
        return _of_overrides([(item, 0) for item in tree], str(path))
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected sections with keys under them, found {type(tree).__name__}")
    for name in given:
        if f"oc.env:{name}" not in text:
            raise UserError(f"--define {name}: {path} has no ${{oc.env:{name}}}")
    return _of_tree(tree, path)


def _options_apart(words: Iterable[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[str]]:
    """The settings among the words of a command, and the options of Hydra with their values."""
    settings: list[tuple[str, int]] = []
    options: list[str] = []
    takes_next = False
    for word, line in words:
        if takes_next:
            options[-1] += f" {word}"
        elif word.startswith("-"):
            options.append(word)
        else:
            settings.append((word, line))
        takes_next = not takes_next and word in _HYDRA
    return settings, options


def _of_overrides(words: list[tuple[str, int]], name: str) -> Source:
    """The settings of these overrides, each with its line, 0 where that is unknown."""
    source = Source(name)
    for word, line in words:
        where = f"{name}:{line}" if line else name
        with parsing(f"{where}: {word[:60]}"):
            override = read_override(word)
        if override is None:
            raise UserError(f"{where}: expected KEY=VALUE, found {word[:60]!r}")
        key, value, adds = override
        found = _flat({key: value}, name)
        source.settings.update(found)
        source.added.update(found if adds else ())
    return source


def _of_tree(tree: Mapping[str, Any], path: Path) -> Source:
    kept = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    settings = _flat(kept, str(path))
    if not settings:
        raise UserError(f"{path}: expected settings such as data.train_batch_size, found none")
    named = tree.get("defaults")
    bases = [str(item) for item in named if item != "_self_"] if isinstance(named, list) else []
    unread = ", ".join(base for base in bases if "trainer" not in base)
    notes = [f"the bases of the file are not read: {unread}"] if unread else []
    return Source(path.name, settings, bases=bases, notes=notes)


def _flat(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Settings by dotted name, without `???` (Hydra's mark for a missing value)."""
    found: dict[str, Any] = {}
    for path, value in flat(tree):
        if value != "???" and not path[-1].endswith("_target_"):
            found[".".join(path)] = value
        if len(found) > _MAX_SETTINGS:
            raise UserError(
                f"{name}: more than {_MAX_SETTINGS:,} settings; expected the configuration of one run"
            )
    return found
