"""The workspace: the directory of worlds, indexes, models and runs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import randbelow

from srl.errors import UserError, nearest, parsing

_RUN = re.compile(r"^(?P<stamp>\d{8}T\d{6}Z)-(?P<what>.+)-s(?P<seed>\d+)-(?P<tail>[0-9a-f]{4})$")
_LISTED = 5
EVALUATION, IMPORT = "eval", "dump"
"""What the names of runs that trained nothing have in the place of the algorithm."""
_DEFAULT = Path("srl-workspace")
_ELSEWHERE = "name another workspace: srl --workspace DIR …"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A directory with `worlds/ indexes/ models/ runs/`; they are created when first written."""

    root: Path

    @classmethod
    def resolve(cls, option: Path | str | None = None) -> Workspace:
        """`--workspace`, else `$SRL_WORKSPACE`, else `./srl-workspace`."""
        place = option or os.environ.get("SRL_WORKSPACE") or _DEFAULT
        with parsing(f"the workspace {place}"):
            root = Path(place).expanduser()
        if root.exists() and not root.is_dir():
            raise UserError(f"the workspace {root} is a file", hint=_ELSEWHERE)
        return cls(root.absolute() if ":" in str(root) else root)  # Arrow and DuckDB take `a:b` for a URL

    @classmethod
    def around(cls, path: Path) -> Workspace | None:
        """The workspace that contains `path`, a run or a file in it; None if there is none."""
        absolute = path.absolute()
        for folder in (absolute, *absolute.parents):
            if folder.parent.name == "runs" and _RUN.match(folder.name):
                return cls(folder.parent.parent)
        return None

    def command(self, *arguments: str) -> str:
        """A shell command: `srl` with these arguments, and with `--workspace` unless it is the default."""
        flag = [] if self.root == _DEFAULT else ["--workspace", str(self.root)]
        return shlex.join(["srl", *flag, *arguments])

    @property
    def worlds(self) -> Path:
        return self.root / "worlds"

    @property
    def indexes(self) -> Path:
        return self.root / "indexes"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def new_run(self, preset: str, algo: str, seed: int) -> Path:
        """Create `runs/<UTC>-<preset>-<algo>-s<seed>-<4 hex>` and return it."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        what = re.sub(r"[^\w.-]+", "_", f"{Path(preset).stem}-{algo}")
        while True:
            # random, but increasing within one second, so that names sort by start
            numbers = [int(run.name[-4:], 16) for run in self.all_runs() if run.name.startswith(stamp)]
            tail = max(numbers) + 1 if numbers else randbelow(0x8000)
            run = self.runs / f"{stamp}-{what}-s{seed}-{tail:04x}"
            try:
                run.mkdir(parents=True)
            except FileExistsError:
                if not self.runs.is_dir():
                    raise UserError(f"{self.runs} is not a directory", hint=_ELSEWHERE) from None
                continue
            return run

    def all_runs(self) -> list[Path]:
        """Every run of the workspace, in the order of their starts."""
        if not self.runs.is_dir():
            return []
        runs = [path for path in self.runs.iterdir() if _RUN.match(path.name) and path.is_dir()]
        return sorted(runs, key=lambda run: (run.name[:16], run.name[-4:]))

    def find_run(self, name: str = "last", besides: Collection[str] = ()) -> Path:
        """The run called `name`: `last`, a name, its beginning or end, or the path of a run.

        Runs with one of `besides` in the place of the algorithm are passed over. Raises UserError if no run
        matches, or several do (the message lists them).
        """
        every = self.all_runs()
        runs = [run for run in every if _algo(run) not in besides]
        if os.sep in name and Path(name).is_dir():
            matches = [Path(name)]
        elif not runs:
            what = "training runs" if besides else "runs"
            raise UserError(f"no {what} in {self.runs}", hint=f"start one with `srl train`, or {_ELSEWHERE}")
        elif name == "last":
            return runs[-1]
        else:
            matches = _matches(name, runs) or _matches(name, every)
        if not matches:
            hint = nearest(name, [run.name for run in every])
            raise UserError(f"no run {name!r} in {self.runs}; the latest are {_listing(runs)}{hint}")
        if len(matches) > 1:
            raise UserError(f"{name!r} matches {len(matches)} runs: {_listing(matches)}")
        if _algo(matches[0]) in besides:
            what = "an evaluation" if is_evaluation(matches[0]) else "an import"
            raise UserError(f"{matches[0].name} is {what}; name a training run")
        return matches[0]


def split_at_step(name: str) -> tuple[str, str | None]:
    """The run that `RUN@STEP` names, and what follows the last `@`; None without one.

    An `@` in the name of a directory is none: where a path goes on after it, or is there as it is typed.
    """
    run, sign, step = name.rpartition("@")
    return (run, step) if sign and os.sep not in step and not os.path.exists(name) else (name, None)


def is_evaluation(run: Path) -> bool:
    """Whether `run` is the directory of an evaluation, by its name."""
    return _algo(run) == EVALUATION


def _algo(run: Path) -> str:
    """What the name of a run has in the place of the algorithm; empty for other directories."""
    match = _RUN.match(run.name)
    return match["what"].rpartition("-")[2] if match else ""


def _matches(name: str, runs: list[Path]) -> list[Path]:
    """The run whose name is `name`, else those whose name begins or ends with it."""
    exact = [run for run in runs if run.name == name]
    return exact or [run for run in runs if name and (run.name.startswith(name) or run.name.endswith(name))]


def _listing(runs: list[Path]) -> str:
    names = ", ".join(run.name for run in runs[-_LISTED:])
    return f"… {names}" if len(runs) > _LISTED else names
