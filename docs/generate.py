"""Write docs/config.md, docs/cli.md and docs/store.md from the configuration, the commands and the log.

`python docs/generate.py` writes them; `--check` writes nothing and exits with 1 when one differs.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTICE = "<!-- Written by `make docs`; edit what it is written from. -->"
WIDTH = 96

CONFIG_INTRO = """\
Every key of a run, with what it takes and its default. `srl train --print-config` shows the values of a
run and where each comes from; they are saved with the run as `config.yaml`, which `--config` takes again.

Later layers win over earlier ones:

1. the defaults below,
2. the defaults of the algorithm (`--algo`),
3. a preset (`--preset`), on top of what it `extends`,
4. a YAML file (`--config`), on top of what it `extends`,
5. flags such as `--seed`,
6. `--set key=value`, the value in YAML: `--set actor.optim.lr=1e-6 --set rollout.n=5`.

A preset or a file may hold values for one algorithm only, which lie right above its own:

```yaml
extends: tiny              # a preset, or a file beside this one; null: the defaults alone
actor:
  optim:
    lr: 3e-4
per_algorithm:
  grpo:
    rollout:
      n: 8
```

A file without `extends` lies on top of `--preset`. Nothing secret belongs in here: keys and passwords
come from the environment. Options of plugins stand under the plugin's name, such as `retriever.bm25.k1`.
"""

CLI_INTRO = """\
The help of every command. Results go to stdout, everything else to stderr; `--json` where a program may
read. Exit codes: 0; 1 a check failed; 2 a mistake in what was given, or in the environment; 70 a bug of
ours, its traceback in a file; 129, 130 and 143 a closed terminal, ctrl-C and SIGTERM.
"""

STORE_INTRO = """\
Each run keeps a log of everything that happened in it, in `log/` in its directory: one Parquet part per
table and step while it trains, one `log.duckdb` when it is finished. Both look the same to whoever asks,
and can be read at any time:

```python
import srl.store

log = srl.store.open("srl-workspace/runs")  # one run, or a folder of runs
log.sql("SELECT step, avg(em) FROM trajectories WHERE phase = 'val' GROUP BY step ORDER BY step")
```

`srl inspect sql` asks from the command line; a query there reads the log and no other file, and writes
nothing, unless `--unsafe` is given. A connection of `srl.store.open` is the caller's own: it can join the log
with other files and data frames, and write.

A part or a run whose files are damaged is left out of every view, with a warning that names the file. When
the run is resumed, what is damaged moves to `log/damaged/`, a warning says which steps it held, and the run
goes on from its newest checkpoint; steps before that checkpoint stay missing.

The tables and their columns:
"""


def config_page() -> str:
    """Every key of the configuration, by section, and the presets."""
    from srl.config.schema import Config, keys, section_of

    parts = ["# Configuration", CONFIG_INTRO, "## Presets", _presets()]
    for name, field in Config.model_fields.items():
        section = section_of(field)
        summary = (section.__doc__ if section else field.description) or ""
        parts += [f"## {name}", " ".join(summary.split())]
        if section is not None:
            rows = [
                (_code(key.name), key.takes, _default(key.default), key.doc)
                for key in keys(section, f"{name}.")
            ]
            parts.append(_table(("Key", "Takes", "Default", "Meaning"), rows))
            parts += _plugin_tables(name)
    return _page(parts)


def _presets() -> str:
    """The presets with the comment on their first line."""
    from srl.config import preset_names
    from srl.config.load import PRESETS

    texts = {name: (PRESETS / f"{name}.yaml").read_text(encoding="utf-8") for name in preset_names()}
    rows = [(_code(name), text.partition("\n")[0].lstrip("# ")) for name, text in texts.items()]
    return _table(("Preset", "What it is"), rows)


def _plugin_tables(kind: str) -> Iterator[str]:
    """The options of the plugins of `kind` that come with `srl-search[default]`."""
    from srl.config.schema import takes
    from srl.plugins import manager

    for entry in manager.installed(kind) if kind in manager.KINDS else []:
        model = manager.options_model(kind, entry.name) if entry.package in _default_packages() else None
        if model is not None:
            fields = model.model_fields.items()
            rows = [
                (
                    _code(f"{kind}.{entry.name}.{name}"),
                    takes(field),
                    "required"
                    if field.is_required()
                    else _default(field.get_default(call_default_factory=True)),
                    _line(field.description),
                )
                for name, field in fields
            ]
            yield f"Options of `{entry.name}` ({entry.package}):"
            yield _table(("Key", "Takes", "Default", "Meaning"), rows)


def _default_packages() -> set[str]:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"]["default"]
    return {line.partition("=")[0].partition("[")[0].strip() for line in lines}


def cli_page() -> str:
    """The help of `srl` and of each command below it, at a fixed width."""
    from srl.cli import command

    for name in ("SRL_WORKSPACE", "COLUMNS", "TERMINAL_WIDTH"):
        os.environ.pop(name, None)
    parts = ["# Command line", CLI_INTRO]
    for path, text in _helps(command(), "srl", None):
        parts += [f"{'#' * (2 + path.count(' '))} {path}", f"```text\n{text}\n```"]
    return _page(parts)


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """`(path, help)` of a command and of all below it, in the order of its own list."""
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )
    yield context.command_path, command.get_help(context).rstrip()
    if hasattr(command, "list_commands"):
        for child in command.list_commands(context):
            yield from _helps(command.get_command(context, child), child, context)


def store_page() -> str:
    """Every table of the log with its columns."""
    from srl.store.schema import TABLES

    parts = ["# The log", STORE_INTRO]
    for table in TABLES:
        rows = [(_code(column.name), _code(column.sql_type), column.description) for column in table.columns]
        parts += [f"## {table.name}", table.summary, _table(("Column", "Type", "Meaning"), rows)]
    return _page(parts)


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "cli.md": cli_page,
    "store.md": store_page,
}


def _page(parts: Sequence[str]) -> str:
    title, *rest = (part.strip() for part in parts)
    return "\n\n".join([title, NOTICE, *rest]) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, float):
        return _code(f"{value:g}".replace("e-0", "e-"))
    return _code(value if isinstance(value, str) else json.dumps(value))


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` say which of them differ."""
    pages = {DOCS / name: page() for name, page in PAGES.items()}
    old = [
        path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in old:
            print(f"docs/{path.name} differs from what it is written from; run: make docs", file=sys.stderr)
        return 1 if old else 0
    for path in old:
        path.write_text(pages[path], encoding="utf-8")
        print(f"docs/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
