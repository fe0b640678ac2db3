"""Presets and files: where they are, what they extend, and what each says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from srl.config import schema
from srl.config.merge import Entry, flatten, reveal
from srl.config.paths import restored, workspace_of
from srl.config.yamltext import Lined, parse
from srl.errors import UserError, nearest
from srl.files import check_format

PRESETS = Path(__file__).parent.parent / "presets"
DEFAULT_PRESET = "tiny"
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Body:
    """What one preset or file says itself; `extends` is the name it stands on."""

    entries: list[Entry]
    per_algorithm: dict[str, list[Entry]] = field(default_factory=dict)
    extends: str | None = None
    says_extends: bool = False

    def for_algorithm(self, name: str) -> list[Entry]:
        return self.entries + self.per_algorithm.get(name, [])


def preset_names() -> list[str]:
    """The presets that come with the package, the default first."""
    return sorted(
        (path.stem for path in PRESETS.glob("*.yaml")), key=lambda name: (name != DEFAULT_PRESET, name)
    )


def bodies(preset: str | None, file: Path | None) -> list[Body]:
    """The presets and files that make up `preset` and `file`, the lowest first."""
    if file is None:
        return _chain(preset, None)
    body = read_body(file, str(file))
    if not body.says_extends:
        return [*_chain(preset, None), body]
    if preset not in (None, DEFAULT_PRESET, body.extends):
        raise UserError(f"{file} extends {body.extends!r}: leave out the preset {preset!r}, or that line")
    return [*_chain(body.extends, file), body]


def _chain(name: str | None, above: Path | None) -> list[Body]:
    """The preset or file `name` and all that it extends, the lowest first; `above` is what names it."""
    found: list[Body] = []
    seen = [above] if above else []
    while name is not None:
        path, origin = _locate(name, above)
        if path in seen:
            raise UserError(f"{origin} extends itself: {' → '.join(item.stem for item in [*seen, path])}")
        seen.append(path)
        body = read_body(path, origin)
        found.insert(0, body)
        name, above = body.extends, path
    return found


def _locate(name: str, above: Path | None) -> tuple[Path, str]:
    """File and origin of `name`: a preset, or a file beside the one that extends it."""
    known = preset_names()
    if name in known:
        return PRESETS / f"{name}.yaml", f"preset {name}"
    if above and name.endswith((".yaml", ".yml")):
        return above.parent / name, str(above.parent / name)
    raise UserError(f"no preset {name!r}: there are {', '.join(known)}{nearest(name, known)}")


def read_body(path: Path, origin: str) -> Body:
    """What the file at `path` says; `origin` is how it is called in messages."""
    tree = parse(_text(path), origin)
    if not isinstance(tree, Lined | None):
        raise UserError(f"{origin}: expected sections with keys under them, found {type(tree).__name__}")
    rest = dict(tree or {})
    if "format" in rest:
        check_format(origin, rest.pop("format"))
    extends = rest.pop("extends", _ABSENT)
    if extends is not _ABSENT and not isinstance(extends, str | None):
        raise UserError(f"{origin}: extends is {extends!r}, expected the name of one preset or file")
    overlays = _overlays(rest.pop("per_algorithm", None), tree, origin)
    said = extends is not _ABSENT
    entries = list(flatten(rest, _origin_in(tree, origin)))
    if workspace := workspace_of(path):
        entries = [replace(item, value=restored(item.path, item.value, workspace)) for item in entries]
    return Body(entries, overlays, extends if said else None, said)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected text in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: the configuration cannot be read: {error.strerror}") from error


def _overlays(tree: Any, whole: Lined | None, origin: str) -> dict[str, list[Entry]]:
    """The entries of each algorithm in `per_algorithm`."""
    overlays: dict[str, list[Entry]] = {}
    for name, body in _mapping(tree, "per_algorithm", origin).items():
        origins = _origin_in(whole, origin, ("per_algorithm", name))
        overlays[name] = list(flatten(_mapping(body, f"per_algorithm.{name}", origin), origins))
    return overlays


def _mapping(value: Any, key: str, origin: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{origin}: {key} is {reveal(value)}, expected keys under it")
    return value


def _origin_in(tree: Lined | None, origin: str, base: schema.Path = ()) -> Callable[[schema.Path], str]:
    """The origin of a path in a parsed file: presets by name, other files with the line."""

    def of(path: schema.Path) -> str:
        if origin.startswith("preset "):
            return f"{origin} ({base[1]})" if base else origin
        line, node = 0, tree
        for part in base + path:
            if not isinstance(node, Lined) or part not in node:
                break
            line, node = node.lines[part], node[part]
        return f"{origin}:{line}" if line else origin

    return of
