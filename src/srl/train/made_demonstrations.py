"""Demonstrations that no model writes, each run as an episode first.

`srl data demonstrations --from facts` writes chains of searches, `--from passages` a search for the question
itself, and the answer that stands in what it brings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from srl import process
from srl.answers import contains_answer, findable
from srl.config import Config
from srl.data.demonstration_file import Demonstrations, save_demonstrations, turn_text
from srl.data.supporting_facts import NoDemonstration
from srl.errors import UserError
from srl.evaluate.episode_results import EpisodeResult
from srl.progress import Count, counted
from srl.protocol import escape
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import Script, ScriptedEngine
from srl.rollout.environment import Environment, Key
from srl.rollout.episode import OnProgress, PromptTooLongError
from srl.serve.named_retrievers import aclose, connect
from srl.train.fact_chains import SearchFailedError, fact_chain
from srl.train.load_components import episode_options, load_codec, load_native
from srl.train.make_missing import Note
from srl.train.questions import check_some_left, load_questions, load_template
from srl.train.search import load_search
from srl.trajectory import Question, Search, SearchTool, Trajectory
from srl.workspace import Workspace

Turns = list[str]
AT_ONCE = 256
"""Questions whose searches are asked together."""
NO_ROOM = "it does not fit the lengths of an episode"


def make_demonstrations(
    config: Config,
    source: Literal["facts", "passages"],
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    limit: int | Mapping[str, int] | None = None,
    note: Note = lambda text: None,
) -> Demonstrations:
    """Write a demonstration of each question that can have one.

    From `facts` it is a chain of searches (`fact_chain`). From `passages` it searches
    for the question as it is, or for nothing with a template that retrieves (`rag`), and its answer names the
    first passage that has the first golden answer. Raises UserError, and CheckFailed where there is none.
    """
    search = load_search(config, workspace, note)
    if search is None:
        raise UserError(
            "these demonstrations search, and rollout.search is false", key="rollout.search",
            hint="--set rollout.search=true --set data.template=search-r1, or another template that searches",
        )  # fmt: skip
    codec, template = _codec(config, note), load_template(config)
    native = None if isinstance(codec, TextCodec) else load_native(config, codec, search, note)
    environment = Environment(codec, template, episode_options(config), search, attempts=1, native=native)
    make = partial(_from_passages, environment)
    if source == "facts":
        make = partial(_from_facts, environment, search, config.trainer.seed)
    questions = load_questions(tuple(files), config, codec, note, limit)
    check_some_left(questions, files)
    with counted("demonstrations", len(questions)) as count:
        outcomes = process.run_async(_all(make, questions, search, config.eval.max_failed, count))
    demonstrations, left_out = list[Question](), Counter[tuple[str, str]]()
    for question, turns in zip(questions, outcomes, strict=True):
        if isinstance(turns, str):
            left_out[question.data_source, turns] += 1
        else:
            demonstrations.append(replace(question, metadata={**question.metadata, "turns": turns}))
    return save_demonstrations(out, demonstrations, left_out)


def _codec(config: Config, note: Note) -> Codec:
    """The codec of the model to be fine-tuned, if it is named: it tells what of a search is shown."""
    if config.model.tokenizer is None and config.model.path is None:
        note(
            "no MODEL is named, so lengths are counted in pieces of three bytes, and not as it will see them"
        )
        return TextCodec()
    return load_codec(config.model, None, note)


async def _all(
    make: Callable[[Question], Awaitable[Turns]],
    questions: Sequence[Question],
    search: SearchTool,
    limit: float,
    count: Count,
) -> list[Turns | str]:
    """The turns of a demonstration of each question, or why there is none.

    A question whose search failed is tried once more. Raises SearchFailedError where more than the share
    `limit` of the questions, or all that were asked together, failed twice.
    """
    failed: list[SearchFailedError] = []

    async def once(question: Question, tries: int = 2) -> Turns | str:
        try:
            return await make(question)
        except NoDemonstration as reason:
            return str(reason)
        except SearchFailedError as error:
            if tries > 1:
                return await once(question, tries - 1)
            failed.append(error)
            return "a search failed"

    outcomes: list[Turns | str] = []
    try:
        await connect(search)
        for start in range(0, len(questions), AT_ONCE):
            before, together = len(failed), questions[start : start + AT_ONCE]
            outcomes += await asyncio.gather(*map(once, together))
            if len(failed) > limit * len(questions) or len(failed) - before == len(together):
                raise failed[-1]
            count(len(outcomes))
    finally:
        await aclose(search)
    return outcomes


async def _from_facts(environment: Environment, search: SearchTool, seed: int, question: Question) -> Turns:
    options = environment.options

    def shown(outcome: Search) -> Search:
        """What of a search fits the budget of an observation."""
        longest = options.max_obs_length
        fitted = environment.protocol.continue_with([outcome], longest, longest, after=())
        return fitted.results[0] if fitted and fitted.results else replace(outcome, shown=0)

    chain = await fact_chain(question, search, shown, max_searches=options.max_turns, seed=seed)
    episode = await _run(environment, question, lambda request, turn: "".join(chain.turns[turn : turn + 1]))
    if [each.shown_texts for each in episode.searches] != [each.shown_texts for each in chain.searches]:
        raise NoDemonstration(NO_ROOM)
    return chain.turns


async def _from_passages(environment: Environment, question: Question) -> Turns:
    answers = findable(question.golden_answers[:1])
    if not answers:
        raise NoDemonstration("the answer is yes or no, or missing")
    retrieves = environment.template.retrieves
    turns = [] if retrieves else [turn_text("", "search", escape(question.text))]
    searches = len(turns)

    def answer(episode: Trajectory, ids: Sequence[int]) -> None:
        """Write the answer as soon as the passages are shown."""
        if not episode.searches or len(turns) > searches or episode.searches[-1].shown is None:
            return
        passages = enumerate(episode.searches[-1].shown_texts, start=1)
        place = next((number for number, text in passages if contains_answer(text, answers)), None)
        if place is None:
            raise NoDemonstration("no passage shown has the answer")
        turns.append(turn_text(f"Doc {place} says it.", "answer", question.golden_answers[0]))

    try:
        await _run(environment, question, lambda request, turn: "".join(turns[turn : turn + 1]), answer)
    except PromptTooLongError:
        raise NoDemonstration(NO_ROOM) from None
    return turns


async def _run(
    environment: Environment, question: Question, script: Script, on_progress: OnProgress | None = None
) -> Trajectory:
    """Run the turns of `script` as an episode, which must end with the answer."""
    engine = ScriptedEngine(environment.codec, script, environment.protocol.encode)
    episode = await environment.play(engine, question, Key(phase="sft"), on_progress)
    if not episode.valid:
        raise SearchFailedError(episode.fault)
    if not EpisodeResult.of(episode).em:
        raise NoDemonstration(NO_ROOM)
    return episode
