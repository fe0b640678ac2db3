"""Demonstrations that no model writes, each run as an episode first.

`srl data demonstrations --from facts` writes chains of searches, `--from passages` a search for the question
itself, and the answer that stands in what it brings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from srl import process
from srl.answers import contains_answer, findable
from srl.config import Config
from srl.data.demonstration_file import write_demonstrations
from srl.data.supporting_facts import NO_FACTS, NoDemonstration
from srl.errors import CheckFailed, UserError
from srl.evaluate.episode_results import EpisodeResult
from srl.progress import Count, counted
from srl.protocol import escape
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import Script, ScriptedEngine
from srl.rollout.environment import Environment, Key
from srl.rollout.episode import OnProgress, PromptTooLongError
from srl.rollout.observation import fit_information
from srl.serve.named_retrievers import aclose, connect
from srl.train.fact_chains import RECOVERY, ChainOptions, SearchFailedError, fact_chain
from srl.train.load_components import episode_options, load_codec
from srl.train.make_missing import Note
from srl.train.questions import check_some_left, load_questions, load_template
from srl.train.search import load_search
from srl.trajectory import Question, Search, SearchTool, Trajectory
from srl.workspace import Workspace

AT_ONCE = 256
"""Questions whose searches are asked together."""
NO_ROOM = "it does not fit the lengths of an episode"


@dataclass(slots=True)
class SourceCounts:
    """What became of the questions of a data source.

    `dropped` are those without a demonstration, by reason. Of the demonstrations from facts, `reworded` are
    those of which a passage needed other words than the first, and `recovered` those that keep a search that
    missed.
    """

    source: str
    questions: int = 0
    demonstrations: int = 0
    reworded: int = 0
    recovered: int = 0
    searches: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def mean_searches(self) -> float:
        return self.searches / self.demonstrations if self.demonstrations else 0.0

    def add(self, found: _Made | str) -> None:
        """Count a demonstration, or the reason why there is none."""
        self.questions += 1
        if isinstance(found, str):
            self.dropped[found] += 1
            return
        self.demonstrations += 1
        self.searches += found.searches
        self.reworded += found.reworded > 0
        self.recovered += found.recovered


@dataclass(frozen=True, slots=True)
class DemonstrationsMade:
    """What was written to `file`, and the counts by data source."""

    file: Path
    questions: int
    demonstrations: int
    sources: Sequence[SourceCounts]


class _Made(NamedTuple):
    """A demonstration: its turns, and what is counted."""

    turns: Sequence[str]
    searches: int
    reworded: int = 0
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class _Episodes:
    """What an episode is made with."""

    search: SearchTool
    environment: Environment

    @classmethod
    def of(cls, config: Config, workspace: Workspace, note: Note) -> _Episodes:
        search = load_search(config, workspace, note)
        if search is None:
            raise UserError(
                "these demonstrations search, and rollout.search is false; type: --set rollout.search=true "
                "--set data.template=search-r1, or name another template that searches"
            )
        codec, template = _codec(config, note), load_template(config)
        return cls(search, Environment(codec, template, episode_options(config), search, attempts=1))

    def shown(self, found: Search) -> Search:
        """What of a search fits the budget of an observation."""
        options, codec = self.environment.options, self.environment.codec
        information = fit_information(found.hits, options.max_obs_length, codec)
        if information is None:
            return replace(found, shown=0)
        return replace(found, shown=information.shown, cut=information.cut)

    async def from_facts(self, question: Question, options: ChainOptions) -> _Made:
        """A chain of searches. Raises NoDemonstration."""
        chain = await fact_chain(question, self.search, self.shown, options)
        episode = await self._run(question, lambda request, turn: "".join(chain.turns[turn : turn + 1]))
        if [_seen(found) for found in episode.searches] != [_seen(found) for found in chain.observed]:
            raise NoDemonstration(NO_ROOM)
        return _Made(chain.turns, len(chain.queries), chain.reworded, chain.recovered)

    async def from_passages(self, question: Question) -> _Made:
        """A search for the question as it is, and the answer, which is in a passage shown.

        There is no search if the template retrieves. Raises NoDemonstration.
        """
        wanted = findable(question.golden_answers[:1])
        if not wanted:
            raise NoDemonstration("the answer is yes or no, or missing")
        turns = [] if self.environment.template.retrieves else [f"<search> {escape(question.text)} </search>"]
        searches = len(turns)

        def answer(episode: Trajectory, ids: Sequence[int]) -> None:
            """Write the answer as soon as the passages are shown."""
            if episode.searches and len(turns) == searches and episode.searches[-1].shown is not None:
                turns.append(_answer(question, wanted, episode.searches[-1].shown_texts))

        try:
            await self._run(question, lambda request, turn: "".join(turns[turn : turn + 1]), answer)
        except PromptTooLongError:
            raise NoDemonstration(NO_ROOM) from None
        return _Made(turns, searches)

    async def _run(
        self, question: Question, script: Script, on_progress: OnProgress | None = None
    ) -> Trajectory:
        """Run the turns of `script` as an episode, which must end with the answer.

        Raises NoDemonstration, and SearchFailedError.
        """
        engine = ScriptedEngine(self.environment.codec, script)
        episode = await self.environment.play(engine, question, Key(phase="sft"), on_progress)
        if not episode.valid:
            raise SearchFailedError(episode.fault)
        if not EpisodeResult.of(episode).em:
            raise NoDemonstration(NO_ROOM)
        return episode


def _seen(found: Search) -> tuple[str, ...]:
    """The texts of a search that the model was shown."""
    return tuple(found.shown_texts)


def _answer(question: Question, wanted: Collection[str], texts: Sequence[str]) -> str:
    """The turn that names the first of the passages shown that has an answer. Raises NoDemonstration."""
    for place, text in enumerate(texts, start=1):
        if contains_answer(text, wanted):
            return f"<think> Doc {place} says it. </think> <answer> {question.golden_answers[0]} </answer>"
    raise NoDemonstration("no passage shown has the answer")


Make = Callable[[Question], Awaitable[_Made]]


def write_fact_demonstrations(
    config: Config,
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    recovery: float = RECOVERY,
    brief: bool = False,
    limit: int | Mapping[str, int] | None = None,
    note: Note = lambda text: None,
) -> DemonstrationsMade:
    """Write a demonstration of each question whose supporting facts can be followed; one a question.

    `recovery` and `brief` are those of `ChainOptions`.
    Raises UserError, and CheckFailed where there is none to write.
    """
    episodes = _Episodes.of(config, workspace, note)
    options = ChainOptions(config.rollout.max_turns, recovery, config.trainer.seed, brief)
    return _write(config, files, out, episodes, partial(episodes.from_facts, options=options), limit, note)


def write_passage_demonstrations(
    config: Config,
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    limit: int | Mapping[str, int] | None = None,
    note: Note = lambda text: None,
) -> DemonstrationsMade:
    """Write a demonstration of each question that retrieves a passage with its first golden answer.

    It searches for the question as it is, and its answer names the first passage that has it. With a template
    that retrieves for the question (`rag`) it only answers. Raises UserError, and CheckFailed where there is
    none to write.
    """
    episodes = _Episodes.of(config, workspace, note)
    return _write(config, files, out, episodes, episodes.from_passages, limit, note)


def _write(
    config: Config, files: Sequence[str], out: Path, episodes: _Episodes, make: Make,
    limit: int | Mapping[str, int] | None, note: Note,
) -> DemonstrationsMade:  # fmt: skip
    questions = load_questions(tuple(files), config, episodes.environment.codec, note, limit)
    check_some_left(questions, files)
    with counted("demonstrations", len(questions)) as count:
        found = process.run_async(_all(questions, episodes.search, make, config.eval.max_failed, count))
    sources = {item.data_source: SourceCounts(item.data_source) for item in questions}
    for question, one in zip(questions, found, strict=True):
        sources[question.data_source].add(one)
    written = [
        replace(question, metadata={**question.metadata, "turns": one.turns})
        for question, one in zip(questions, found, strict=True)
        if isinstance(one, _Made)
    ]
    _check(len(written), sources)
    write_demonstrations(out, written)
    return DemonstrationsMade(out, len(questions), len(written), list(sources.values()))


def _codec(config: Config, note: Note) -> Codec:
    """The codec of the model to be fine-tuned, if it is named: it tells what of a search is shown."""
    if config.model.tokenizer is None and config.model.path is None:
        note(
            "lengths are counted in pieces of three bytes; name the MODEL that will be fine-tuned, so that "
            "passages are cut as it will see them"
        )
        return TextCodec()
    return load_codec(config.model, None, note)


async def _all(
    questions: Sequence[Question], search: SearchTool, make: Make, limit: float, count: Count
) -> list[_Made | str]:
    """A demonstration of each question, or why there is none.

    A question whose search failed is tried once more. Raises SearchFailedError where more than the share
    `limit` of the questions, or all that were asked together, failed twice.
    """
    failed: list[SearchFailedError] = []

    async def one(question: Question, tries: int = 2) -> _Made | str:
        try:
            return await make(question)
        except NoDemonstration as reason:
            return str(reason)
        except SearchFailedError as error:
            if tries > 1:
                return await one(question, tries - 1)
            failed.append(error)
            return "a search failed"

    found: list[_Made | str] = []
    try:
        await connect(search)
        for start in range(0, len(questions), AT_ONCE):
            before, together = len(failed), questions[start : start + AT_ONCE]
            found += await asyncio.gather(*map(one, together))
            if len(failed) > limit * len(questions) or len(failed) - before == len(together):
                raise failed[-1]
            count(len(found))
    finally:
        await aclose(search)
    return found


def _check(written: int, sources: Mapping[str, SourceCounts]) -> None:
    if written:
        return
    dropped = sum((counts.dropped for counts in sources.values()), Counter[str]())
    reason, number = dropped.most_common(1)[0]
    way = (
        "make them with --from passages, which needs no gold passages"
        if reason == NO_FACTS
        else "prepare the questions and the index from the same files, with srl data prepare"
    )
    raise CheckFailed(f"no question got a demonstration; {number:,} of {dropped.total():,}: {reason}; {way}")
