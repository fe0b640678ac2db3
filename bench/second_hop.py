"""How the second hop is found on `tiny-hard`, where nobody shows it: the preset, and it without each setting.

    python bench/second_hop.py [--only recipe credit …] [--jobs 2] [--workspace DIR]

Each run is `srl train --preset tiny-hard` on one thread, `--jobs` of them at a time. All have the same world
and base; each seed has its own cold start. The rows:

    recipe    the preset, five seeds
    credit    one advantage for a whole episode (rloo), in place of one for each turn
    evidence  no reward for a search that shows a supporting page
    mix       one-hop and two-hop questions as they come, in place of the preset's shares
    kl        no KL to the reference policy

Figures are exact match on the 1,024 test questions. Runs that are in `bench/results/second_hop.json` are not
made again, so the bench can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.learning import command, rl_row

from srl.workspace import Workspace

RESULTS = Path(__file__).parent / "results" / "second_hop.json"
LEVERS: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "credit": ("algorithm.name=rloo", "algorithm.use_kl_in_reward=false", "actor.use_kl_loss=true"),
    "evidence": ("reward.weights.evidence=0",),
    "mix": ("data.mix={}",),
    "kl": ("actor.kl_loss_coef=0",),
}
"""What each row changes of the preset."""
SEEDS = {"recipe": 5}
OTHER_SEEDS = 3
ONE_THREAD = ("trainer.threads=1",)


def arguments(sets: tuple[str, ...]) -> list[str]:
    """The arguments of `srl` for one run with these settings."""
    return [
        "train",
        "--preset",
        "tiny-hard",
        *(part for text in (*ONE_THREAD, *sets) for part in ("--set", text)),
    ]


def wanted(rows: list[str], seeds: int | None) -> list[str]:
    """The keys `row/seed` of the runs, all seeds of a row after another."""
    return [f"{row}/{seed}" for row in rows for seed in range(seeds or SEEDS.get(row, OTHER_SEEDS))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(LEVERS), choices=list(LEVERS))
    parser.add_argument("--seeds", type=int, help="5 for the recipe and 3 for the others without it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--workspace", type=Path)
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    saved: dict[str, Any] = {"format": 1, "runs": {}}
    if RESULTS.exists():
        saved = json.loads(RESULTS.read_text(encoding="utf-8"))
    writing = threading.Lock()

    def make(key: str) -> None:
        row, seed = key.split("/")
        made = rl_row(workspace.root, arguments(LEVERS[row])[1:], int(seed))
        with writing:
            saved["runs"][key] = made
            RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            print(key, made["end"], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(given.workspace or Path(folder))
        os.environ["SRL_WORKSPACE"] = str(workspace.root)
        command(
            *arguments(("trainer.val_before_train=false", "eval.test_questions=1")), "--steps", "0", "--json"
        )
        missing = [key for key in wanted(given.only, given.seeds) if key not in saved["runs"]]
        with ThreadPoolExecutor(given.jobs) as pool:
            for _ in pool.map(make, missing):
                pass


if __name__ == "__main__":
    main()
