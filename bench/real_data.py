"""Run `docs/real-data.md` as it is written, and update the output that it shows.

    python bench/real_data.py --model DIRECTORY [--data ../shared/data] [--directory DIR] [--only WORD …]

Every line of the page that begins with `$ ` is run in a directory in which `data` contains the published
files and `smollm2` is the model; the page's YAML is written there first. What a command printed is kept in
the directory, so a second call with the same DIR runs what is left. With `--only` it runs the commands that
contain one of the words, such as `srl data`. Read the diff of the page, and correct the text around it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from srl.files import write_json

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "real-data.md"
SETTINGS, MODEL = "wiki.yaml", "smollm2"
"""The names of the page's configuration and of its model."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_VARIES = re.compile(
    r"\d{8}T\d{6}Z|(?<=-s0-)[0-9a-f]{4}\b"  # when a run began, and its name's random end
    r"|(\d+m )?\b[\d.]+ ?(s|ms)\b|[\d.]+ GiB|\d\.\de-\d\d\b"  # times, memory, rounding errors
)


def files_of(page: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files that the page tells its reader to write."""
    yield from ((SETTINGS, text) for language, text in _BLOCK.findall(page) if language == "yaml")


def shown_by(page: str) -> list[tuple[str, list[str]]]:
    """Each command of the page, in order, with the lines of its output that the page shows.

    A backslash at the end of a line continues a command.
    """
    shown: list[tuple[str, list[str]]] = []
    for language, text in _BLOCK.findall(page):
        if language == "console":
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    shown.append((line[2:], []))
                else:
                    shown[-1][1].append(line)
    return shown


def commands_of(page: str) -> list[str]:
    """The commands of the page, in order."""
    return [command for command, _ in shown_by(page)]


def not_printed(shown: Iterable[str], printed: str) -> list[str]:
    """The lines of `shown` that are not in `printed`, up to spaces and what varies from run to run.

    `…` stands for the rest of a line.
    """
    lines = [_steady(line) for line in printed.splitlines()]
    missing = []
    for line in shown:
        start, cut, _ = _steady(line).partition("…")
        if not any(found.startswith(start.rstrip()) if cut else found == start for found in lines):
            missing.append(line)
    return missing


def _steady(line: str) -> str:
    return " ".join(_VARIES.sub("#", line).split())


def refreshed(page: str, printed: Mapping[str, str]) -> str:
    """The page with the lines that it shows of each `printed` command's output as they were printed now.

    A shown line becomes the most similar one that was printed, cut where it was cut.
    """
    for command, shown in shown_by(page):
        if command not in printed:
            continue
        lines, new = printed[command].splitlines(), []
        for line in shown:
            if line.strip("… "):
                likeness = [_likeness(line, found) for found in lines]
                new.append(_cut_like(line, lines.pop(likeness.index(max(likeness)))))
            else:
                new.append(line)
        page = page.replace("\n".join(shown), "\n".join(new)) if shown else page
    return page


def _likeness(shown: str, printed: str) -> tuple[float, float]:
    """How alike two lines begin, and how alike they are."""
    one, other = _steady(shown.removesuffix("…")), _steady(printed)
    beginning = SequenceMatcher(None, one[:12], other[:12]).ratio()
    return beginning, SequenceMatcher(None, one, other[: len(one)]).ratio()


def _cut_like(shown: str, printed: str) -> str:
    """`printed`, cut after a word before the `…` that ends `shown`, where one does."""
    stem = shown.removesuffix("…")
    if stem == shown or len(printed) <= len(stem):
        return printed
    width = len(stem.rstrip())
    head = printed[:width] if printed[width].isspace() else printed[:width].rsplit(None, 1)[0]
    return f"{head.rstrip()}{stem[width:]}…"


def run_page(page: str, directory: Path, only: Sequence[str] = ()) -> dict[str, str]:
    """Do what the page says in `directory`; what each command printed, now or before.

    With `only`, the commands that contain one of these words.
    """
    for name, text in files_of(page):
        (directory / name).write_text(text, encoding="utf-8")
    kept = directory / "printed.json"
    printed: dict[str, str] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    for command in commands_of(page):
        if command not in printed and (not only or any(word in command for word in only)):
            printed[command] = output_of(command, directory)
            write_json(kept, printed)
    return printed


def output_of(command: str, directory: Path) -> str:
    """What a command of the page prints in `directory`. Raises CalledProcessError if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "110", "SRL_WORKSPACE": "srl-workspace"}
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, shell=True, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    print(done.stdout, file=sys.stderr, flush=True)
    done.check_returncode()
    return done.stdout


def main() -> int:
    """Follow the page, and write it anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the directory of the page's model")
    parser.add_argument("--data", type=Path, default=ROOT.parents[1] / "shared" / "data")
    parser.add_argument("--directory", type=Path, help="where to work; kept, and continued by the next call")
    parser.add_argument("--only", nargs="*", default=(), help="commands that contain one of these words")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for name, target in {"data": arguments.data, MODEL: arguments.model}.items():
            if not (directory / name).exists():
                (directory / name).symlink_to(target.resolve())
        page = PAGE.read_text(encoding="utf-8")
        printed = run_page(page, directory, arguments.only)
    PAGE.write_text(refreshed(page, printed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
