"""Demonstrations that no model writes, each run as an episode first.

`srl data demonstrations --from facts` writes chains of searches, `--from passages` a search for the question
itself, and the answer that stands in what it brings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from srl import process
from srl.answers import contains_answer, findable
from srl.config import Config
from srl.data.demonstration_file import write_demonstrations
from srl.data.supporting_facts import NoDemonstration
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
from srl.train.fact_chains import ChainOptions, SearchFailedError, fact_chain
from srl.train.load_components import episode_options, load_codec
from srl.train.make_missing import Note
from srl.train.questions import check_some_left, load_questions, load_template
from srl.train.search import load_search
from srl.trajectory import Question, Search, SearchTool, Trajectory
from srl.workspace import Workspace

Source = Literal["facts", "passages"]
AT_ONCE = 256
"""Questions whose searches are asked together."""
NO_ROOM = "it does not fit the lengths of an episode"


class Made(NamedTuple):
    """A demonstration: its turns, and what is counted."""

    turns: Sequence[str]
    searches: int
    reworded: int = 0
    recovered: bool = False


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

    def add(self, made: Made | str) -> None:
        """Count a demonstration, or the reason why there is none."""
        self.questions += 1
        if isinstance(made, str):
            self.dropped[made] += 1
            return
        self.demonstrations += 1
        self.searches += made.searches
        self.reworded += made.reworded > 0
        self.recovered += made.recovered


@dataclass(frozen=True, slots=True)
class DemonstrationsMade:
    """What was written to `file`, and the counts by data source."""

    file: Path
    questions: int
    demonstrations: int
    sources: Sequence[SourceCounts]


def write_made_demonstrations(
    config: Config,
    source: Source,
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    limit: int | Mapping[str, int] | None = None,
    recovery: float = 0.0,
    brief: bool = False,
    note: Note = lambda text: None,
) -> DemonstrationsMade:
    """Write a demonstration of each question that can have one.

    From `facts` it is a chain of searches; `recovery` and `brief` are those of `ChainOptions`. From
    `passages` it searches for the question as it is, or for nothing with a template that retrieves (`rag`),
    and its answer names the first passage that has the first golden answer. Raises UserError, and CheckFailed
    where there is none.
    """
    search = load_search(config, workspace, note)
    if search is None:
        raise UserError(
            "these demonstrations search, and rollout.search is false", key="rollout.search",
            hint="--set rollout.search=true --set data.template=search-r1, or another template that searches",
        )  # fmt: skip
    codec, template = _codec(config, note), load_template(config)
    maker = _Maker(
        source, search, Environment(codec, template, episode_options(config), search, attempts=1),
        ChainOptions(config.rollout.max_turns, recovery, config.trainer.seed, brief),
    )  # fmt: skip
    questions = load_questions(tuple(files), config, codec, note, limit)
    check_some_left(questions, files)
    with counted("demonstrations", len(questions)) as count:
        made = process.run_async(maker.all(questions, config.search.max_failed, count))
    sources = {each.data_source: SourceCounts(each.data_source) for each in questions}
    written = []
    for question, demonstration in zip(questions, made, strict=True):
        sources[question.data_source].add(demonstration)
        if isinstance(demonstration, Made):
            written.append(replace(question, metadata={**question.metadata, "turns": demonstration.turns}))
    if not written:
        dropped = sum((counts.dropped for counts in sources.values()), Counter[str]())
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in dropped.most_common(3))
        hint = "prepare questions and index from the same files; --from passages needs no gold passages"
        raise CheckFailed(f"no question got a demonstration ({reasons}); {hint}")
    write_demonstrations(out, written)
    return DemonstrationsMade(out, len(questions), len(written), list(sources.values()))


def _codec(config: Config, note: Note) -> Codec:
    """The codec of the model to be fine-tuned, if it is named: it tells what of a search is shown."""
    if config.model.tokenizer is None and config.model.path is None:
        note(
            "no MODEL is named, so lengths are counted in pieces of three bytes, and not as it will see them"
        )
        return TextCodec()
    return load_codec(config.model, None, note)


@dataclass(frozen=True, slots=True)
class _Maker:
    """What a demonstration is made with."""

    source: Source
    search: SearchTool
    environment: Environment
    chain_options: ChainOptions

    async def all(self, questions: Sequence[Question], limit: float, count: Count) -> list[Made | str]:
        """A demonstration of each question, or why there is none.

        A question whose search failed is tried once more. Raises SearchFailedError where more than the share
        `limit` of the questions, or all that were asked together, failed twice.
        """
        failed: list[SearchFailedError] = []
        make = self._from_facts if self.source == "facts" else self._from_passages

        async def once(question: Question, tries: int = 2) -> Made | str:
            try:
                return await make(question)
            except NoDemonstration as reason:
                return str(reason)
            except SearchFailedError as error:
                if tries > 1:
                    return await once(question, tries - 1)
                failed.append(error)
                return "a search failed"

        made: list[Made | str] = []
        try:
            await connect(self.search)
            for start in range(0, len(questions), AT_ONCE):
                before, together = len(failed), questions[start : start + AT_ONCE]
                made += await asyncio.gather(*map(once, together))
                if len(failed) > limit * len(questions) or len(failed) - before == len(together):
                    raise failed[-1]
                count(len(made))
        finally:
            await aclose(self.search)
        return made

    async def _from_facts(self, question: Question) -> Made:
        chain = await fact_chain(question, self.search, self._shown, self.chain_options)
        episode = await self._run(question, lambda request, turn: "".join(chain.turns[turn : turn + 1]))
        if [each.shown_texts for each in episode.searches] != [each.shown_texts for each in chain.searches]:
            raise NoDemonstration(NO_ROOM)
        return Made(chain.turns, len(chain.searches), chain.reworded, chain.recovered)

    def _shown(self, outcome: Search) -> Search:
        """What of a search fits the budget of an observation."""
        limit, codec = self.environment.options.max_obs_length, self.environment.codec
        information = fit_information(outcome.hits, limit, codec)
        if information is None:
            return replace(outcome, shown=0)
        return replace(outcome, shown=information.shown, cut=information.cut)

    async def _from_passages(self, question: Question) -> Made:
        wanted = findable(question.golden_answers[:1])
        if not wanted:
            raise NoDemonstration("the answer is yes or no, or missing")
        turns = [] if self.environment.template.retrieves else [f"<search> {escape(question.text)} </search>"]
        searches = len(turns)

        def answer(episode: Trajectory, ids: Sequence[int]) -> None:
            """Write the answer as soon as the passages are shown."""
            if not episode.searches or len(turns) > searches or episode.searches[-1].shown is None:
                return
            shown = enumerate(episode.searches[-1].shown_texts, start=1)
            place = next((number for number, text in shown if contains_answer(text, wanted)), None)
            if place is None:
                raise NoDemonstration("no passage shown has the answer")
            gold = question.golden_answers[0]
            turns.append(f"<think> Doc {place} says it. </think> <answer> {gold} </answer>")

        try:
            await self._run(question, lambda request, turn: "".join(turns[turn : turn + 1]), answer)
        except PromptTooLongError:
            raise NoDemonstration(NO_ROOM) from None
        return Made(turns, searches)

    async def _run(
        self, question: Question, script: Script, on_progress: OnProgress | None = None
    ) -> Trajectory:
        """Run the turns of `script` as an episode, which must end with the answer."""
        engine = ScriptedEngine(self.environment.codec, script)
        episode = await self.environment.play(engine, question, Key(phase="sft"), on_progress)
        if not episode.valid:
            raise SearchFailedError(episode.fault)
        if not EpisodeResult.of(episode).em:
            raise NoDemonstration(NO_ROOM)
        return episode
