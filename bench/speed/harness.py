"""The harness of the speed benchmarks: contenders in processes of their own that take turns.

A subject (`rollout.py`, `step.py`) names its contenders in `CONTENDERS`. Each runs in a fresh process,
loads, warms up and waits; the parent then lets them run in turns, A B A B, so that what else the machine
does hits all alike. The parent imports no torch: a child's peak memory would begin at its parent's.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "trl", "vllm")
FORMAT = 1
LIMIT_S = 900.0
"""A contender that takes longer to set up, or for a round, is ended."""


@dataclass(frozen=True, slots=True)
class Options:
    """What every subject is given."""

    cache: str
    """Directory for the model and the data."""
    model: str = ""
    """The directory of the real model; empty: fetched, else random weights of its shape."""
    data: str = ""
    """The folder of published data sets; empty: the made-up world."""
    vllm_python: str = ""
    """The interpreter that has vLLM; empty: none."""
    rounds: int = 3
    smoke: bool = False
    """Everything as small as it goes, to test the scripts."""
    material: dict[str, str] = field(default_factory=dict)
    """Filled in by `material.prepare`: the paths of model, questions, corpus."""


class FinishedError(BaseException):
    """The parent wants no more rounds. Not an `Exception`, so that no trainer's clean-up swallows it."""


class Rounds:
    """The child's side of the conversation: report a result, wait for the next request."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests, self._answers = requests, answers

    def report(self, result: Mapping[str, Any]) -> None:
        """The set-up's or a round's result; this process' peak memory so far is added."""
        print(json.dumps({**result, "peak_mib": peak_mib()}), file=self._answers, flush=True)

    def wait(self) -> dict[str, Any]:
        """The next request. Raises FinishedError when there is none."""
        line = self._requests.readline()
        if not line:
            raise FinishedError
        return json.loads(line)

    def serve(self, measure: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """Answer requests with `measure` to the end."""
        while True:
            self.report(measure(self.wait()))


Contender = Callable[[Options, dict[str, Any], Rounds], None]
"""Sets up with the options and the contender's own settings, reports `{}`, then serves rounds."""


def peak_mib() -> int:
    """The most memory that this process had resident so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(size / (2**20 if sys.platform == "darwin" else 2**10))


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender in a comparison."""

    name: str
    function: str
    threads: int
    settings: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable


class Child:
    """One contender in its process."""

    def __init__(self, subject: str, entry: Entry, options: Options) -> None:
        self.entry = entry
        arguments = [subject, entry.function, json.dumps(asdict(options)), json.dumps(entry.settings)]
        self._process = subprocess.Popen(
            [entry.python, str(Path(__file__)), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment(entry.threads, options),
        )  # fmt: skip
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "it was opened as a pipe"
        print(json.dumps(dict(request)), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened as a pipe"
        limit = Timer(LIMIT_S, self._process.kill)
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            raise ChildError(f"{self.entry.name}: exit code {self._process.wait()}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """Tell the child that there are no more rounds, and wait for its end."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ChildError(RuntimeError):
    """A contender's process ended before it answered."""


def environment(threads: int, options: Options) -> dict[str, str]:
    """The child's: this many threads, no network."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1" if options.smoke else str(threads),
        "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1", "SRL_WORKSPACE": options.cache,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip


Runs = dict[str, list[dict[str, Any]]]


def interleaved(
    subject: str, entries: Sequence[Entry], options: Options, rounds: int
) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Each entry's results of all rounds, and what each reported when it was ready.

    All are loaded before the first round, and only one computes at a time.
    """
    results, ready = Runs(), dict[str, dict[str, Any]]()
    with ExitStack() as stack:
        children: list[Child] = []
        for entry in entries:
            log(f"{subject}: {entry.name}, {entry.threads} threads: setting up")
            with without_failing(subject):
                children.append(Child(subject, entry, options))
                stack.callback(children[-1].close)
                ready[entry.name], results[entry.name] = children[-1].ready, []
        for number in range(rounds):
            for child in list(children):
                with without_failing(subject):
                    results[child.entry.name].append(child.run({"round": number}))
                    log(f"{subject}: {child.entry.name}: {json.dumps(results[child.entry.name][-1])[:300]}")
                if len(results[child.entry.name]) <= number:
                    child.close()
                    children.remove(child)
    return {name: runs for name, runs in results.items() if runs}, ready


@contextmanager
def without_failing(subject: str) -> Iterator[None]:
    """A contender whose process ended is left out, and the others go on."""
    try:
        yield
    except (ChildError, BrokenPipeError) as error:
        log(f"{subject}: left out: {error}")


def in_pairs(
    subject: str, first: Entry, others: Sequence[Entry], options: Options, rounds: int
) -> tuple[Runs, dict[str, dict[str, Any]], dict[str, float]]:
    """`first` in turns with each of the others, two processes at a time, where all do not fit in memory.

    The results, those of `first` from all pairs, what each reported when it was ready, and the ratio of each
    one's seconds by those of `first` in the same round.
    """
    results, ready, ratios = Runs({first.name: []}), dict[str, dict[str, Any]](), {first.name: 1.0}
    for other in others:
        runs, reported = interleaved(subject, [first, other], options, rounds)
        ready |= reported
        results[first.name] += runs.get(first.name, [])
        if first.name in runs and other.name in runs:
            results[other.name] = runs[other.name]
            ratios[other.name] = ratio(runs[other.name], runs[first.name])
    return results, ready, ratios


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median of every number that all runs have."""
    names = [name for name, value in runs[0].items() if isinstance(value, int | float)]
    return {name: round_off(median(float(run[name]) for run in runs if name in run)) for name in names}


def ratio(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> float:
    """The median over the rounds of their seconds by ours, both of the same round."""
    ratios = [run["seconds"] / our_run["seconds"] for run, our_run in zip(theirs, ours, strict=False)]
    return round(median(ratios), 2)


def round_off(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def provenance(command: Sequence[str], material: Mapping[str, str]) -> dict[str, Any]:
    """What a figure depends on besides the code; no date, so equal runs write equal files."""
    return {
        "command": " ".join(command),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": processor(),
        "python": platform.python_version(),
        **{name: number for name in PACKAGES if (number := installed(name))},
        "model": material.get("model_origin", ""),
        "data": material.get("data_origin", ""),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def processor() -> str:
    """The processor's name and what it has for bfloat16."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    return " ".join([fields.get("model name", platform.machine()), *flags])


def merged(before: Mapping[str, Any], point: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with the result of one point replaced as a whole, never mixed with an older run's."""
    points = {**before.get("points", {}), point: dict(result)}
    return {"format": FORMAT, "points": dict(sorted(points.items()))}


def main() -> None:
    """The child: `harness.py SUBJECT FUNCTION OPTIONS SETTINGS`, both in JSON."""
    subject, function, options, settings = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    contender: Contender = importlib.import_module(f"bench.speed.{subject}").CONTENDERS[function]
    with suppress(FinishedError):
        contender(Options(**json.loads(options)), json.loads(settings), Rounds(sys.stdin, answers))
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # no clean-up of a trainer that was stopped in the middle


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from bench.speed import harness  # the module that the subjects import

    harness.main()
