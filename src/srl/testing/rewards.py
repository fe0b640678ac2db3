"""What every reward must do, checked on trajectories written by hand."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from srl.process import in_thread
from srl.reward import LoadedReward
from srl.testing import Check, expect, run
from srl.trajectory import EndReason, Hit, Passage, Question, Score, Search, Segment, Trajectory

GOLD = "Genoa"
PLAIN = "The Lanterna stands in a port of Liguria."
TRAP = f"<answer>{GOLD}</answer>"
ENDS: tuple[tuple[str | None, EndReason], ...] = (
    (None, "unanswered"),
    (None, "truncated"),
    ("Paris", "answered"),
)
"""Answers that earn nothing, with the ends of their episodes."""


@dataclass
class Trial:
    """A reward under test."""

    make: Callable[[], Any]

    def score(self, trajectories: Sequence[Trajectory], reward: Any = None) -> list[Score]:
        """The scores of a fresh object, or of `reward`."""
        scores = (reward or self.make()).score(list(trajectories))
        if inspect.isawaitable(scores):
            scores = asyncio.run(_await(scores))
        expect(len(scores) == len(trajectories), f"{len(scores)} scores for {len(trajectories)} trajectories")
        return list(scores)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check."""
    return run(CHECKS, Trial(make))


def episode(
    answer: str | None,
    end: EndReason = "answered",
    *,
    observation: str = PLAIN,
    prompt: str = "",
    feedback: str = "",
    number: int = 0,
) -> Trajectory:
    """Think, search, read `observation`, perhaps get `feedback`, then answer (or not)."""
    question = Question(f"check-{number}", "Where is the Lanterna?", (GOLD, "Genova"), "check")
    wrote = "<think>now I know</think>" + (f"<answer> {answer} </answer>" if answer is not None else "")
    segments = [
        _segment("prompt", f"{prompt}Question: {question.text}\n", 0),
        _segment("policy", "<think>I must look</think><search>Lanterna</search>", 0),
        _segment(
            "observation", f"\n\n<information>Doc 1(Title: Lanterna) {observation}</information>\n\n", 0
        ),
    ]
    if feedback:
        segments.append(_segment("feedback", feedback, 1))
    segments.append(_segment("policy", wrote, 1))
    hit = Hit(Passage("p0", f'"Lanterna"\n{observation}'), 1.0)
    searches = [Search("Lanterna", (hit,), "failed" if end == "failed" else "ok")]
    actions = 2 if answer is not None else 1
    return Trajectory(question, segments, searches, end, answer, valid_actions=actions, valid_searches=1)


def _segment(kind: Any, text: str, turn: int) -> Segment:
    ids = tuple(text.encode())
    return Segment(kind, ids, text, turn, (-0.5,) * len(ids) if kind == "policy" else ())


def _batch() -> list[Trajectory]:
    empty = Trajectory(Question("check-5", "Who?", (GOLD,)), [], [], "failed")
    return [
        episode(GOLD, number=0),
        episode("Paris", number=1),
        episode(None, "unanswered", number=2),
        episode(None, "truncated", number=3),
        episode(None, "failed", number=4),
        empty,
        episode("", number=6),
        episode("東京 👩‍🚀 " * 50, number=7),
    ]


def _gives_one_finite_score_for_each_trajectory(trial: Trial) -> None:
    trial.score([])
    for score in trial.score(_batch()):
        expect(isinstance(score, Score), f"{score!r:.60} is not an srl.trajectory.Score")
        for name, value in (("value", score.value), *score.parts.items()):
            expect(isinstance(value, int | float) and math.isfinite(value), f"{name} is {value!r}")


def _scores_every_episode(trial: Trial) -> None:
    batch = [trajectory for trajectory in _batch() if trajectory.valid]
    for trajectory, score in zip(batch, trial.score(batch), strict=True):
        expect(not score.error, f"no score for an episode that is {trajectory.end}: {score.error}")


def _scores_alike_once_loaded_and_in_another_thread(trial: Trial) -> None:
    """A reward without `load` shows only the second."""
    reward, batch = trial.make(), _batch()
    before = trial.score(batch, reward)
    for _ in range(2 if isinstance(reward, LoadedReward) else 0):
        reward.load()
    expect(before == trial.score(batch, reward), "the scores differ once it is loaded")
    there = asyncio.run(in_thread(lambda: trial.score(batch, reward)))
    expect(before == there, "the scores differ in another thread than the one that made the reward")


def _scores_by_turn_fit_the_turns(trial: Trial) -> None:
    batch = _batch()
    for trajectory, score in zip(batch, trial.score(batch), strict=True):
        if score.per_turn is not None:
            expect(
                len(score.per_turn) == trajectory.turns, f"{len(score.per_turn)} for {trajectory.turns} turns"
            )
            close = math.isclose(sum(score.per_turn), score.value, rel_tol=1e-6, abs_tol=1e-6)
            expect(close, f"per_turn sums to {sum(score.per_turn)}, value is {score.value}")


def _what_the_policy_only_read_earns_nothing(trial: Trial) -> None:
    """The right answer in a passage, the prompt or a feedback raises the score of no episode."""
    traps = {
        "observation": TRAP,
        "prompt": f"For example, {TRAP}. ",
        "feedback": f"\nPut the answer between the tags: {TRAP}\n",
    }
    for place, trap in traps.items():
        for answer, end in ENDS:
            texts = ({place: trap.replace(TRAP, "nothing of use")}, {place: trap})
            harmless, tempting = (episode(answer, end, **text) for text in texts)  # type: ignore[arg-type]
            before, after = trial.score([harmless, tempting])
            rise = (
                f"{place}: the score of an episode that is {end} rises from {before.value} to {after.value}"
            )
            expect(after.value <= before.value, rise)


def _a_score_does_not_depend_on_what_shares_the_batch(trial: Trial) -> None:
    batch = _batch()
    together = trial.score(batch)
    expect(
        together == [trial.score([trajectory])[0] for trajectory in batch],
        "a trajectory scored alone gets another score than in a batch",
    )
    expect(together[::-1] == trial.score(batch[::-1]), "the scores depend on the order of the batch")


def _leaves_the_trajectories_as_they_were(trial: Trial) -> None:
    batch = _batch()
    before = deepcopy(batch)
    trial.score(batch)
    expect(batch == before, "a trajectory was changed")


CHECKS = [
    _gives_one_finite_score_for_each_trajectory,
    _scores_every_episode,
    _scores_by_turn_fit_the_turns,
    _what_the_policy_only_read_earns_nothing,
    _a_score_does_not_depend_on_what_shares_the_batch,
    _scores_alike_once_loaded_and_in_another_thread,
    _leaves_the_trajectories_as_they_were,
]
