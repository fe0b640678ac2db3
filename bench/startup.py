"""How long `srl --help` and `srl plugins list` take, compared with an empty interpreter.

    python bench/startup.py [--rounds 41] [--out bench/results/startup.json]

Each round starts every command once, so that a busy machine slows all of them alike. Exits with 1 where
`srl --help` takes more than 7 times as long as `python -c pass` in the median, or `srl plugins list`, for
which typer imports pydantic, 18 times.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SRL = str(Path(sys.executable).with_name("srl"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "srl --help": [SRL, "--help"],
    "srl plugins list": [SRL, "plugins", "list"],
}
TARGETS = {"srl --help": 7.0, "srl plugins list": 18.0}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, Any]:
    """Medians over `rounds`, and each one's ratio to an empty interpreter."""
    for command in COMMANDS.values():
        seconds(command)
    rows = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    medians = {name: median(row[name] for row in rows) for name in COMMANDS}
    empty = medians["python -c pass"]
    return {
        "format": 1, "rounds": rounds, "target_ratios": TARGETS, "python": platform.python_version(),
        "machine": platform.machine(),
        "commands": {
            name: {"wall_s": round(wall, 4), "wall_ratio": round(wall / empty, 2)}
            for name, wall in medians.items()
        },
    }  # fmt: skip


def main() -> int:
    """Measure, print, write; 1 when a command is slower than the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    text = json.dumps(result, indent=2)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(result["commands"][name]["wall_ratio"] > ratio for name, ratio in TARGETS.items()))


if __name__ == "__main__":
    sys.exit(main())
