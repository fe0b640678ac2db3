"""A real language model learns to search real Wikipedia: docs/results.md, and the README's first table.

    python bench/real                                     every part, in order, with seed 0
    python bench/real --only cold-start grpo --seed 1     some parts, with another seed
    python bench/real --only base                         figures of the model as it comes
    python bench/real --only evaluate curves transcript   figures of what has been trained so far
    python bench/real --smoke                             two steps and eight questions; no result is written

Each part is a sequence of commands of `srl`, printed as they run, and its outputs are under `--cache`. The
same command again continues where it was stopped, also in the middle of a run; parts that are done are left
alone. Ctrl-C ends the command that runs, then the benchmark. Once there are data and
demonstrations, seeds may run at the same time. Each has a cold start of its own, so they may also run on
different machines, with the same --out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)

from bench.real import measure, parts  # noqa: E402
from bench.real.commands import Bench  # noqa: E402
from bench.speed.harness import Options, provenance  # noqa: E402

RESULT = ROOT / "bench" / "results" / "real_learning.json"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python bench/real", description=__doc__.partition("\n")[0])
    names = [*parts.PARTS, *measure.PARTS]
    beside = os.environ.get("SRL_SHARED_DATA") or ROOT.parent / "shared" / "data"
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=beside, help="folder of published data sets")
    parser.add_argument("--model", default=os.environ.get("SRL_BENCH_MODEL", ""),
                        help="directory of the model; default $SRL_BENCH_MODEL, else fetched")  # fmt: skip
    parser.add_argument("--preset", default="small")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE",
                        help="a setting of all runs; of evaluations only model.… (repeatable)")  # fmt: skip
    parser.add_argument("--budget", type=int, metavar="N", help="measure a row on N test questions at most")
    parser.add_argument("--cache", type=Path, help="default: build/bench-real; of a smoke run, a new one")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="two steps and eight questions, in a new cache")
    return parser.parse_args()


def main() -> int:
    given = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        usual = Path(temporary) if given.smoke else ROOT / "build" / "bench-real"
        cache = (given.cache or usual).absolute()
        cache.mkdir(parents=True, exist_ok=True)
        model, origin = base_model(cache, given.model, given.smoke)
        bench = Bench(
            cache, given.data.absolute(), model, given.seed, given.preset, tuple(given.sets), given.smoke,
            given.budget,
        )  # fmt: skip
        known = {**parts.PARTS, **measure.PARTS}
        try:
            for name in given.only or known:
                known[name](bench)
        except subprocess.CalledProcessError as failed:
            print(f"exit code {failed.returncode} of the last command; repeat this one", file=sys.stderr)
            return 1
        if not given.smoke:
            save(bench, given.out, origin)
    return 0


def base_model(cache: Path, given: str, smoke: bool) -> tuple[Path, str]:
    """The directory of the model and its origin in words; fetched once, for a smoke run random weights."""
    from bench.speed.material import find_model

    model, origin = find_model(cache, Options(cache=str(cache), model=given, smoke=smoke and not given))
    return model.absolute(), origin


def save(bench: Bench, out: Path, origin: str) -> None:
    """Write all that has been measured so far, of all seeds; of earlier results what is not replaced."""
    about = {"model_origin": origin, "data_origin": "see docs/results.md"}
    known = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    found = measure.merged(known, measure.collected(bench))
    here = provenance(["python bench/real"], about)
    found["provenance"] = known.get("provenance", {}) | {str(bench.seed): here}
    found["preset"] = bench.preset
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"in {out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
