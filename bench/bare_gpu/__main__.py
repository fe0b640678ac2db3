"""Measurements on a bare GPU machine: no network, little time, PyTorch and transformers installed.

    python bench/bare_gpu prepare learn --data DIRECTORY    here: pieces of at most 48 MiB, and checksums
    python bench/bare_gpu run learn --out DIRECTORY         there, beside the same checkout and its pieces
    python bench/bare_gpu prepare learn --smoke             a rehearsal of both on a CPU, with a tiny model;
    python bench/bare_gpu run learn --smoke                 of the wheels one, and our own

`prepare` fetches from PyPI and writes `build/bare_gpu/learn/1`, `2` and so on. Bring these folders to the
same place there. `run` verifies and unpacks them and installs the wheels beside them: those that `WHEELS` in
the script names, for Python 3.12 and linux x86-64, and ours. It writes each figure as it comes to
`figures.jsonl`, and what the commands print to `commands.log`. It ends by itself after `--minutes`. Exit code
2, with one line, where a piece or the GPU is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from bench.bare_gpu import learn, pieces, with_verl, with_vllm  # noqa: E402

SCRIPTS = {"learn": learn, "vllm": with_vllm, "verl": with_verl}
MINUTES = 9.5
"""Of a run, where a command may take ten."""
MACHINE = """
import json, platform, torch, transformers
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps({
    "gpu": gpu and gpu.name, "gib": gpu and round(gpu.total_memory / 2**30, 1), "torch": torch.__version__,
    "transformers": transformers.__version__, "python": platform.python_version(),
}))
"""


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python bench/bare_gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("script", choices=SCRIPTS)
    beside = os.environ.get("SRL_SHARED_DATA") or pieces.ROOT.parent / "shared" / "data"
    parser.add_argument(
        "--data", type=Path, default=beside, help="folder of published data sets, for prepare"
    )
    parser.add_argument("--out", type=Path, help="what comes back, for run; default: beside the pieces")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long a run takes at most")
    parser.add_argument(
        "--without", action="append", default=[], metavar="PHASE", help="a phase to leave out"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few questions, on any device")
    given = parser.parse_args()
    place = pieces.ROOT / "build" / "bare_gpu" / (f"{given.script}-smoke" if given.smoke else given.script)
    try:
        if given.what == "prepare":
            prepare(given.script, place, given.data.absolute(), given.smoke)
        else:
            run(given.script, place, given.out or place / "out", given.minutes, given.smoke, given.without)
    except (pieces.PieceError, OSError) as error:
        print(f"bench/bare_gpu: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(name: str, place: Path, data: Path, smoke: bool) -> None:
    """The pieces of a script: its wheels and what it puts beside them."""
    if not data.is_dir():
        raise pieces.PieceError(f"{data}: no such folder; --data names that of the published data sets")
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "wheels").mkdir()
        pieces.gather_wheels(folder / "wheels", script.WHEELS[:1] if smoke else script.WHEELS)
        script.prepare(folder, place.parent / ("cache-smoke" if smoke else "cache"), data, smoke)
        count = pieces.pack(folder, place)
    sizes = [(place / str(number + 1) / "part").stat().st_size for number in range(count)]
    print(f"{count} pieces in {place}: {', '.join(f'{size / 2**20:.1f}' for size in sizes)} MiB")


def run(name: str, place: Path, out: Path, minutes: float, smoke: bool, without: Sequence[str] = ()) -> None:
    """The phases of a script, in `minutes`, unpacking included."""
    clock = pieces.Clock(60 * minutes)
    here = pieces.Run(pieces.unpack(place), out, clock, smoke)
    out.mkdir(parents=True, exist_ok=True)
    machine = json.loads(here.python(pieces.Clock(120), "-c", MACHINE))
    if not machine["gpu"] and not smoke:
        raise pieces.PieceError("no CUDA device here; nothing was measured (--smoke rehearses on a CPU)")
    here.figure("machine", **machine)
    pieces.install(here.store)
    sys.path.insert(1, str(here.site))
    here.phases([phase for phase in SCRIPTS[name].PHASES if phase.name not in without])


if __name__ == "__main__":
    sys.exit(main())
