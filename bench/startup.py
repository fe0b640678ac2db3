"""How long `srl --help` and `srl plugins list` take, compared with an empty interpreter.

    python bench/startup.py [--rounds 41] [--out bench/results/startup.json]

Each round starts every command once, so that a busy machine slows all of them alike. The figures are medians
of wall time and of CPU time. The ratios are relative to `python -c pass`; the target is at most 7 times its
wall time. CPU time hardly depends on other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from statistics import median

from srl.plugins import manager

SRL = str(Path(sys.executable).with_name("srl"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "srl --help": [SRL, "--help"],
    "srl plugins list": [SRL, "plugins", "list"],
}
TARGET = 7.0


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall time and processor time of one run."""
    before, start = _processor_s(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start, _processor_s() - before


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(rounds: int) -> dict[str, object]:
    """Medians over `rounds`, and each one's ratio to an empty interpreter."""
    for command in COMMANDS.values():
        seconds(command)
    rows = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    medians = {name: [median(row[name][clock] for row in rows) for clock in (0, 1)] for name in COMMANDS}
    empty = medians["python -c pass"]
    return {
        "format": 1,
        "rounds": rounds,
        "target_ratio": TARGET,
        "commands": {
            name: {
                "wall_s": round(wall, 4),
                "wall_ratio": round(wall / empty[0], 2),
                "processor_s": round(processor, 4),
                "processor_ratio": round(processor / empty[1], 2),
            }
            for name, (wall, processor) in medians.items()
        },
        "python": platform.python_version(),
        "machine": platform.machine(),
        "installed_distributions": len(list(distributions())),
        "plugins": len(manager.installed()),
    }


def main() -> int:
    """Measure, print, write; 1 when a command is slower than the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    text = json.dumps(result, indent=2)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(row["wall_ratio"] > TARGET for row in result["commands"].values()))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
