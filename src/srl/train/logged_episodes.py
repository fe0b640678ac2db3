"""Episodes of a log as demonstrations: those that a condition keeps, each once, a few for each question.

The ids that were sampled and their masks are kept as they are; nothing is encoded again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from srl.config import Config, load_saved
from srl.errors import UserError
from srl.rollout.codec import Codec
from srl.safe import quoted
from srl.store import LogWriter, RunInfo, read_records, reading
from srl.store.reader import find_logs
from srl.train.log_filters import passing
from srl.train.run_directory import LOG, RECORD
from srl.trajectory import Trajectory

_TRAINED = "phase = 'train' AND valid"
"""Validation and test questions are never trained on, and an episode cut short would teach to stop there."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The episodes that are kept, in the order of their steps and questions, and how many fell away where.

    `sampled` are the training episodes of the log, `passed` those that satisfy the condition, and `distinct`
    those of them with other tokens than every other of their question.
    """

    episodes: list[Trajectory]
    sampled: int
    passed: int
    distinct: int

    @property
    def questions(self) -> int:
        return len({item.question.id for item in self.episodes})

    @property
    def policy_tokens(self) -> int:
        return sum(item.policy_tokens for item in self.episodes)

    def metrics(self) -> dict[str, float]:
        """The counts, as a step's metrics."""
        return {
            "sft/sampled": self.sampled, "sft/passed": self.passed, "sft/distinct": self.distinct,
            "sft/episodes": len(self.episodes), "sft/questions": self.questions,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The counts in words, also by data source and by hops."""
        yield (
            f"{len(self.episodes):,} episodes of {self.questions:,} questions, {self.policy_tokens:,} tokens "
            f"of the policy (of {self.sampled:,} sampled {self.passed:,} pass the filter, "
            f"{self.distinct:,} of them distinct)"
        )
        sources = Counter(item.question.data_source for item in self.episodes)
        hops = Counter(item.question.hops for item in self.episodes)
        yield "by data source: " + ", ".join(f"{name} {count:,}" for name, count in sorted(sources.items()))
        if hops.keys() != {None}:
            known = sorted(hops.items(), key=lambda item: (item[0] is None, item[0]))
            yield "by hops: " + ", ".join(
                f"{'unknown' if number is None else number} {count:,}" for number, count in known
            )


def select_episodes(
    log: Path, condition: str, per_question: int | None, seed: int, step: int | None = None
) -> Selection:
    """The training episodes of the log at `log` (of one step) that satisfy `condition`.

    `condition` is SQL over the columns of `trajectories`. Of episodes of one question with the same tokens of
    the policy one is kept, and of more than `per_question` distinct ones a random choice. Raises UserError
    for a path without exactly one log, and for a condition that DuckDB does not take.
    """
    if len(logs := find_logs(log)) != 1:
        found = f"{len(logs)} logs" if logs else "no log"
        raise UserError(f"{log} has {found}: expected the directory of one run, or its log")

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[int, list[Trajectory]]:
        at = "true" if step is None else f"step = {step:d}"
        sampled = passing(connection, f"{_TRAINED} AND {at}")
        ids = sorted(sampled & passing(connection, condition))
        records = read_records(connection, "list_contains(?, id)", [ids]) if ids else []
        return len(sampled), [record.trajectory for record in records]

    sampled, passed = reading([log], read)
    passed.sort(key=lambda item: (item.step, item.question.id, item.sample))
    distinct = _distinct(passed)
    return Selection(_at_most(distinct, per_question, seed), sampled, len(passed), len(distinct))


def check_filter(condition: str) -> None:
    """Raises UserError where DuckDB does not take `condition`, whatever the episodes."""
    with TemporaryDirectory() as folder:
        with LogWriter(Path(folder) / LOG, RunInfo("none")) as log:
            log.write(0, "train", [], {})
        reading([Path(folder)], lambda connection: passing(connection, condition))


def _distinct(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """The first of the episodes of a question with the same tokens of the policy."""
    first: dict[tuple[str, tuple[tuple[int, ...], ...]], Trajectory] = {}
    for item in episodes:
        written = tuple(segment.token_ids for segment in item.segments if segment.is_policy)
        first.setdefault((item.question.id, written), item)
    return list(first.values())


def _at_most(episodes: list[Trajectory], per_question: int | None, seed: int) -> list[Trajectory]:
    """At most so many episodes of each question, chosen at random, in their order."""
    if per_question is None:
        return episodes
    rng, left, kept = random.Random(f"episodes {seed}"), Counter[str](), set[int]()
    for place in rng.sample(range(len(episodes)), len(episodes)):
        question = episodes[place].question.id
        if left[question] < per_question:
            left[question] += 1
            kept.add(place)
    return [item for place, item in enumerate(episodes) if place in kept]


def episodes_of_log(config: Config) -> Selection:
    """The episodes that `sft.log` and `sft.filter` name. Raises UserError where none are left."""
    sft = config.sft
    assert sft.log is not None, "asked only where sft.log is set"
    found = select_episodes(Path(sft.log), sft.filter, sft.max_per_question, config.trainer.seed)
    if not found.sampled:
        raise UserError(f"{sft.log} has no training episodes, and others are never trained on")
    check_kept(found, sft.filter)
    return found


def check_kept(found: Selection, condition: str) -> None:
    """Raises UserError where no episode is left."""
    if not found.episodes:
        raise UserError(
            f"none of {found.sampled:,} training episodes satisfies the filter '{quoted(condition)}'; loosen "
            "it, or sample more"
        )


def check_tokens(episodes: Sequence[Trajectory], codec: Codec, where: str) -> None:
    """Raises UserError unless `codec` reads in the policy's tokens the text that was logged with them."""
    for item in episodes:
        for segment in item.segments:
            if segment.is_policy and codec.decode(segment.token_ids) != segment.text:
                raise UserError(
                    f"the episodes of {where} were sampled with another tokenizer: the tokens of episode "
                    f"{item.id} do not give its text here; fine-tune a model with the tokenizer of that run"
                )


def model_of_log(log: Path) -> Path:
    """The model that the run of a log started from. Raises UserError where the log is not in a run."""
    for run in (log, log.parent):
        if (run / RECORD).is_file() and (model := load_saved(run).model.path):
            return Path(model)
    raise UserError(f"{log} is not in the directory of a run, which says what it trained; give --model")
