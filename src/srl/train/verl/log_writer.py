"""The log actor: the only process that writes a run's log.

Rollout workers send it each trajectory as it ends, the trainer a step's metrics and numbers of tokens; it
joins them by trajectory id. Since it has a process of its own, a finished episode is kept when its worker
dies. It also knows when the run went forward last, which the launcher asks it for.

The trainer waits for a step's write only where a checkpoint relies on it: a resumed run drops the steps after
its checkpoint, and every earlier one is in the log.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.errors import UserError
from srl.evaluate import step_metrics, summarise
from srl.store import LogWriter, Record, RunInfo
from srl.train.run_directory import LOG, Progress
from srl.train.watches import Watcher, to_act_on
from srl.trajectory import FailedEpisodes, Phase, failed_episodes

Tokens = Mapping[str, Mapping[str, Sequence[float]]]
"""By trajectory id, fields of `Record` such as `advantages`, for the tokens after the prompt."""


@dataclass(frozen=True, slots=True)
class Event:
    """One finished step or evaluation, to be shown to the user."""

    step: int
    phase: Phase
    metrics: Mapping[str, float]


@dataclass(slots=True)
class RunStatus:
    """What happened since the last `poll`; `idle_s`: seconds without progress, `where`: the last stage."""

    events: list[Event]
    notes: list[str]
    failure: Exception | None
    idle_s: float
    where: str


@dataclass(slots=True, repr=False)
class LogActor:
    """Writes the log. A plain class; `start_log_actor` makes it a Ray actor, whose logs show no `repr`.

    A run that was stopped goes on after the step `resumed_from` (−1: from the start): what the log has of
    later steps is dropped.
    """

    directory: Path
    info: RunInfo
    watcher: Watcher | None = None
    resumed_from: int | None = None
    progress: Progress = field(default_factory=Progress)
    _log: LogWriter = field(init=False)
    _open: dict[tuple[int, Phase], list[Record]] = field(default_factory=lambda: defaultdict(list))
    _closed: bool = False
    _events: list[Event] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _failure: Exception | None = None
    """The first error of the run; no step is finished after it."""
    _where: str = "start-up"
    _warned: bool = False
    """Whether the user knows of a reward that gave no score."""
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._log = LogWriter(self.directory, self.info, warn=self._notes.append)
        if self.resumed_from is None:
            return
        self._log.drop_steps_after(self.resumed_from)
        if self.resumed_from > 0:
            self.progress = Progress.of_log(self.directory, self.resumed_from)
            if self.watcher:
                self.watcher.look_back(self.directory)
                self._log.write_watches(self.watcher.rows())

    # What the launcher calls.

    def poll(self) -> RunStatus:
        """What happened since the last call."""
        events, self._events = self._events, []
        notes, self._notes[:] = self._notes.copy(), []
        idle = time.monotonic() - self._last
        return RunStatus(events, notes, self._failure, idle, self._where)

    def close(self, status: str, error: str = "") -> Progress:
        """Close the log, with the error that ended the run.

        An unfinished run's log gets the episodes of its unfinished step too; an unfinished evaluation has
        measured nothing, and is left out.
        """
        self._closed = True
        if status == "finished":
            self._log.finish()
            return self.progress
        with suppress(UserError):  # the disk may be full; the run's own error matters more
            for step, phase in list(self._open):
                records = self._taken(step, phase, {})
                if records and phase == "train":
                    self._log.write(step, phase, records, measured(records, phase))
        self._log.close(status, error)
        return self.progress

    # What a rollout worker calls.

    def add(self, step: int, phase: Phase, record: Record) -> None:
        """Keep a finished, scored episode."""
        self._last = time.monotonic()
        if record.score is not None and record.score.error and not self._warned:
            self._notes.append(record.score.error)
            self._warned = True
        if not self._closed:
            self._open[step, phase].append(record)

    def fail(self, error: Exception) -> None:
        """The run cannot go on; the first error is kept."""
        self._failure = self._failure or error

    # What the trainer calls.

    def mark(self, where: str, step: int) -> None:
        """Note progress: the trainer has reached the stage `where`."""
        self._where, self._last = f"{where} of step {step}", time.monotonic()

    def failure(self) -> Exception | None:
        """The first error given to `fail`, or of a write."""
        return self._failure

    def failed_episodes(self, step: int, phase: Phase) -> FailedEpisodes:
        """How many of the step's episodes so far ended on a failed search."""
        return failed_episodes([record.trajectory for record in self._open[step, phase]])

    def finish(
        self, step: int, phase: Phase, metrics: Mapping[str, float], tokens: Tokens | None = None
    ) -> dict[str, float]:
        """Write a finished step or evaluation; its metrics with those of its trajectories. What fails is kept
        for `failure`: the trainer does not wait for a step."""
        if self._closed or self._failure:
            return {}
        try:
            records = self._taken(step, phase, tokens or {})
            all_metrics = {**metrics, **measured(records, phase)}
            self._write(step, phase, records, all_metrics)
        except Exception as error:
            self.fail(error)
            return {}
        return all_metrics

    def flush(self) -> dict[int, float]:
        """Exact match of the validations by step, once all that the caller has finished is in the log.

        Raises the error of the run, and UserError after `close`, so that a trainer which is still running
        makes no further checkpoint.
        """
        if self._closed:
            raise UserError("the log of this run is closed: the run is over")
        if self._failure:
            raise self._failure
        return self.progress.val_em

    def _write(
        self, step: int, phase: Phase, records: Sequence[Record], metrics: Mapping[str, float]
    ) -> None:
        self._log.write(step, phase, records, metrics)
        self.progress.note(step, phase, metrics)
        if self.watcher and (fired := self.watcher.observe(step, phase, metrics)):
            self._notes += map(str, fired)
            self._log.write_watches(self.watcher.rows())
            if acting := to_act_on(fired):  # a resumed run would be stopped at the same step again
                hint = "start a new run with a lower actor.optim.lr"
                self.fail(UserError(f"stopped by {acting}", hint=hint))
        self._last = time.monotonic()
        self._events.append(Event(step, phase, metrics))

    def _taken(self, step: int, phase: Phase, tokens: Tokens) -> list[Record]:
        """The records of a step with the numbers of their tokens, by question and sample."""
        records = [_with_tokens(record, tokens) for record in self._open.pop((step, phase), [])]
        return sorted(records, key=lambda record: (record.trajectory.question.id, record.trajectory.sample))


def _with_tokens(record: Record, tokens: Tokens) -> Record:
    prompt = [0.0] * len(record.trajectory.segments[0].token_ids)
    numbers = tokens.get(record.trajectory.id, {})
    columns: dict[str, Any] = {name: [*prompt, *values] for name, values in numbers.items()}
    return replace(record, **columns)


def measured(records: Sequence[Record], phase: Phase) -> dict[str, float]:
    """The metrics that the local backend has of the same trajectories, under the same names."""
    if not records:
        return {}
    trajectories = [record.trajectory for record in records]
    scores = [record.score for record in records if record.score is not None]
    if phase != "train":
        return summarise(trajectories, scores, phase)
    return step_metrics(trajectories, scores)


def start_log_actor(run: Path, info: RunInfo, config: Config, resumed_from: int | None) -> Any:
    """Start the actor that writes the log of `run` for this process, on its machine; the others find it by
    name."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(num_cpus=0)(LogActor).options(name=f"srl_log_{run.name}", scheduling_strategy=strategy)
    return actor.remote(run / LOG, info, Watcher(config), resumed_from)


def log_actor_of(run: Path) -> Any:
    """The run's log actor, from any of its processes."""
    import ray

    return ray.get_actor(f"srl_log_{run.name}")
