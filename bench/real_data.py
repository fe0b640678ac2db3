"""Real data from files to figures: runs `docs/real-data.md` as it is written, and says what came of it.

    python bench/real_data.py [--data ../shared/data] [--directory DIR]

Every line of the page that begins with `$ ` is run in an empty directory in which `data` is the
published files; its YAML and its script are written there first. The figures are read from what is then
on disk: the manifests, the log, the index. The model is far too small to learn English.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb

import srl.store
from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.files import read_manifest
from srl.index import open_index
from srl.model import count_parameters, load_model, load_tokenizer
from srl.workspace import Workspace

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "real-data.md"
FILES = {"yaml": "real.yaml", "python": "demonstrations.py"}
"""Under which name the page's blocks of these languages are saved."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def files_of(page: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files that the page tells its reader to write."""
    yield from ((FILES[language], text) for language, text in _BLOCK.findall(page) if language in FILES)


def commands_of(page: str) -> Iterator[str]:
    """The commands of the page, in order; a backslash at the end of a line continues one."""
    for language, text in _BLOCK.findall(page):
        if language == "console":
            joined = text.replace("\\\n", " ")
            yield from (line[2:] for line in joined.splitlines() if line.startswith("$ "))


def run_page(page: str, directory: Path, data: Path) -> None:
    """Do what the page says in `directory`; what its commands print goes to stderr."""
    (directory / "data").symlink_to(data.resolve())
    for name, text in files_of(page):
        (directory / name).write_text(text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "110", "SRL_WORKSPACE": "srl-workspace"}
    for command in commands_of(page):
        print(f"$ {command}", file=sys.stderr, flush=True)
        subprocess.run(command, shell=True, check=True, cwd=directory, env=environment, stdout=sys.stderr)


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
        run_page(PAGE.read_text(encoding="utf-8"), directory, arguments.data)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = {"cpu_s_of_all_commands": round(spent.ru_utime + spent.ru_stime)}
        text = json.dumps({**figures(directory), **cpu_s}, indent=2)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
