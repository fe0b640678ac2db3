"""From trajectories to scores: a weighted sum of reward plugins.

A reward plugin is any object with `score(trajectories) -> list[Score]`, plain or `async`, with one score for
each trajectory in the same order. A plain `score` is called in a thread, one call at a time; episodes that
end during a call are scored together in the next. An `async` one may be called again while it waits. Episodes
are scored as they end, while others are generated.

A reward that cannot score an episode returns `Score(0.0, error=WHY)`: the episode then counts as failed.

A reward reads what the policy wrote (`Trajectory.answer`, policy segments), and must not take the prompt or a
passage for the policy's text. Episodes whose search failed are never passed to it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from typing import Any, Protocol, runtime_checkable

from srl.errors import SrlError, UserError
from srl.reward.sync_reward import SyncReward
from srl.trajectory import REWARD_FAULT, Question, Score, Trajectory

__all__ = ["LoadedReward", "Overlong", "Reward", "RewardMix", "SelectiveReward"]


class Reward(Protocol):
    """What a reward plugin's factory returns.

    `Score.per_turn`, where given, has one number for each policy turn and sums to `Score.value`.
    """

    def score(self, trajectories: list[Trajectory]) -> list[Score] | Awaitable[list[Score]]: ...


@runtime_checkable
class LoadedReward(Protocol):
    """A reward that takes time to get ready, such as a model.

    `load` is called before the first episode, in every process that scores; `score` must do without it.
    """

    def load(self) -> None: ...


@runtime_checkable
class SelectiveReward(Protocol):
    """A reward that is 0 for some questions, whatever the episode, such as those without gold passages."""

    def applies(self, question: Question) -> bool: ...


log = logging.getLogger(__name__)
OVERLONG = "overlong"
"""The part of a score that punishes length."""


@dataclass(frozen=True, slots=True)
class Overlong:
    """Soft overlong punishment: 0 up to `longest` − `buffer` tokens, then a straight line to −`factor`.

        P(y) = max(−1, min(0, (longest − buffer − |y|) / buffer)) · factor

    Yu et al. 2025, "DAPO" (arXiv 2503.14476), eq. 13. |y| counts all tokens after the prompt, as
    `data.max_response_length` does.
    """

    longest: int
    buffer: int
    factor: float = 1.0

    def __call__(self, trajectory: Trajectory) -> float:
        length = sum(len(part.token_ids) for part in trajectory.segments if part.kind != "prompt")
        return self.factor * max(-1.0, min(0.0, (self.longest - self.buffer - length) / self.buffer))


class RewardMix:
    """Σ weight · reward over the rewards named in `weights`.

    `options` holds each reward's own section of the config by name: `{"format": {"structure_score": 0.2}}`.
    A reward of weight 0 is logged and does not count. `overlong` is added to the sum, in the last turn.
    `plugins` are objects to use in place of installed
    plugins. Raises UserError for no weights, a weight that is not finite, or a reward that is not installed.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        plugins: Mapping[str, Reward] | None = None,
        overlong: Overlong | None = None,
    ) -> None:
        if not weights:
            raise UserError("reward.weights names no reward: give at least one, such as reward.weights.em=1")
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise UserError(f"reward.weights.{name} is {weight}: expected a finite number")
        self.weights, self.overlong = dict(weights), overlong
        plugins, options = plugins or {}, options or {}
        self.plugins = {name: plugins.get(name) or _load(name, options.get(name, {})) for name in weights}
        self._scorers = {name: _scorer(name, plugin) for name, plugin in self.plugins.items()}
        self._warned: set[str] = set()

    def load(self) -> None:
        """Get every plugin ready that wants it (`LoadedReward`). A second call costs nothing."""
        for plugin in self.plugins.values():
            if isinstance(plugin, LoadedReward):
                plugin.load()

    def without_effect(self, questions: Sequence[Question]) -> Iterator[str]:
        """A line for each reward that has a weight and applies to none of the questions."""
        for name, plugin in self.plugins.items():
            if not (self.weights[name] and questions and isinstance(plugin, SelectiveReward)):
                continue
            if not any(map(plugin.applies, questions)):
                yield f"the reward {name!r} is 0 for each of the {len(questions):,} training questions"

    async def score(self, trajectories: list[Trajectory]) -> list[Score]:
        """One score for each trajectory, in order; a failed trajectory gets 0 without a call of any plugin.

        `parts` holds each reward by name before its weight, and a reward's own parts as `name/part`. An
        episode of training that a reward of some weight gave no score fails: its `end` and `error` are set.
        Raises UserError naming a plugin that raises, or does not return one finite score for each trajectory.
        One of weight 0 that raises UserError gives no score.
        """
        valid = [trajectory for trajectory in trajectories if trajectory.valid]
        columns = await asyncio.gather(*(self._column(name, valid) for name in self.plugins))
        rows = zip(*columns, strict=True)
        return [
            self._sum(trajectory, next(rows)) if trajectory.valid else self._zero()
            for trajectory in trajectories
        ]

    async def _column(self, name: str, trajectories: list[Trajectory]) -> list[Score]:
        try:
            return await self._scorers[name](list(trajectories))
        except UserError as error:
            if not self.weights[name]:
                return [Score(0.0, error=str(error))] * len(trajectories)
            note = f"while scoring with reward {name!r}"
            if note not in getattr(error, "__notes__", ()):  # one error may end several calls
                error.add_note(note)
            raise
        except SrlError:
            raise
        except Exception as error:
            from srl.plugins.manager import in_one_line

            raise UserError(f"reward {name!r} raised {in_one_line(error)}") from error

    def _sum(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score:
        by_name = dict(zip(self.plugins, scores, strict=True))
        parts = {
            f"{name}/{part}": float(value)
            for name, score in by_name.items()
            for part, value in score.parts.items()
        }
        for name in [name for name, score in by_name.items() if score.error]:
            error = f"{REWARD_FAULT}{name!r} gave no score: {by_name.pop(name).error}"
            if self.weights[name]:
                return self._failed(trajectory, error, parts)
            self._warn(name, error)
        parts |= {name: float(score.value) for name, score in by_name.items()}
        value = fsum(self.weights[name] * score.value for name, score in by_name.items())  # 1 where all are 1
        per_turn = self._per_turn(trajectory, by_name)
        if self.overlong is not None:
            parts[OVERLONG] = self.overlong(trajectory)
            value += parts[OVERLONG]
            per_turn = per_turn and (*per_turn[:-1], per_turn[-1] + parts[OVERLONG])
        return Score(float(value), parts, per_turn)

    def _failed(self, trajectory: Trajectory, error: str, parts: Mapping[str, float]) -> Score:
        """No score, but the rewards' own `parts`, such as what a request took. The trajectory fails if it was
        sampled for training; others are measured all the same."""
        if trajectory.phase == "train":
            trajectory.end, trajectory.error = "failed", error
        zero = self._zero()
        return replace(zero, parts={**zero.parts, **parts}, error=error)

    def _warn(self, name: str, error: str) -> None:
        """Say once of a reward without weight why it gave no score, since nothing else does."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s; its weight is 0, so nothing depends on it", error)

    def _per_turn(self, trajectory: Trajectory, by_name: Mapping[str, Score]) -> tuple[float, ...] | None:
        if all(score.per_turn is None for score in by_name.values()):
            return None
        total = [0.0] * trajectory.turns
        for name, score in by_name.items():
            for turn, value in enumerate(_spread(score, trajectory.turns)):
                total[turn] += self.weights[name] * value
        return tuple(total)

    def _zero(self) -> Score:
        return Score(0.0, dict.fromkeys([*self.plugins, *[OVERLONG] * (self.overlong is not None)], 0.0))


def _scorer(name: str, plugin: Reward) -> Callable[[list[Trajectory]], Awaitable[list[Score]]]:
    """`plugin.score` as a coroutine function that checks the scores."""
    if not inspect.iscoroutinefunction(plugin.score):
        return SyncReward(plugin.score, partial(_check, name)).score

    async def score(trajectories: list[Trajectory]) -> list[Score]:
        scores: list[Score] = await plugin.score(trajectories)  # type: ignore[misc]
        _check(name, trajectories, scores)
        return scores

    return score


def _load(name: str, options: Mapping[str, Any]) -> Reward:
    from srl.plugins import manager

    return manager.load("reward", name, options)  # type: ignore[return-value]


def _spread(score: Score, turns: int) -> tuple[float, ...]:
    """The score of each turn; a score without `per_turn` belongs to the last turn."""
    if score.per_turn is not None:
        return score.per_turn
    return (*[0.0] * (turns - 1), score.value) if turns else ()


def _check(name: str, trajectories: list[Trajectory], scores: object) -> None:
    if not isinstance(scores, list | tuple) or not all(isinstance(score, Score) for score in scores):
        raise UserError(f"reward {name!r} returned {scores!r:.60}: expected a list of srl.trajectory.Score")
    if len(scores) != len(trajectories):
        raise UserError(f"reward {name!r} returned {len(scores)} scores for {len(trajectories)} trajectories")
    for trajectory, score in zip(trajectories, scores, strict=True):
        _check_score(name, trajectory, score)


def _check_score(name: str, trajectory: Trajectory, score: Score) -> None:
    where = f"reward {name!r}, trajectory {trajectory.id} (question {trajectory.question.id!r})"
    numbers = (score.value, *score.parts.values(), *(score.per_turn or ()))
    if not all(map(_is_finite, numbers)):
        raise UserError(f"{where}: expected finite numbers, found {score}")
    if score.error or score.per_turn is None:
        return
    if len(score.per_turn) != trajectory.turns:
        raise UserError(
            f"{where}: {len(score.per_turn)} numbers in per_turn for {trajectory.turns} policy turns"
        )
    if not math.isclose(sum(score.per_turn), score.value, rel_tol=1e-6, abs_tol=1e-6):
        raise UserError(f"{where}: per_turn sums to {sum(score.per_turn)}, but value is {score.value}")


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except TypeError:
        return False
