"""`srl data demonstrations --from facts`: writes chains of searches, each run as an episode first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from srl import interrupts
from srl.config import Config
from srl.data.demonstration_file import write_demonstrations
from srl.data.supporting_facts import NoDemonstration
from srl.errors import CheckFailed
from srl.evaluate.episode_results import EpisodeResult
from srl.progress import Count, counted
from srl.protocol import Template
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.rollout.observation import fit_information
from srl.serve.named_retrievers import aclose, connect
from srl.train.fact_chains import RECOVERY, Chain, ChainOptions, fact_chain
from srl.train.load_components import episode_options, load_codec
from srl.train.make_missing import Note
from srl.train.questions import load_questions, load_template
from srl.train.search import load_search
from srl.trajectory import Question, Search, SearchTool
from srl.workspace import Workspace

AT_ONCE = 256
"""Questions whose searches are asked together."""


@dataclass(slots=True)
class SourceCounts:
    """What became of the questions of a data source.

    Of the demonstrations, `reworded` are those of which a passage needed other words than the first, and
    `recovered` those that keep a search that missed. `dropped` are the others, by reason.
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

    def add(self, found: Chain | str) -> None:
        """Count a demonstration, or the reason why there is none."""
        self.questions += 1
        if isinstance(found, str):
            self.dropped[found] += 1
            return
        self.demonstrations += 1
        self.reworded += found.reworded > 0
        self.recovered += found.recovered
        self.searches += len(found.queries)


@dataclass(frozen=True, slots=True)
class FactsWritten:
    """What was written to `file`, and the counts by data source."""

    file: Path
    questions: int
    demonstrations: int
    sources: Sequence[SourceCounts]


@dataclass(frozen=True, slots=True)
class _Episodes:
    """What an episode is made with."""

    search: SearchTool
    codec: Codec
    template: Template
    options: EpisodeOptions
    chains: ChainOptions

    def shown(self, found: Search) -> Search:
        """What of a search fits the budget of an observation."""
        information = fit_information(found.hits, self.options.max_obs_length, self.codec)
        if information is None:
            return replace(found, shown=0)
        return replace(found, shown=information.shown, cut=information.cut)

    async def demonstration(self, question: Question) -> Chain | str:
        """The demonstration of a question, or why there is none."""
        try:
            chain = await fact_chain(question, self.search, self.shown, self.chains)
        except NoDemonstration as reason:
            return str(reason)
        engine = ScriptedEngine(self.codec, lambda request, turn: "".join(chain.turns[turn : turn + 1]))
        episode = await run_episode(
            question, engine, self.search, codec=self.codec, template=self.template, options=self.options,
            phase="sft",
        )  # fmt: skip
        return chain if EpisodeResult.of(episode).em else "it does not fit the lengths of an episode"


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
) -> FactsWritten:
    """Write a demonstration of each question whose supporting facts can be followed; one a question.

    `recovery` and `brief` are those of `ChainOptions`.
    Raises UserError, and CheckFailed where there is none to write.
    """
    codec = _codec(config, note)
    questions = load_questions(tuple(files), config, codec, note, limit)
    search = load_search(config, workspace, note)
    assert search is not None, "the command checks that there is something to search"
    chains = ChainOptions(config.rollout.max_turns, recovery, config.trainer.seed, brief)
    episodes = _Episodes(search, codec, load_template(config), episode_options(config), chains)
    with counted("demonstrations", len(questions)) as count:
        found = interrupts.run(_all(questions, episodes, count))
    sources = {item.data_source: SourceCounts(item.data_source) for item in questions}
    for question, one in zip(questions, found, strict=True):
        sources[question.data_source].add(one)
    written = [
        replace(question, metadata={**question.metadata, "turns": chain.turns})
        for question, chain in zip(questions, found, strict=True)
        if isinstance(chain, Chain)
    ]
    _check(len(written), sources)
    write_demonstrations(out, written)
    return FactsWritten(out, len(questions), len(written), list(sources.values()))


def _codec(config: Config, note: Note) -> Codec:
    """The codec of the model to be fine-tuned, if it is named: it tells what of a search is shown."""
    if config.model.tokenizer is None and config.model.path is None:
        note(
            "lengths are counted in pieces of three bytes; name the MODEL that will be fine-tuned, so that "
            "passages are cut as it will see them"
        )
        return TextCodec()
    return load_codec(config.model, None, note)


async def _all(questions: Sequence[Question], episodes: _Episodes, count: Count) -> list[Chain | str]:
    found: list[Chain | str] = []
    try:
        await connect(episodes.search)
        for start in range(0, len(questions), AT_ONCE):
            part = questions[start : start + AT_ONCE]
            found += await asyncio.gather(*map(episodes.demonstration, part))
            count(len(found))
    finally:
        await aclose(episodes.search)
    return found


def _check(written: int, sources: Mapping[str, SourceCounts]) -> None:
    if written:
        return
    dropped = sum((counts.dropped for counts in sources.values()), Counter[str]())
    reason, number = dropped.most_common(1)[0]
    raise CheckFailed(
        f"no question got a demonstration; {number:,} of {dropped.total():,}: {reason}; prepare the "
        "questions and the index from the same files, with srl data prepare"
    )
