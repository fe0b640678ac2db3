"""One episode: the engine generates, the search tool answers, turn by turn, until an answer or a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from srl.errors import UserError
from srl.protocol import NO_INFORMATION, STOP_STRINGS, Action, Template, unknown_retriever
from srl.rollout.codec import Codec
from srl.rollout.engine import Engine, EngineFault, Sampling
from srl.rollout.tags import Tags
from srl.trajectory import (
    EndReason,
    NamedSearchTool,
    Phase,
    Question,
    Search,
    SearchTool,
    Segment,
    Trajectory,
    current_episode,
)

Messages = Sequence[Mapping[str, str]]
"""The chat messages of a prompt."""
OnProgress = Callable[[Trajectory, Sequence[int]], None]
"""Told of an episode while it grows: what there is of it, and the ids so far of the turn under way."""


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """The limits of an episode, in tokens, and how its turns are sampled.

    `max_turns` turns may search; one more generation may only answer. `max_response_length` limits
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
        return STOP_STRINGS if self.stop_at_answer else STOP_STRINGS[:1]

    def for_evaluation(self, temperature: float) -> EpisodeOptions:
        """These options with the sampling of validation, test and evaluation: `temperature`, no top-p."""
        return replace(self, temperature=temperature, top_p=1.0)


class PromptTooLongError(UserError):
    """The rendered question does not fit `max_prompt_length`. Prompts are never cut."""


async def run_episode(
    question: Question,
    engine: Engine,
    search: SearchTool | None,
    *,
    codec: Codec,
    template: Template,
    options: EpisodeOptions,
    seed: int = 0,
    step: int = 0,
    sample: int = 0,
    phase: Phase = "train",
    attempt: int = 0,
    on_progress: OnProgress | None = None,
) -> Trajectory:
    """Let `engine` answer `question` with the tool `search` (None makes a search an invalid action).

    The trajectory holds the ids that the engine was given and those that it returned, in order; nothing is
    decoded and encoded again. It never ends on an observation: if an observation and a minimal answer do
    not fit, the episode ends before it as `truncated`. A template with `{information}` has `search` asked for
    the question first; the passages stand in the prompt. `on_progress` is called with each new segment, and
    with each token of an engine that tells them. Raises PromptTooLongError.
    """
    trajectory = Trajectory(question, sample=sample, step=step, phase=phase, attempt=attempt)
    episode = _Episode(trajectory, engine, search, Tags(codec, template), options, on_progress)
    request = f"{phase}/{step}/{question.id}/{sample}/{attempt}"
    key = (seed, phase, step, question.id, sample, attempt)
    current_episode.set(request)
    began = time.perf_counter()
    try:
        trajectory.end = await episode.run(request, key)
    finally:
        engine.finish(request)
    trajectory.seconds = time.perf_counter() - began
    assert trajectory.token_ids == episode.ids, "the trajectory's ids are not what the engine was given"
    return trajectory


class _Episode:
    """The state of one episode while it runs; `ids` is the context that the engine sees."""

    def __init__(
        self,
        trajectory: Trajectory,
        engine: Engine,
        search: SearchTool | None,
        protocol: Tags,
        options: EpisodeOptions,
        on_progress: OnProgress | None,
    ) -> None:
        self.trajectory, self.engine, self.search = trajectory, engine, search
        self.protocol, self.options, self.on_progress = protocol, options, on_progress
        self.ids: list[int] = []
        self.prompt_length = 0

    async def run(self, request: str, key: tuple[int | str, ...]) -> EndReason:
        await self._start()
        if self._failed():
            return "failed"
        for turn in range(self.options.max_turns + 1):
            try:
                completion = await self.engine.generate(request, self.ids, self._sampling(turn, key))
            except EngineFault as fault:
                self.trajectory.error = str(fault)
                return "failed"
            text, action = self.protocol.read(completion.token_ids)
            self._add(Segment("policy", completion.token_ids, text, turn, completion.logprobs))
            if action is not None and action.kind == "answer":
                self.trajectory.answer = action.content
                self.trajectory.valid_actions += 1
                return "answered"
            if turn == self.options.max_turns:
                if completion.stop_reason == "length":
                    return "truncated"
                self.trajectory.answer = self.protocol.answer(text) if action is None else None
                return "unanswered" if self.trajectory.answer is None else "answered"
            if action is None or self.search is None:
                fits = self._feed_back(turn)
            else:
                fits = await self._look_up(action, turn)
            if not fits:
                return "failed" if self._failed() else "truncated"
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
        result = replace(await self._ask(question.text, ""), shown=0)
        self.trajectory.searches.append(result)
        if result.is_fault:
            return NO_INFORMATION
        self.trajectory.valid_searches += result.status != "rejected"
        without, *_ = self.protocol.prompt(self.protocol.template.messages(question.text, NO_INFORMATION))
        shown = self._show(result, min(options.max_prompt_length - len(without), options.max_obs_length))
        if shown is None:
            raise PromptTooLongError(
                f"question {question.id}: no passage fits into its prompt; raise data.max_prompt_length="
                f"{options.max_prompt_length} or rollout.max_obs_length={options.max_obs_length}",
                key="data.max_prompt_length",
            )
        return shown[0]

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
            stop=self.options.stop,
            key=(*key, turn),
            on_tokens=self.on_progress and partial(self.on_progress, self.trajectory),
        )

    def _failed(self) -> bool:
        return bool(self.trajectory.searches) and self.trajectory.searches[-1].is_fault

    async def _ask(self, query: str, retriever: str) -> Search:
        """The outcome of a query; where there are no retrievers to choose from, naming one is a mistake."""
        if isinstance(self.search, NamedSearchTool):
            return await self.search.search(query, retriever)
        assert self.search is not None
        if retriever:
            error = unknown_retriever(retriever, ())
            return Search(query, status="rejected", error=error, attempts=0, retriever=retriever)
        return await self.search.search(query)

    async def _look_up(self, action: Action, turn: int) -> bool:
        """Search and add the observation; False if the search failed or nothing fits."""
        result = replace(await self._ask(action.content, action.retriever), turn=turn, shown=0)
        self.trajectory.searches.append(result)
        if result.is_fault:
            return False
        if result.status == "rejected":
            return self._feed_back(turn)
        self.trajectory.valid_actions += 1
        self.trajectory.valid_searches += 1
        budget = min(self.options.max_obs_length, self._remaining() - self.options.min_answer_tokens)
        shown = self._show(result, budget)
        if shown is None:
            return False
        self._add(Segment("observation", tuple(shown[1]), shown[0], turn))
        return True

    def _show(self, found: Search, budget: int) -> tuple[str, list[int]] | None:
        """What fits of `found`, the last search, which then says which of its hits are shown."""
        fitted = self.protocol.observation(found.hits, budget, self.ids)
        if fitted is None:
            return None
        self.trajectory.searches[-1] = replace(found, shown=fitted.shown, cut=fitted.cut)
        return fitted.text, fitted.token_ids

    def _feed_back(self, turn: int) -> bool:
        text, ids = self.protocol.feedback(self.ids)
        if len(ids) + self.options.min_answer_tokens > self._remaining():
            return False
        self._add(Segment("feedback", tuple(ids), text, turn))
        return True
