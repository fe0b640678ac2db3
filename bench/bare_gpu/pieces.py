"""What the scripts for a bare GPU machine share: pieces that travel, phases by the clock, figures, commands.

Only the standard library, since nothing of `srl` is installed when `run` starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[2]
PART_BYTES = 48 * 2**20
PYTHON = "3.12"
MANYLINUX = (
    "manylinux_2_39", "manylinux_2_35", "manylinux_2_34", "manylinux_2_31", "manylinux_2_28",
    "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux2010", "manylinux1",
)  # fmt: skip
SRL = ("-m", "srl")
SOURCES = ("antlr4-python3-runtime",)
"""Packages in pure Python that PyPI has no wheel of."""
GRACE_S = 30
"""Seconds that a command has between Ctrl-C and its end: `srl train` saves its last whole step."""


class PieceError(Exception):
    """What is wrong with the pieces or the machine, in one line."""


# Pieces


def split(file: Path, out: Path, part_bytes: int = PART_BYTES) -> int:
    """Write `file` as `out/1/part`, `out/2/part` and so on, each with the manifest; returns their number."""
    parts: list[dict[str, Any]] = []
    with file.open("rb") as source:
        while data := source.read(part_bytes):
            target = out / str(len(parts) + 1)
            target.mkdir(parents=True)
            (target / "part").write_bytes(data)
            parts.append({"bytes": len(data), "sha256": sha256(data).hexdigest()})
    manifest = json.dumps({"sha256": digest(file), "parts": parts}, indent=2)
    for number in range(len(parts)):
        (out / str(number + 1) / "manifest.json").write_text(manifest)
    return len(parts)


def join(pieces: Path, file: Path) -> str:
    """Put the parts in the folder `pieces` together as `file`; returns its sha256. Raises PieceError."""
    manifests = {path.read_bytes() for path in pieces.glob("*/manifest.json")}
    if len(manifests) != 1:
        raise PieceError(f"{pieces}: {'pieces of several preparations' if manifests else 'no pieces'}")
    try:
        manifest = json.loads(manifests.pop())
        parts = {pieces / str(number) / "part": about for number, about in enumerate(manifest["parts"], 1)}
    except (ValueError, LookupError, TypeError) as error:
        raise PieceError(f"{pieces}: the manifest is damaged; bring the pieces again") from error
    if missing := [part.parent.name for part in parts if not part.is_file()]:
        raise PieceError(f"{pieces}: of {len(parts)} pieces there is no {', '.join(missing)}")
    with file.open("wb") as target:
        for part, about in parts.items():
            if digest(part) != about["sha256"]:
                raise PieceError(f"{part}: the checksum is wrong; bring the piece again")
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    if digest(file) != manifest["sha256"]:
        raise PieceError(f"{pieces}: the pieces do not make the archive of the manifest")
    return manifest["sha256"]


def digest(file: Path) -> str:
    with file.open("rb") as source:
        return file_digest(source, "sha256").hexdigest()


def pack(folder: Path, out: Path) -> int:
    """The folder as pieces in `out`, in place of those that were there; returns their number."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    archive = out / "archive.tar"
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        tar.add(folder, ".")
    count = split(archive, out)
    archive.unlink()
    return count


def unpack(pieces: Path) -> Path:
    """The folder that the pieces make, once. Raises PieceError."""
    store, archive = pieces / "unpacked", pieces / "archive.tar"
    if not (store / "sha256").is_file():
        shutil.rmtree(store, ignore_errors=True)
        whole = join(pieces, archive)
        with tarfile.open(archive) as tar:
            tar.extractall(store, filter="data")
        archive.unlink()
        (store / "sha256").write_text(whole)
    return store


def install(store: Path) -> None:
    """Install the wheels in `store` beside them, once. Raises PieceError."""
    site, wheels = store / "site", sorted(map(str, (store / "wheels").glob("*.whl")))
    how = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    if site.is_dir():
        return
    if subprocess.run([sys.executable, *how, "--target", str(site), *wheels]).returncode:
        shutil.rmtree(site, ignore_errors=True)
        raise PieceError(f"{store / 'wheels'}: pip could not install the wheels; see above")


def gather_wheels(folder: Path, names: Iterable[str]) -> None:
    """Our distributions, and the packages `names` (NAME, or NAME==VERSION) for Python 3.12 on x86-64.

    NAME alone has the version of constraints.txt or constraints-gpu.txt, else the newest. Dependencies are
    named too.
    """
    files = [ROOT / "constraints.txt", ROOT / "constraints-gpu.txt"]
    lines = [line for file in files for line in file.read_text().split()]
    constraints = dict(line.lower().split("==") for line in lines if "==" in line)
    versions = {name: f"=={constraints[name.lower()]}" for name in names if name.lower() in constraints}
    pinned = [f"{name}{versions.get(name, '')}" for name in names]
    built = [name for name in pinned if name.startswith(SOURCES)]
    fetched = [name for name in pinned if name not in built]
    platforms = [part for name in MANYLINUX for part in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    fetch = ["download", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    subprocess.run([*pip, *fetch, *platforms, "--dest", str(folder), *fetched], check=True)
    ours = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml")))]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *build, *map(str, ours), *built], check=True)


# Phases by the clock


class Clock:
    """What is left of the time that a run has. `now` gives seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._now, self._began = seconds, now, now()

    @property
    def gone(self) -> float:
        return self._now() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is over; negative afterwards."""
        return share * self.seconds - self.gone


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run, that ends by the time when `share` of the whole is over."""

    name: str
    share: float
    work: Callable[[Run, Clock], object]
    """Given the run and the phase's own clock."""


@dataclass(frozen=True, slots=True)
class Run:
    """What every phase is given: the unpacked pieces, the folder for what comes back, and the clock."""

    store: Path
    out: Path
    clock: Clock
    smoke: bool

    @property
    def site(self) -> Path:
        return self.store / "site"

    def figure(self, name: str, /, **values: Any) -> None:
        """One line of `figures.jsonl`, written at once."""
        line = json.dumps({"at_s": round(self.clock.gone, 1), "figure": name, **values})
        with (self.out / "figures.jsonl").open("a") as file:
            print(line, file=file, flush=True)
        print(line, flush=True)

    def phases(self, phases: Sequence[Phase]) -> None:
        """Each phase in turn. One that fails says so in one line, and the next goes on without it."""
        for phase in phases:
            own = Clock(self.clock.left(phase.share))
            if own.seconds <= 0:
                self.figure(phase.name, left_out="no time")
                continue
            try:
                phase.work(self, own)
            except Exception as error:
                self.figure(phase.name, failed=" ".join(f"{type(error).__name__}: {error}".split())[:400])
            self.figure(f"{phase.name}, seconds", seconds=round(own.gone, 1))

    def python(
        self, clock: Clock, *arguments: object, each: Callable[[str], object] = lambda line: None
    ) -> str:
        """What a Python command prints on stdout; `each` is called with every line of it. `commands.log` has
        that and the rest.

        Where the clock ends, the command gets Ctrl-C and is killed `GRACE_S` later, and what it printed until
        then is returned. Raises PieceError, with its last line, for an exit code other than 0 before.
        """
        command = [sys.executable, *map(str, arguments)]
        paths = (self.site, ROOT, os.environ.get("PYTHONPATH"))
        env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        with (self.out / "commands.log").open("ab") as log:
            log.write(f"\n[{self.clock.gone:.0f} s] {' '.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
            )
            assert child.stdout is not None, "it was opened as a pipe"
            printed: list[str] = []

            def read(source: BinaryIO) -> None:
                for line in source:
                    log.write(line)
                    log.flush()
                    printed.append(line.decode())
                    each(printed[-1])

            reader = Thread(target=read, args=(child.stdout,), daemon=True)
            reader.start()
            for number, wait in ((signal.SIGINT, clock.left()), (signal.SIGKILL, GRACE_S)):
                try:
                    child.wait(max(wait, 1))
                    break
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, number)
            code, in_time = child.wait(), clock.left() > 0
            reader.join(10)
        if code and in_time:
            said = (self.out / "commands.log").read_text(errors="replace").strip().splitlines()[-1]
            raise PieceError(f"exit code {code}: {said}")
        return "".join(printed)

    def srl(self, clock: Clock, workspace: str, *arguments: object, program: Sequence[str] = SRL) -> str:
        """`python`, of a command of `srl` in a workspace of that name."""
        return self.python(clock, *program, "--workspace", self.store / "workspaces" / workspace, *arguments)

    def newest(self, name: str) -> Path:
        """The training run of that workspace. Raises PieceError where its phase left none."""
        found = sorted((self.store / "workspaces" / name / "runs").glob("*"))
        runs = [path for path in found if "-eval-" not in path.name]
        if not runs:
            raise PieceError(f"there is no run {name}")
        return runs[-1]

    def figures_of(self, clock: Clock, *arguments: object) -> list[dict[str, Any]]:
        """The JSON lines of a Python command, each a figure as it comes."""
        found: list[dict[str, Any]] = []

        def take(line: str) -> None:
            if line.startswith("{"):
                found.append(json.loads(line))
                self.figure("measured", **found[-1])

        self.python(clock, *arguments, each=take)
        return found

    def bring_back(self, folder: Path, name: str, part_bytes: int = 15 * 2**20, most: int = 5) -> None:
        """The folder as `NAME.tar.gz.1` and so on in `out`, `most` parts at most."""
        archive = self.store / f"{name}.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=3) as tar:
            tar.add(folder, folder.name)
        with archive.open("rb") as source:
            for number in range(1, most + 1):
                if data := source.read(part_bytes):
                    (self.out / f"{name}.tar.gz.{number}").write_bytes(data)
        self.figure("brought back", name=name, bytes=archive.stat().st_size, room=most * part_bytes)
