"""The speed of rollouts and steps on the shape of a real model, each beside what else there is.

    python bench/speed                       every point, into bench/results/speed.json
    python bench/speed --only rollout        one point; the others' figures stay as they are
    python bench/speed --smoke               small sizes, to test the scripts; writes nothing

Contenders run in processes of their own and take turns in one run; a ratio is the median over the rounds of
two times of the same round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)

from bench.speed.harness import Options, environment, log, merged, provenance, round_off  # noqa: E402

POINTS = ("rollout", "step")
RESULT = ROOT / "bench" / "results" / "speed.json"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python bench/speed", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=POINTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--model", default=os.environ.get("SRL_BENCH_MODEL", ""),
                        help="directory of SmolLM2-135M; default $SRL_BENCH_MODEL, else fetched")  # fmt: skip
    beside = os.environ.get("SRL_SHARED_DATA") or ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=beside, help="folder of published data sets")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "bench-speed")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def with_material(options: Options) -> Options:
    """The options with the paths of model and data, made in a process of its own."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "material.py"), json.dumps(asdict(options))],
        env=environment(2, options), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return replace(options, material=json.loads(child.stdout.splitlines()[-1]))


def main() -> int:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        options = Options(
            cache=temporary if arguments.smoke else str(arguments.cache.absolute()),
            model=arguments.model,
            data=str(arguments.data) if arguments.data.is_dir() else "",
            vllm_python=str(arguments.vllm_python) if arguments.vllm_python.is_file() else "",
            rounds=1 if arguments.smoke else arguments.rounds,
            smoke=arguments.smoke,
        )
        options = with_material(options)
        failed = [point for point in arguments.only or POINTS if not measured(point, options, arguments.out)]
    return int(bool(failed))


def measured(point: str, options: Options, out: Path) -> bool:
    """Measure a point and save it; False, with its traceback printed, if it failed: the others go on."""
    began = time.perf_counter()
    try:
        results = importlib.import_module(f"bench.speed.{point}").run(options)
    except Exception:
        traceback.print_exc()
        return False
    command = f"python bench/speed --only {point} --rounds {options.rounds}"
    minutes = round_off((time.perf_counter() - began) / 60)
    source = provenance([command], options.material)
    result = {"provenance": source, "results": results, "minutes": minutes}
    log(json.dumps(result, indent=2))
    if not options.smoke:
        before = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        out.write_text(json.dumps(merged(before, point, result), indent=2) + "\n", encoding="utf-8")
        log(f"{point}: {minutes} minutes, in {out}")
    return True


if __name__ == "__main__":
    sys.exit(main())
