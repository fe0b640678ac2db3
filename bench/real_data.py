"""Run `docs/real-data.md` as it is written, and record the results.

    python bench/real_data.py [--data ../shared/data] [--directory DIR]

Every line of the page that begins with `$ ` is run in an empty directory in which `data` contains the
published files; the page's YAML and script are written there first. The figures are then read from disk: the
manifests, the log, the index. The output that the page shows is updated: read the diff, and correct the text
around it. The model is far too small to learn English.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import duckdb

import srl.store
from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.index import open_index
from srl.manifests import read_manifest
from srl.model import count_parameters, load_model, load_tokenizer
from srl.workspace import Workspace

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "real-data.md"
FILES = {"yaml": "real.yaml", "python": "demonstrations.py"}
"""Under which name the page's blocks of these languages are saved."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_VARIES = re.compile(
    r"\d{8}T\d{6}Z|(?<=-s0-)[0-9a-f]{4}\b"  # when a run began, and its name's random end
    r"|(\d+m )?\b[\d.]+ ?(s|ms)\b|[\d.]+ GiB|\d\.\de-\d\d\b"  # times, memory, rounding errors
)


def files_of(page: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files that the page tells its reader to write."""
    yield from ((FILES[language], text) for language, text in _BLOCK.findall(page) if language in FILES)


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
    """The page with the lines that it shows of each command's output as they were printed now.

    A shown line becomes the most similar one that was printed, cut where it was cut.
    """
    for command, shown in shown_by(page):
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


def run_page(page: str, directory: Path, data: Path) -> dict[str, str]:
    """Do what the page says in `directory`; what each command printed."""
    (directory / "data").symlink_to(data.resolve())
    for name, text in files_of(page):
        (directory / name).write_text(text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "110", "SRL_WORKSPACE": "srl-workspace"}
    printed = {}
    for command in commands_of(page):
        print(f"$ {command}", file=sys.stderr, flush=True)
        done = subprocess.run(
            command, shell=True, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(done.stdout, file=sys.stderr, flush=True)
        done.check_returncode()
        printed[command] = done.stdout
    return printed


def figures(directory: Path) -> dict[str, Any]:
    """What is on disk once the page was followed."""
    workspace = Workspace(directory / "srl-workspace")
    fine_tuning, reinforcement = (
        next(run for run in workspace.all_runs() if f"-{algo}-" in run.name) for algo in ("sft", "grpo")
    )
    index = open_index(directory / "wiki-index")
    return {
        "format": 1,
        "data": "SQuAD 1.1 (two articles) among 2WikiMultihopQA passages; HotpotQA and NQ-open as test set",
        "passages": len(index),
        "questions": {
            **read_manifest(directory / "wiki", "data")["questions"],
            **read_manifest(directory / "open", "data")["questions"],
        },
        "tokenizer": tokenizer_figures(directory),
        "model_parameters": count_parameters(load_model(directory / "scratch")),
        "sft": run_figures(fine_tuning, "sft"),
        "grpo": run_figures(reinforcement, "train"),
    }


def tokenizer_figures(directory: Path) -> dict[str, float]:
    """The size of the vocabulary, and tokens a word (of those that spaces separate) in each kind of text."""
    tokenizer, _ = load_tokenizer(directory / "tokenizer")
    questions = [
        item
        for name in ("wiki/validation", "open/test")
        for item in read_questions(directory / f"{name}.parquet")
    ]
    texts = {
        "passages": [passage.contents for passage in read_corpus(directory / "wiki" / "corpus.jsonl")],
        "squad_validation": [item.text for item in questions if item.data_source == "squad"],
        "hotpotqa": [item.text for item in questions if item.data_source == "hotpotqa"],
        "nq": [item.text for item in questions if item.data_source == "nq"],
    }
    fertility = {f"tokens_per_word_{name}": _fertility(tokenizer, found) for name, found in texts.items()}
    return {"vocabulary": len(tokenizer), **fertility}


def _fertility(tokenizer: Any, texts: Iterable[str]) -> float:
    texts = list(texts)
    tokens = sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    return round(tokens / sum(len(text.split()) for text in texts), 3)


def run_figures(run: Path, phase: str) -> dict[str, Any]:
    """A run's length and speed, where its figures began and ended, and what its episodes came to."""
    with srl.store.open(run) as log:
        query = "SELECT metrics FROM raw.steps WHERE phase = ? ORDER BY step"
        steps = [metrics for (metrics,) in log.execute(query, [phase]).fetchall()]
        named = [name for name in ("sft/policy_loss", "critic/score/mean") if name in steps[0]]
        return {
            "steps": len(steps),
            "steps_per_s": round(len(steps) / sum(metrics["timing_s/step"] for metrics in steps), 3),
            **{name: [round(metrics[name], 4) for metrics in (steps[0], steps[-1])] for name in named},
            "episodes": episode_figures(log),
            "verdicts": verdicts(log),
        }


def episode_figures(log: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Episodes, exact match and searches, by phase, step of evaluations, and data set."""
    found = srl.store.rows(
        log,
        """
        SELECT phase, CASE WHEN phase = 'train' THEN NULL ELSE step END AS step, data_source,
            count(*) AS episodes, avg(em) AS em, sum(searches)::INTEGER AS searches,
            count(*) FILTER ("end" = 'answered') AS answered, count(*) FILTER (NOT valid) AS failed
        FROM trajectories GROUP BY ALL ORDER BY ALL
        """,
    )
    return [{**row, "em": round(row["em"], 4)} for row in found]


def verdicts(log: duckdb.DuckDBPyConnection) -> dict[str, dict[str, int]]:
    """Why answers are wrong, by phase, over all episodes of the run."""
    query = "SELECT phase, verdict, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL"
    counts: dict[str, dict[str, int]] = {}
    for phase, verdict, count in log.execute(query).fetchall():
        counts.setdefault(phase, {})[verdict] = count
    return counts


def main() -> int:
    """Follow the page, read the figures, write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT.parents[1] / "shared" / "data")
    parser.add_argument("--directory", type=Path, help="an empty directory to work in, which is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "real_data.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        page = PAGE.read_text(encoding="utf-8")
        printed = run_page(page, directory, arguments.data)
        PAGE.write_text(refreshed(page, printed), encoding="utf-8")
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = {"cpu_s_of_all_commands": round(spent.ru_utime + spent.ru_stime)}
        text = json.dumps({**figures(directory), **cpu_s}, indent=2)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
