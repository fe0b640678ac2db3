"""The agent loop that verl's rollout workers run: one episode, scored and logged, as verl's output."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from srl.config import Config
from srl.errors import SrlError, UserError
from srl.reward import RewardMix
from srl.rollout.environment import Environment
from srl.rollout.episode import Key
from srl.store import Record
from srl.train.load_components import load_environment, load_rewards
from srl.train.load_protocol import generation_eos, load_codec
from srl.train.resume import resume_with
from srl.train.search import load_search
from srl.train.verl.dataset import TRAIN, read_row
from srl.train.verl.engine import VerlEngine
from srl.train.verl.failures import reason
from srl.train.verl.job import this_config, this_run
from srl.train.verl.log_writer import log_actor_of
from srl.trajectory import Score, Trajectory
from srl.workspace import Workspace


@dataclass(slots=True)
class WorkerState:
    """What all episodes of a worker share."""

    config: Config
    environment: Environment
    reward: RewardMix
    log_actor: Any


_state: WorkerState | None = None
_loading = asyncio.Lock()


async def worker_state() -> WorkerState:
    """The state of this worker, loaded with its first episode: verl makes a new agent loop for each.

    Raises UserError naming a search server that cannot be reached.
    """
    global _state
    async with _loading:
        if _state is None:
            _state = await asyncio.to_thread(_load_state)
    return _state


def _load_state() -> WorkerState:
    config = this_config()
    codec = load_codec(config.model, generation_eos(Path(str(config.model.path))), lambda text: None)
    search = load_search(config, Workspace.resolve(), lambda text: None)
    environment = load_environment(config, codec, search, lambda text: None)
    reward = load_rewards(config)
    reward.load()
    return WorkerState(config, environment, reward, log_actor_of(this_run()))


class SearchLoop(AgentLoopBase):
    """Plays one sample of one question, scores it, sends it to the log and returns it to verl.

    verl's own set-up, which renders messages by the model's chat template, is skipped: the episode encodes
    its prompt itself, and needs verl's servers only.
    """

    def __init__(self, trainer_config: Any, server_manager: Any, **ignored: Any) -> None:
        self.server_manager = server_manager
        self.backend: str = trainer_config.config.actor_rollout_ref.rollout.name

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """The episode in verl's terms. An error also goes to the log actor, where the trainer finds it."""
        try:
            return await self._run(row)
        except Exception as error:
            run, what = this_run(), f"an episode failed: {reason(error)}"
            failure = error if isinstance(error, SrlError) else UserError(what, hint=resume_with(run))
            await log_actor_of(run).fail.remote(failure)
            raise

    async def _run(self, row: dict[str, Any]) -> AgentLoopOutput:
        state = await worker_state()
        question, phase = read_row(row["srl"])
        environment, step = state.environment, int(row["global_steps"])
        if phase != TRAIN:
            environment = environment.for_evaluation(state.config.eval.temperature)
        engine = VerlEngine(self.server_manager.generate, environment.codec, self.backend)
        key = Key(state.config.trainer.seed, phase, step, int(row["session_id"]))
        trajectory = await environment.play(engine, question, key)
        began = time.perf_counter()
        (score,) = await state.reward.score([trajectory])
        scoring = time.perf_counter() - began
        await state.log_actor.add.remote(step, phase, Record(trajectory, score))
        return to_output(trajectory, score, engine, scoring)


def to_output(
    trajectory: Trajectory, score: Score, engine: VerlEngine, scoring: float = 0.0
) -> AgentLoopOutput:
    """A trajectory in verl's terms: the response is everything after the prompt, with our mask.

    A failed episode keeps its tokens and has a mask of zeros, so it is in no loss and in no mean. If it has
    none, it gets a masked one: verl needs a token for the reward. The fields `srl_…` are what
    `srl.train.verl.batch.step_batch` reads; positions count from the response's start.
    """
    start = len(trajectory.segments[0].token_ids)
    mask = trajectory.response_mask[start:] or [0]
    searching = sum(search.latency_s for search in trajectory.searches)
    versions = engine.steps or [trajectory.step]
    return AgentLoopOutput(
        prompt_ids=trajectory.token_ids[:start],
        response_ids=trajectory.token_ids[start:] or trajectory.token_ids[-1:],
        response_mask=mask if trajectory.valid else [0] * len(mask),
        response_logprobs=trajectory.logprobs[start:] or [0.0],
        reward_score=score.value if trajectory.valid else 0.0,
        num_turns=trajectory.turns,
        metrics=AgentLoopMetrics(
            generate_sequences=engine.seconds, tool_calls=searching, compute_score=scoring
        ),
        extra_fields={
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "reward_extra_info": {},
            "srl_id": trajectory.id,
            "srl_group": trajectory.question.id,
            "srl_valid": trajectory.valid,
            "srl_per_turn": list(score.per_turn) if score.per_turn and trajectory.valid else None,
            "srl_turn_ends": [end - start for end in trajectory.turn_ends],
        },
    )
