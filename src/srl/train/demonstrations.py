"""Demonstrations that no model writes, each run as an episode first.

`srl data demonstrations --from facts` writes chains of searches from supporting facts. A search counts only
if its passage is among those that the model will be shown; if it is not, the search is reworded; if no
wording brings the passage, the question gets no demonstration. `--from passages` writes a search for the
question itself, and the answer that stands in what it brings.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from srl import process
from srl.answers import contains_answer, exact_match, findable, normalise_answer
from srl.config import Config
from srl.data import demonstration_texts as texts
from srl.data.demonstration_file import Demonstrations, save_demonstrations, turn_text
from srl.data.stated_values import find_text, find_value
from srl.data.supporting_facts import Facts, Lookup, NoDemonstration, facts_of
from srl.errors import UserError
from srl.evaluate.episode_results import EpisodeResult
from srl.progress import Count, Note, counted
from srl.protocol import escape
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import Script, ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import Key, OnProgress, PromptTooLongError
from srl.serve.named_retrievers import aclose, connect
from srl.train.load_components import episode_options
from srl.train.load_protocol import load_codec, load_native, load_template
from srl.train.questions import load_questions
from srl.train.search import load_search
from srl.trajectory import Passage, Question, Search, SearchTool, Trajectory
from srl.workspace import Workspace

Turns = list[str]
AT_ONCE = 256
"""Questions whose searches are asked together."""
NO_ROOM = "it does not fit the lengths of an episode"
THOUGHT_WORDS = 50
"""A demonstration with a longer thought is not written."""
RECOVERY = 0.2
"""The share of the questions in which a first search that misses is kept."""


class SearchFailedError(UserError):
    """A search failed while a demonstration was made."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"search failed ({fault})", hint="`srl index search` and `srl serve check` test it")


def make_demonstrations(
    config: Config,
    source: Literal["facts", "passages"],
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    limit: int | None = None,
    note: Note = lambda text: None,
) -> Demonstrations:
    """Write a demonstration of each question that can have one.

    From `facts` it is a chain of searches (`fact_chain`). From `passages` it searches for the question as it
    is, or for nothing with a template that retrieves (`rag`), and its answer names the first passage that has
    the first golden answer. Raises UserError, and CheckFailed where there is none.
    """
    search = load_search(config, workspace, note)
    if search is None:
        raise UserError(
            "these demonstrations search, and rollout.search is false", key="rollout.search",
            hint="--set rollout.search=true --set data.template=search-r1, or another template that searches",
        )  # fmt: skip
    if config.model.tokenizer is None and config.model.path is None:
        note(
            "no MODEL is named, so lengths are counted in pieces of three bytes, and not as it will see them"
        )
        codec: Codec = TextCodec()
    else:  # the codec of the model to be fine-tuned tells what of a search is shown
        codec = load_codec(config.model, None, note)
    native = None if isinstance(codec, TextCodec) else load_native(config, codec, search, note)
    template, options = load_template(config), episode_options(config)
    environment = Environment(codec, template, options, search, attempts=1, native=native)
    make = partial(_from_passages, environment)
    if source == "facts":
        make = partial(_from_facts, environment, search, config.trainer.seed)
    questions = load_questions(tuple(files), config, codec, note, limit)
    with counted("demonstrations", len(questions)) as count:
        outcomes = process.run_async(_all(make, questions, search, config.eval.max_failed, count))
    demonstrations, left_out = list[Question](), Counter[tuple[str, str]]()
    for question, turns in zip(questions, outcomes, strict=True):
        if isinstance(turns, list):
            demonstrations.append(replace(question, metadata={**question.metadata, "turns": turns}))
        else:
            left_out[question.data_source, str(turns)] += 1
    return save_demonstrations(out, demonstrations, left_out)


async def _all(
    make: Callable[[Question], Awaitable[Turns]],
    questions: Sequence[Question],
    search: SearchTool,
    limit: float,
    count: Count,
) -> list[Turns | NoDemonstration]:
    """The turns of a demonstration of each question, or why there is none.

    A question whose search failed is tried once more. Raises SearchFailedError where more than the share
    `limit` of the questions, or all that were asked together, failed twice.
    """
    failed = list[SearchFailedError]()

    async def turns_of(question: Question, tries: int = 2) -> Turns | NoDemonstration:
        try:
            return await make(question)
        except NoDemonstration as reason:
            return reason
        except SearchFailedError as error:
            if tries > 1:
                return await turns_of(question, tries - 1)
            failed.append(error)
            return NoDemonstration("a search failed")

    outcomes = list[Turns | NoDemonstration]()
    try:
        await connect(search)
        for start in range(0, len(questions), AT_ONCE):
            before, together = len(failed), questions[start : start + AT_ONCE]
            outcomes += await asyncio.gather(*map(turns_of, together))
            if len(failed) > limit * len(questions) or len(failed) - before == len(together):
                raise failed[-1]
            count(len(outcomes))
    finally:
        await aclose(search)
    return outcomes


async def _played(
    environment: Environment, question: Question, script: Script, on_progress: OnProgress | None = None
) -> Trajectory:
    """The turns of `script` as an episode, which must end with the answer."""
    engine = ScriptedEngine(environment.codec, script, environment.protocol.encode)
    episode = await environment.play(engine, question, Key(phase="sft"), on_progress)
    if not episode.valid:
        raise SearchFailedError(episode.fault)
    if not EpisodeResult.of(episode).em:
        raise NoDemonstration(NO_ROOM)
    return episode


async def _from_passages(environment: Environment, question: Question) -> Turns:
    answers = findable(question.golden_answers[:1])
    if not answers:
        raise NoDemonstration("the answer is yes or no, or missing")
    turns = [] if environment.template.retrieves else [turn_text("", "search", escape(question.text))]
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
        await _played(environment, question, lambda request, turn: "".join(turns[turn : turn + 1]), answer)
    except PromptTooLongError:
        raise NoDemonstration(NO_ROOM) from None
    return turns


async def _from_facts(environment: Environment, search: SearchTool, seed: int, question: Question) -> Turns:
    options, longest = environment.options, environment.options.max_obs_length

    def shown(outcome: Search) -> Search:
        """What of a search fits the budget of an observation."""
        fitted = environment.protocol.continue_with([outcome], longest, longest, after=())
        return fitted.results[0] if fitted and fitted.results else replace(outcome, shown=0)

    chain = await fact_chain(question, search, shown, max_searches=options.max_turns, seed=seed)
    turns = chain.turns
    episode = await _played(environment, question, lambda request, turn: "".join(turns[turn : turn + 1]))
    if [each.shown_texts for each in episode.searches] != [each.shown_texts for each in chain.searches]:
        raise NoDemonstration(NO_ROOM)
    return turns


# ---- Chains of searches


async def fact_chain(
    question: Question,
    search: SearchTool,
    show: Callable[[Search], Search],
    *,
    max_searches: int = 4,
    recovery: float = RECOVERY,
    seed: int = 0,
) -> Chain:
    """The demonstration of a question, of at most `max_searches`; a share `recovery` of the questions keeps a
    search that missed. `show` sets what of a search the model is shown. Raises NoDemonstration, and
    SearchFailedError.
    """
    rng = random.Random(f"demonstration {seed} {question.id}")
    facts = facts_of(question)
    chain = Chain(question, search, show, max_searches, rng, rng.random() < recovery, facts.lookups)
    await (_by_values(facts, chain) if facts.by_value else _by_titles(facts, chain))
    return chain


async def _by_values(facts: Facts, chain: Chain) -> None:
    """Look up one value after the other; each may be the name of the next. The last one is the answer."""
    values: list[str] = []
    for lookup in facts.lookups:
        phrase = lookup.subquestion.rstrip("? ") or lookup.subject
        for number in range(len(values), 0, -1):
            phrase = phrase.replace(f"#{number}", values[number - 1])
        name: str | None = phrase
        if not lookup.subquestion:
            spellings = (texts.as_known(each, chain.known) for each in (phrase, lookup.name) if each)
            name = next((spelling for spelling in spellings if spelling is not None), None)
        if name is None:
            raise NoDemonstration("a name that nothing before it says")
        doc = await chain.find(lookup, name)
        source = next((text for text in (doc.text, doc.whole) if find_value(lookup.value, text)), "")
        if (span := find_value(lookup.value, source)) is None:
            raise NoDemonstration("a passage does not state its value")
        values.append(source[slice(*span)])
        if len(values) < len(facts.lookups):
            chain.quote(lookup, doc, values[-1])
    chain.answer(chain.accepted([doc.text, doc.whole]), doc)


async def _by_titles(facts: Facts, chain: Chain) -> None:
    """Find the gold passages, each by its name once that is known, else by the question's words."""
    remaining, docs = list(facts.lookups), list[Doc]()
    while remaining:
        lookup, name = _next(remaining, chain, by_name=len(facts.lookups) > 1)
        if name or len(remaining) == 1:
            doc = await chain.find(lookup, name)
        else:
            doc = await chain.find(Lookup("", remaining[0].ids.union(*(each.ids for each in remaining))), "")
            lookup = next((each for each in remaining if each.is_in(doc.passage, doc.whole)), lookup)
        remaining.remove(lookup)
        docs.insert(0, doc)
        if remaining:
            names = (each.name for each in remaining)
            chain.quote(lookup, doc, next((each for each in names if find_text(each, doc.text)), ""))
    gold = normalise_answer(chain.question.golden_answers[0])
    if gold in ("yes", "no"):
        chain.said.append(f"So the answer is {gold}.")
        chain.answer(gold)
        return
    answer = chain.accepted([doc.text for doc in docs] + [doc.whole for doc in docs])
    chain.answer(answer, next((doc for doc in docs if find_text(answer, doc.text)), docs[0]))


def _next(lookups: Sequence[Lookup], chain: Chain, by_name: bool) -> tuple[Lookup, str]:
    """The next passage to find, first one that was shown already; and its name, if that is known."""
    for lookup in lookups:
        if chain.seen(lookup) is not None:
            return lookup, lookup.name
    for lookup in lookups if by_name else ():
        if lookup.title and (name := texts.as_known(lookup.name, chain.known)):
            return lookup, name
    return lookups[0], ""


@dataclass(frozen=True, slots=True)
class Doc:
    """A passage that was shown: as which number, and what of it, with its title and without."""

    rank: int
    passage: Passage
    whole: str
    text: str

    @classmethod
    def shown_of(cls, search: Search) -> list[Doc]:
        """The passages that the model is shown of a search."""
        docs = []
        pairs = zip(search.shown_hits, search.shown_texts, strict=True)
        for rank, (hit, excerpt) in enumerate(pairs, start=1):
            text = excerpt.removeprefix(hit.passage.heading).lstrip(") ").strip()
            docs.append(cls(rank, hit.passage, f"{hit.passage.title}\n{text}", text))
        return docs


@dataclass(slots=True)
class Chain:
    """A demonstration in the making: its turns, and what its searches showed.

    `lookups` are all that the question needs. `searches` were written down, with what is shown of them, and
    `docs` are the passages of these. `said` is what was read since the last search. `keeps_miss`: a search
    that missed is kept, once.
    """

    question: Question
    search: SearchTool
    show: Callable[[Search], Search]
    max_searches: int
    rng: random.Random
    keeps_miss: bool
    lookups: Sequence[Lookup]
    turns: list[str] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    docs: list[Doc] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def queries(self) -> list[str]:
        return [search.query for search in self.searches]

    @property
    def known(self) -> list[str]:
        """The texts whose words a query may use: the question, and what was shown."""
        return [self.question.text, *(doc.whole for doc in self.docs)]

    def seen(self, lookup: Lookup) -> Doc | None:
        """The passage of `lookup` if it was shown, last time."""
        return next((doc for doc in reversed(self.docs) if lookup.is_in(doc.passage, doc.whole)), None)

    async def find(self, lookup: Lookup, name: str) -> Doc:
        """The passage of `lookup`, asked for by `name`; without a search if it was shown.

        One wording after the other is tried until one brings the passage, which is written down. A first one
        that missed is kept, if asked for, it brings no other gold passage, and a search is left for each that
        is wanted. Raises NoDemonstration.
        """
        if (doc := self.seen(lookup)) is not None:
            return doc
        misses: dict[str, Search] = {}
        for query in self.wordings(lookup, name):
            if query in self.queries or query in misses:
                continue
            outcome = await self.search.search(query)
            if outcome.is_fault:
                raise SearchFailedError(f"{outcome.status}: {outcome.error}")
            if not any(lookup.is_in(doc.passage, doc.whole) for doc in Doc.shown_of(self.show(outcome))):
                misses[query] = outcome
                continue
            missed = next(iter(misses.values()), None)
            remaining = [each for each in self.lookups if self.seen(each) is None]
            room = len(self.searches) + len(remaining) < self.max_searches
            if self.keeps_miss and missed and room and not _brings(missed, remaining):
                self._write(self.show(missed))
                self.said, self.keeps_miss = [texts.missed(self.rng)], False
            self._write(self.show(outcome))
            break
        if (doc := self.seen(lookup)) is None:
            raise NoDemonstration("no wording brings a passage")
        return doc

    def _write(self, search: Search) -> None:
        if len(self.searches) == self.max_searches:
            raise NoDemonstration("more searches than an episode has")
        self.turns.append(turn_text(self._thought(), "search", escape(search.query)))
        self.searches.append(search)
        self.docs += Doc.shown_of(search)

    def _thought(self) -> str:
        thought, self.said = " ".join(self.said), []
        if len(thought.split()) > THOUGHT_WORDS:
            raise NoDemonstration("a thought that is too long")
        return escape(thought)

    def wordings(self, lookup: Lookup, name: str) -> Iterator[str]:
        """The queries to try, in order, all of known words.

        First the subquestion, or the name with and without the relation, or the question and its content
        words in either order. Then the title of the passage, if a known text names it: with the relation,
        alone, with the question's words. Last the question's words. Where a miss is to be kept, the first
        query has the names of the question only.
        """
        question, vocabulary = self.question.text.strip().rstrip("?").strip(), self.known
        content = texts.content_words(question)
        relation = " ".join(texts.known_words(lookup.relation, vocabulary))
        queries: list[str] = []
        if self.keeps_miss and not self.searches:
            queries.append(texts.names_in(question))
        if lookup.subquestion:
            words = texts.known_words(name, vocabulary)
            queries += [name] * (words == texts.words_of(name)) + [texts.content_words(" ".join(words))]
        elif name:
            queries += [f"{name} {relation}".strip(), name]
        else:
            queries += self.rng.sample([content, question], 2)
        if lookup.title and (title := texts.as_known(lookup.name, vocabulary)):
            other_words = " ".join(word for word in content.split() if word not in title.split())
            queries += [f"{title} {relation}".strip(), title, f"{title} {other_words}".strip()]
        yield from dict.fromkeys(query for query in [*queries, content, question] if query)

    def quote(self, lookup: Lookup, doc: Doc, value: str) -> None:
        """Say what the passage says, in its words around `value`."""
        question, sentences = self.question.text, texts.sentences(doc.text)
        supporting = [sentence for sentence in lookup.sentences if sentence in doc.text]
        best = texts.best_sentence(supporting, question, value)
        best = best or texts.best_sentence(sentences, question, value)
        if best is None:
            best, value = texts.best_sentence(sentences, question, "") or doc.text, ""
        self.said.append(texts.quotes(texts.excerpt(best, question, value), doc.rank, self.rng))

    def answer(self, text: str, doc: Doc | None = None) -> None:
        """The last turn, which names the passage that has the answer."""
        self.said += [f"Doc {doc.rank} says it."] if doc else []
        self.turns.append(turn_text(self._thought(), "answer", escape(text)))

    def accepted(self, passages: Sequence[str]) -> str:
        """A golden answer that stands in a shown text, in the text's case. Raises NoDemonstration."""
        answers = [
            (gold, text[slice(*span)])
            for gold in self.question.golden_answers
            for text in passages
            if (span := find_text(gold, text)) is not None and exact_match(text[slice(*span)], [gold])
        ]
        if not answers:
            raise NoDemonstration("the passages do not have the answer")
        same = (wording for gold, wording in answers if wording.casefold() == gold.casefold())
        return next(same, answers[0][0]).rstrip(",;: ")


def _brings(search: Search, lookups: Sequence[Lookup]) -> bool:
    hits = [hit.passage for hit in search.hits]
    return any(lookup.is_in(passage, passage.contents) for lookup in lookups for passage in hits)
