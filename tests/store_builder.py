"""Trajectories and logs made by hand, for the tests of store, browse and `srl inspect`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import srl.store
from srl.store import LogWriter, Record, RunInfo, read_records
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

GRPO, PPO = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"
"""Names of runs."""
KLEE = Passage("p1", '"Paul Klee"\nPaul Klee was born in Münchenbuchsee in 1879.', "https://example.org/klee")
BERN = Passage("p2", '"Bern"\nBern is a city on the Aare.')


def policy(text: str, turn: int, first: int = 100) -> Segment:
    """What the policy wrote in one turn: a token a word, log-probs that single precision holds."""
    ids = tuple(range(first, first + len(text.split())))
    return Segment("policy", ids, text, turn, tuple(-0.25 * (1 + token % 4) for token in ids))


def read(kind: str, text: str, turn: int) -> Segment:
    """What the policy only read."""
    return Segment(kind, tuple(range(len(text.split()))), text, turn)  # type: ignore[arg-type]


def question(number: int = 0, golds: tuple[str, ...] = ("Münchenbuchsee",), **metadata: object) -> Question:
    """Question `number`, whose answer is a birthplace."""
    return Question(
        f"nq-{number}",
        f"where was painter {number} born?",
        golds,
        "nq",
        "train",
        ({"role": "user", "content": f"Question: where was painter {number} born?"},),
        metadata or {"hops": 2},
    )


def search(query: str, *passages: Passage, turn: int = 0, status: str = "ok", error: str = "") -> Search:
    """A search that returned `passages`, with falling scores."""
    hits = tuple(Hit(passage, 10.0 - rank) for rank, passage in enumerate(passages))
    attempts = 1 if status == "ok" else 3
    return Search(query, hits, status, 0.0125, attempts, error, "d1ce", turn)  # type: ignore[arg-type]


def episode(
    number: int = 0,
    *,
    step: int = 1,
    phase: str = "train",
    sample: int = 0,
    answer: str | None = "Bern",
    passages: tuple[Passage, ...] | None = (KLEE, BERN),
    end: str | None = None,
    asked: Question | None = None,
) -> Trajectory:
    """One episode: a search for `passages` (none where it is None), then an answer (or none)."""
    asked = asked or question(number)
    segments, searches = [read("prompt", asked.prompt[0]["content"], 0)], []
    if passages is not None:
        segments.append(policy(f"<think>who?</think> <search> painter {number} </search>", 0))
        segments.append(read("observation", "\n\n<information>Doc 1(Title: ...) ...</information>\n\n", 0))
        searches.append(search(f"painter {number}", *passages, turn=0))
    written = f"<think>so</think> <answer> {answer} </answer>" if answer is not None else "I do not know"
    segments.append(policy(written, 1, first=200))
    return Trajectory(
        asked, segments, searches, end or ("unanswered" if answer is None else "answered"), answer,
        sample=sample, step=step, phase=phase, valid_actions=2, valid_searches=len(searches),
    )  # type: ignore[arg-type]  # fmt: skip


def record(trajectory: Trajectory, em: float | None = None, advantage: float | None = 0.5) -> Record:
    """An episode scored by exact match and format, with one advantage on each of the policy's tokens."""
    right = float(trajectory.answer in trajectory.question.golden_answers) if em is None else em
    score = Score(right + 0.125, {"em": right, "format": 1.0})
    if advantage is None:
        return Record(trajectory, score)
    values = [advantage * bit for bit in trajectory.response_mask]
    return Record(trajectory, score, values, list(values))


def write_step(log: LogWriter, step: int, phase: str = "train", size: int = 2, **metrics: float) -> None:
    """A step of `size` episodes whose scores rise with the step."""
    records = [record(episode(number, step=step, phase=phase)) for number in range(size)]
    values = {"critic/score/mean": step / 10, f"{phase}/em": step / 20} | metrics
    log.write(step, phase, records, values)  # type: ignore[arg-type]


def two_runs(runs: Path, made: Sequence[Trajectory], **metrics: float) -> LogWriter:
    """A finished run, GRPO, and a later one that is being written, PPO, whose second step is `made`."""
    with new_log(runs / GRPO) as log:
        for step in (1, 2, 3):
            write_step(log, step, "val")
    log = new_log(runs / PPO)
    write_step(log, 1)
    log.write(2, "train", [record(one) for one in made], {"train/em": 0.25, **metrics})
    return log


def log_rows(run: Path, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    """The rows of a query on the log of a run, or of a folder of runs."""
    with srl.store.open(run) as log:
        return log.execute(query, values).fetchall()


def log_records(run: Path, where: str = "true", values: Sequence[object] = ()) -> list[Record]:
    """The episodes in the log of a run of which `where` holds."""
    with srl.store.open(run) as log:
        return read_records(log, where, values)


def run_info(run_id: str = GRPO) -> RunInfo:
    """A run of the tiny preset."""
    return RunInfo(
        run_id, "tiny", "grpo", 1, "tiny-model", {"trainer": {"steps": 3}}, "d1ce", "0.1.0",
        "2025-01-02T03:04:05+00:00",
    )  # fmt: skip


def new_log(run: Path) -> LogWriter:
    """The log of the run in the directory `run`, named like it."""
    return LogWriter(run / "log", run_info(run.name))
