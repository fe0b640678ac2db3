"""One episode: the engine generates, the search tool answers, turn by turn, until an answer or a limit.

`Environment.play` (`rollout/environment.py`) plays one, and once more where a fault ended it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from srl.errors import UserError
from srl.protocol import NO_INFORMATION, STOP_STRINGS, ToolCall
from srl.rollout.engine import Engine, EngineFault, Sampling, StopReason
from srl.rollout.observation import fit_information
from srl.rollout.protocol import Continuation, Messages, Protocol, Turn
from srl.trajectory import (
    EndReason,
    Phase,
    Question,
    Search,
    Segment,
    Trajectory,
    current_episode,
)

OnProgress = Callable[[Trajectory, Sequence[int]], None]
"""Told of an episode while it grows: what there is of it, and the ids so far of the turn under way."""


class Key(NamedTuple):
    """Which episode of a question it is. Its random numbers depend on the key, the question and the turn."""

    seed: int = 0
    phase: Phase = "train"
    step: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """The limits of an episode, in tokens, and how its turns are sampled.

    `max_turns` turns may call tools; one more generation may only answer. `max_response_length` limits
    everything after the prompt. An observation is added only if `min_answer_tokens` remain after it. Passages
    that stand in the prompt are part of it, and take at most `max_obs_length` of `max_prompt_length`.
    """

    max_turns: int = 4
    max_turn_tokens: int = 500
    max_obs_length: int = 500
    max_prompt_length: int = 2048
    max_response_length: int = 4096
    min_answer_tokens: int = 16
    stop_at_answer: bool = True
    temperature: float = 1.0
    top_p: float = 1.0

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tags at which a turn ends."""
        return STOP_STRINGS if self.stop_at_answer else STOP_STRINGS[:1]

    def for_evaluation(self, temperature: float) -> EpisodeOptions:
        """These options with the sampling of validation, test and evaluation: `temperature`, no top-p."""
        return replace(self, temperature=temperature, top_p=1.0)


class PromptTooLongError(UserError):
    """The rendered question does not fit `max_prompt_length`. Prompts are never cut."""


async def run_episode(
    question: Question,
    engine: Engine,
    *,
    protocol: Protocol,
    options: EpisodeOptions,
    key: Key = Key(),
    attempt: int = 0,
    on_progress: OnProgress | None = None,
) -> Trajectory:
    """Let `engine` answer `question` with the tools of `protocol`.

    The trajectory holds the ids that the engine was given and those that it returned, in order; nothing is
    decoded and encoded again. It never ends on an observation: if an observation and a minimal answer do
    not fit, the episode ends before it as `truncated`. A template with `{information}` has the question
    searched for first; the passages stand in the prompt. `on_progress` is called with each new segment, and
    with each token of an engine that tells them. Raises PromptTooLongError.
    """
    seed, phase, step, sample = key
    trajectory = Trajectory(question, sample=sample, step=step, phase=phase, attempt=attempt)
    trajectory.protocol = protocol.name
    episode = _Episode(trajectory, engine, protocol, options, on_progress)
    request = f"{phase}/{step}/{question.id}/{sample}/{attempt}"
    current_episode.set(request)
    began = time.perf_counter()
    try:
        trajectory.end = await episode.run(request, (seed, phase, step, question.id, sample, attempt))
    finally:
        engine.finish(request)
    trajectory.seconds = time.perf_counter() - began
    assert trajectory.token_ids == episode.ids, "the trajectory's ids are not what the engine was given"
    return trajectory


@dataclass(slots=True)
class _Episode:
    """The state of one episode while it runs; `ids` is the context that the engine sees."""

    trajectory: Trajectory
    engine: Engine
    protocol: Protocol
    options: EpisodeOptions
    on_progress: OnProgress | None
    ids: list[int] = field(default_factory=list)
    prompt_length: int = 0

    async def run(self, request: str, key: tuple[int | str, ...]) -> EndReason:
        await self._start()
        if self._failed():
            return "failed"
        inside_thought = self.trajectory.think_is_open
        for number in range(self.options.max_turns + 1):
            try:
                completion = await self.engine.generate(request, self.ids, self._sampling(number, key))
            except EngineFault as fault:
                self.trajectory.error = str(fault)
                return "failed"
            turn = self.protocol.read(completion.token_ids, inside_thought)
            self._add(Segment("policy", completion.token_ids, turn.text, number, completion.logprobs))
            if turn.ends or number == self.options.max_turns:
                return self._end(turn, completion.stop_reason)
            continued = await self._go_on(turn.calls, number)
            if continued is None:
                return "failed" if self._failed() else "truncated"
            inside_thought = continued.opens_thought
        raise AssertionError("unreachable: the last turn always returns")

    async def _start(self) -> None:
        """Add the prompt, with what was retrieved for it. Raises PromptTooLongError."""
        question, longest = self.trajectory.question, self.options.max_prompt_length
        template = self.protocol.template
        messages: Messages = question.prompt or template.messages(question.text)
        if template.retrieves:
            messages = template.messages(question.text, await self._retrieve())
        ids, self.trajectory.think_is_open, text = self.protocol.prompt(messages)
        if len(ids) > longest:
            raise PromptTooLongError(
                f"question {question.id}: its prompt has {len(ids)} tokens, more than "
                f"data.max_prompt_length={longest}; raise it",
                key="data.max_prompt_length",
            )
        self.prompt_length = len(ids)
        self._add(Segment("prompt", tuple(ids), text, turn=0))

    async def _retrieve(self) -> str:
        """Search for the question as it is: the passages that fit into the prompt, none after a fault.

        A query that the search tool rejects finds nothing. Raises PromptTooLongError if not even a word fits.
        """
        question, options = self.trajectory.question, self.options
        result = await self._result(ToolCall("search", {"query": question.text}), 0)
        self.trajectory.searches.append(result)
        if result.is_fault:
            return NO_INFORMATION
        self.trajectory.valid_searches += result.status != "rejected"
        without, *_ = self.protocol.prompt(self.protocol.template.messages(question.text, NO_INFORMATION))
        room = min(options.max_prompt_length - len(without), options.max_obs_length)
        fitted = fit_information(result.hits, room, self.protocol.codec)
        if fitted is None:
            raise PromptTooLongError(
                f"question {question.id}: no passage fits into its prompt; raise data.max_prompt_length="
                f"{options.max_prompt_length} or rollout.max_obs_length={options.max_obs_length}",
                key="data.max_prompt_length",
            )
        self.trajectory.searches[-1] = fitted.of(result)
        return fitted.text

    def _add(self, segment: Segment) -> None:
        self.trajectory.segments.append(segment)
        self.ids.extend(segment.token_ids)
        if self.on_progress is not None:
            self.on_progress(self.trajectory, ())

    def _remaining(self) -> int:
        return self.options.max_response_length - (len(self.ids) - self.prompt_length)

    def _sampling(self, turn: int, key: tuple[int | str, ...]) -> Sampling:
        return Sampling(
            max_tokens=min(self.options.max_turn_tokens, self._remaining()),
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            stop=self.protocol.stop,
            key=(*key, turn),
            on_tokens=self.on_progress and partial(self.on_progress, self.trajectory),
        )

    def _end(self, turn: Turn, stop_reason: StopReason) -> EndReason:
        """Set the answer of the last turn."""
        answer = turn.answer
        if answer is not None:
            self.trajectory.valid_actions += 1
        elif stop_reason == "length":
            return "truncated"
        else:
            answer = self.protocol.last_answer(turn)
        self.trajectory.answer = answer
        return "unanswered" if answer is None else "answered"

    def _failed(self) -> bool:
        return any(search.is_fault for search in self.trajectory.searches)

    async def _go_on(self, calls: Sequence[ToolCall], turn: int) -> Continuation | None:
        """Call the tools and add what follows; None if one failed or nothing fits."""
        results = await self._results(calls if self.protocol.tools else (), turn)
        searches = self.trajectory.searches
        searches += results
        if self._failed():
            return None
        self.trajectory.malformed += sum(bool(call.error) for call in calls)
        executed = sum(result.status != "rejected" for result in results)
        self.trajectory.valid_actions += executed > 0
        self.trajectory.valid_searches += executed
        room = self._remaining() - self.options.min_answer_tokens
        continued = self.protocol.continue_with(results, self.options.max_obs_length, room, self.ids)
        if continued is None:
            return None
        if continued.results:
            searches[-len(results) :] = continued.results
        self._add(Segment(continued.kind, tuple(continued.token_ids), continued.text, turn))
        return continued

    async def _results(self, calls: Sequence[ToolCall], turn: int) -> list[Search]:
        """What the calls return, in their order; several run at once."""
        if len(calls) == 1:
            return [await self._result(calls[0], turn)]
        return list(await asyncio.gather(*(self._result(call, turn) for call in calls)))

    async def _result(self, call: ToolCall, turn: int) -> Search:
        """The outcome of a call, of which nothing is shown yet; one with an error is not executed."""
        if call.error:
            outcome = Search(call.query, status="rejected", error=call.error, attempts=0)
        else:
            outcome = await self.protocol.tools[call.name].call(call.arguments, self.trajectory.searches)
        return replace(outcome, turn=turn, shown=0, tool=call.name, arguments=call.written)
