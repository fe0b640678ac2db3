"""What is learned on the made-up world, over several seeds: the table and the curve of the README.

    python bench/learning.py [--seeds 0 1 2] [--only base ppo …] [--workspace DIR]

Each row is a command of `srl` on the 1,024 test questions. Their entities occur in no base, cold-start or
training world. The rows: the base as it is, with its pass@8; the cold start; a model fine-tuned on clean
episodes instead; PPO and GRPO for each seed, by tags and by native calls; the same with the mask off; and the
baseline without search. Rows and seeds in `bench/results/learning.json` that the options do not select are
kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import srl.store
from srl.train.make_missing import BASE_MODEL
from srl.workspace import Workspace

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "learning.json"
PICTURE = ROOT.parent / "docs" / "learning.svg"
SRL = str(Path(sys.executable).with_name("srl"))
RL = {
    "ppo": ["--algo", "ppo"],
    "grpo": ["--algo", "grpo"],
    "ppo, native calls": ["--algo", "ppo", "--set", "rollout.protocol=native"],
    "grpo, native calls": ["--algo", "grpo", "--set", "rollout.protocol=native"],
    "ppo, mask off": ["--preset", "no-mask", "--algo", "ppo"],
    "grpo, mask off": ["--preset", "no-mask", "--algo", "grpo"],
    "grpo, no search": ["--preset", "no-search", "--algo", "grpo"],
}
STARTS = ("base", "cold start", "fine-tuned on clean episodes")


def command(*arguments: str) -> dict[str, Any]:
    """Run `srl` and read the JSON that it ends with."""
    sys.stderr.write(f"srl {' '.join(arguments)}\n")  # one write: runs may be side by side
    done = subprocess.run([SRL, "-q", *arguments], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout[done.stdout.index("{") :])


def measured(model: Path, world: Path, index: Path) -> dict[str, float]:
    """A model on the test questions: greedy, and eight samples at temperature 1."""
    common = [str(model), "--preset", "tiny", "--data", str(world / "test.parquet"), "--index", str(index)]
    greedy = command("eval", "run", *common, "--json")["search"]["metrics"]
    sampled = command("eval", "run", *common, "--n", "8", "--temperature", "1", "--json")
    sampled = sampled["search"]["metrics"]
    return {
        "em": round(greedy["em"], 4),
        "em_1_hop": round(greedy["em/hops=1"], 4),
        "em_2_hops": round(greedy["em/hops=2"], 4),
        "searches": round(greedy["env/number_of_valid_search"], 4),
        "em_sampled": round(sampled["em"], 4),
        "pass_at_8": round(sampled["pass@8"], 4),
    }


def trained(run: Path) -> dict[str, Any]:
    """A run's test figures before and after, and its validation curve, from its log."""
    log = srl.store.open(run)
    query = "SELECT step, name, value FROM metrics WHERE phase = ? ORDER BY step"
    test: dict[int, dict[str, float]] = {}
    for step, name, value in log.execute(query, ["test"]).fetchall():
        test.setdefault(step, {})[name] = value
    curve: dict[int, dict[str, float]] = {}
    for step, name, value in log.execute(query, ["val"]).fetchall():
        curve.setdefault(step, {})[name] = value
    train = log.execute(
        "SELECT step, value FROM metrics WHERE phase = 'train' AND name = 'train/em' ORDER BY step"
    ).fetchall()
    return {
        "start": _figures(test[min(test)], "test"),
        "end": _figures(test[max(test)], "test"),
        "val": {str(step): round(figures["val/em"], 4) for step, figures in curve.items()},
        "train_sampled": {str(step): round(value, 4) for step, value in train},
    }


def _figures(metrics: dict[str, float], phase: str) -> dict[str, float]:
    names = {"em": "em", "em_1_hop": "em/hops=1", "em_2_hops": "em/hops=2",
             "searches": "env/number_of_valid_search", "finish_ratio": "env/finish_ratio"}  # fmt: skip
    return {key: round(metrics[f"{phase}/{name}"], 4) for key, name in names.items()}


def rl_row(workspace: Path, arguments: list[str], seed: int) -> dict[str, Any]:
    """One run of `srl train`, its wall time with all evaluation, and what came of it."""
    began = time.perf_counter()
    summary = command("train", *arguments, "--seed", str(seed), "--json")
    run = workspace / "runs" / summary["run_id"]
    return {
        "seed": seed,
        "steps": summary["steps"],
        "train_seconds": round(summary["seconds"], 1),
        "wall_seconds": round(time.perf_counter() - began, 1),
        **trained(run),
    }


def start_rows(workspace: Path, wanted: list[str]) -> dict[str, Any]:
    """The base, the cold start and the fine-tuned model. The first run of training makes the world."""
    world, index = workspace / "worlds" / "world-s0", next((workspace / "indexes").iterdir())
    rows: dict[str, Any] = {}
    if "base" in wanted:
        rows["base"] = measured(BASE_MODEL, world, index)
    if "cold start" in wanted:
        rows["cold start"] = measured(next((workspace / "models").glob("cold-start-*")), world, index)
    if "fine-tuned on clean episodes" in wanted:
        summary = command(
            "train", "--algo", "sft", "--set", f"sft.train_files={world / 'clean.jsonl'}", "--json"
        )
        rows["fine-tuned on clean episodes"] = measured(Path(summary["checkpoint"]), world, index)
    return rows


def prepared(workspace: Path) -> None:
    """World, index and cold start, made by a run of no steps."""
    command("train", "--steps", "0", "--set", "trainer.val_before_train=false",
            "--set", "eval.test_questions=1", "--json")  # fmt: skip


def picture(rows: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Greedy exact match on the validation questions over the steps, every seed of every row."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "srl", "font.size": 10}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for colour, (name, runs) in enumerate(rows.items()):
            for position, run in enumerate(runs):
                label = f"{name} ({len(runs)} seed{'s' * (len(runs) > 1)})" if position == 0 else None
                steps = [int(step) for step in run["val"]]
                axes.plot(steps, list(run["val"].values()), color=f"C{colour}", alpha=0.85, linewidth=1.4,
                          marker="o", markersize=3, label=label)  # fmt: skip
        axes.set(xlabel="training step", ylabel="exact match, validation, greedy", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[*STARTS, *RL], choices=[*STARTS, *RL])
    parser.add_argument("--workspace", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(arguments.workspace or Path(folder))
        os.environ["SRL_WORKSPACE"] = str(workspace.root)
        saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
        rows = saved["rows"]
        prepared(workspace.root)
        rows |= start_rows(workspace.root, arguments.only)
        _write(rows)
        for name in (name for name in RL if name in arguments.only):
            for seed in arguments.seeds:
                kept = [run for run in rows.get(name, []) if run["seed"] != seed]
                run = rl_row(workspace.root, RL[name], seed)
                rows[name] = sorted([*kept, run], key=lambda row: row["seed"])
                print(name, seed, "EM", run["end"]["em"], file=sys.stderr, flush=True)
                _write(rows)


def _write(rows: dict[str, Any]) -> None:
    about = {"format": 1, "questions": 1024, "cores": len(os.sched_getaffinity(0)), "rows": rows}
    RESULTS.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    if runs := {name: rows[name] for name in RL if name in rows}:
        picture(runs, PICTURE)


if __name__ == "__main__":
    main()
