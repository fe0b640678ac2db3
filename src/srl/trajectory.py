"""The types that all stages share: question, passage, hit, search, segment, trajectory, score."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

SegmentKind = Literal["prompt", "policy", "observation", "feedback"]
SearchStatus = Literal["ok", "empty", "rejected", "timed_out", "refused", "failed"]
ShownAs = Literal["whole", "part", "none"]
EndReason = Literal["answered", "unanswered", "truncated", "failed"]
Phase = Literal["train", "val", "test", "sft", "eval"]

current_episode: ContextVar[str] = ContextVar("current_episode", default="")
"""The episode that runs in this task, `phase/step/question/sample/attempt`; searches are recorded with it."""

FAULTS: frozenset[str] = frozenset({"timed_out", "refused", "failed"})
"""Search statuses that are failures of the infrastructure, not of the policy."""
REWARD_FAULT = "reward "
"""How `Trajectory.error` begins where a reward gave no score."""
_PART = re.compile(r"(.+)#[1-9][0-9]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its golden answers.

    `id` is unique across data sets; the trajectories of one question are a group.
    `prompt` holds chat messages (`{"role", "content"}`), rendered by a template of `srl.protocol`.
    """

    id: str
    text: str
    golden_answers: tuple[str, ...]
    data_source: str = "unknown"
    split: str = "train"
    prompt: tuple[Mapping[str, str], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hops(self) -> int | None:
        """The hops that the question needs, which pandas may have made 2.0 or a file may have as text; None
        for anything but a whole number from 0 up."""
        hops = self.metadata.get("hops")
        if (isinstance(hops, float) and hops.is_integer()) or (isinstance(hops, str) and hops.isdecimal()):
            hops = int(hops)
        return hops if type(hops) is int and 0 <= hops < 2**31 else None


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus; the first line of `contents` is its (quoted) title, `url` where it is from."""

    id: str
    contents: str
    url: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Passage:
        """The passage of a row, as `row` has it. Raises KeyError."""
        return cls(row["id"], row["contents"], row.get("url") or "")

    def row(self) -> dict[str, str]:
        """`{"id", "contents"}`, with a `url` where there is one, as in a corpus and in an answer."""
        return {"id": self.id, "contents": self.contents} | ({"url": self.url} if self.url else {})

    @property
    def document(self) -> str:
        """The id of the document that it is of: `ID` for the parts `ID#1`, `ID#2`, …, else its own."""
        part = _PART.fullmatch(self.id)
        return part[1] if part else self.id

    @property
    def heading(self) -> str:
        """The first line as written, with its quotation marks."""
        return self.contents.partition("\n")[0].strip()

    @property
    def title(self) -> str:
        return self.heading.strip('"')

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2]


def contents_of(title: str, text: str) -> str:
    """A passage's contents: `"Title"` on the first line, then the text."""
    return f'"{title}"\n{text.strip()}'


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a retriever returned, with the retriever's score."""

    passage: Passage
    score: float


@dataclass(frozen=True, slots=True)
class Search:
    """One call of a tool, mostly a search, and how it went. `latency_s` includes retries.

    `arguments` are those of the call, as JSON; where they could not be read, what was written. `retriever` is
    the name that the policy asked by; empty where it asked the default. The episode sets `turn`, and what
    reached the policy: the first `shown` of `hits` (None: not known, taken for all), the others did not fit.
    `cut`: what was shown of the only one, in whole words, where its middle was left out.
    """

    query: str
    hits: tuple[Hit, ...] = ()
    status: SearchStatus = "ok"
    latency_s: float = 0.0
    attempts: int = 1
    error: str = ""
    index_digest: str = ""
    turn: int = 0
    retriever: str = ""
    shown: int | None = None
    cut: str | None = None
    tool: str = "search"
    arguments: str = ""

    @property
    def shown_hits(self) -> tuple[Hit, ...]:
        """The hits that reached the policy, whole or in part."""
        return self.hits[: self.shown]

    @property
    def shown_texts(self) -> tuple[str, ...]:
        """What the policy was shown of each of `shown_hits`."""
        return (self.cut,) if self.cut is not None else tuple(hit.passage.contents for hit in self.shown_hits)

    def shown_as(self, rank: int) -> ShownAs | None:
        """How the hit at `rank` (from 1) reached the policy; None if it is not known."""
        if self.shown is None:
            return None
        if rank > self.shown:
            return "none"
        return "whole" if self.cut is None else "part"

    @property
    def is_fault(self) -> bool:
        return self.status in FAULTS


def returned(query: str, *texts: str) -> Search:
    """What a tool other than a search returned to the call `query`, as texts; none: it found nothing."""
    hits = tuple(Hit(Passage("", text), 0.0) for text in texts)
    return Search(query, hits, "ok" if hits else "empty")


def rejected(query: str, error: str) -> Search:
    """The outcome of a call that is a mistake of the policy, which reads `error`."""
    return Search(query, status="rejected", error=error, attempts=0)


class SearchTool(Protocol):
    """What an episode may call to search. `search` returns an outcome for every query and never raises."""

    async def search(self, query: str) -> Search: ...


@runtime_checkable
class NamedSearchTool(Protocol):
    """A search tool with several retrievers: the default one, called "", and those named in `retrievers`."""

    @property
    def retrievers(self) -> Sequence[str]: ...

    async def search(self, query: str, retriever: str = "") -> Search: ...


@runtime_checkable
class DocumentTool(Protocol):
    """A search tool that also has the whole documents of the passages that it returns."""

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        """The passages of the document of `passage`, in order, which `retriever` returned; never raises."""
        ...

    async def lacks_documents(self) -> str:
        """Why it has no documents after all; empty if it has."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens with one author.

    Only a policy segment has `logprobs`, one for each token: those of the sampler at its temperature, before
    top-p.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    text: str
    turn: int
    logprobs: tuple[float, ...] = ()

    @property
    def is_policy(self) -> bool:
        return self.kind == "policy"


@dataclass(slots=True)
class Trajectory:
    """Everything that happened in one episode: the prompt, then policy and environment by turns."""

    question: Question
    segments: list[Segment] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    end: EndReason = "unanswered"
    answer: str | None = None
    sample: int = 0
    step: int = 0
    phase: Phase = "train"
    valid_actions: int = 0
    valid_searches: int = 0
    attempt: int = 0
    think_is_open: bool = False
    """Whether the rendered prompt ends inside `<think>`, so the policy need not open it."""
    protocol: str = "tags"
    """How policy and tools talked: `tags`, or the format of the model's own calls."""
    malformed: int = 0
    """Calls that were not executed, since they could not be read or their tool does not take them."""
    error: str = ""
    """Why the engine did not generate the next turn, or why a reward gave no score, where that made the
    episode fail."""
    seconds: float | None = field(default=None, compare=False)
    """How long the episode took, beside those that ran at the same time; None if not known."""

    @property
    def id(self) -> str:
        """Twelve hex digits, the same for the same (phase, step, question, sample) in every run."""
        key = f"{self.phase}\0{self.step}\0{self.question.id}\0{self.sample}"
        return blake2b(key.encode(), digest_size=6).hexdigest()

    @property
    def valid(self) -> bool:
        """False if a search or the engine failed: such an episode is logged and kept out of the loss."""
        return self.end != "failed"

    @property
    def fault(self) -> str:
        """What made the episode fail, in one line; empty if nothing did."""
        fault = next((search for search in self.searches if search.is_fault), None)
        if self.error or self.valid or fault is None:
            return self.error
        return f"{fault.status}: {fault.error}"

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def response_mask(self) -> list[int]:
        """1 on tokens that the policy wrote, 0 on all others; as long as `token_ids`."""
        return [int(segment.is_policy) for segment in self.segments for _ in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Sampler log-probs, 0.0 on tokens the policy did not write; as long as `token_ids`."""
        out: list[float] = []
        for segment in self.segments:
            out.extend(segment.logprobs if segment.is_policy else [0.0] * len(segment.token_ids))
        return out

    @property
    def policy_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.is_policy)

    @property
    def turn_ends(self) -> list[int]:
        """The index in `token_ids` of the last token of each policy segment."""
        ends = accumulate(len(segment.token_ids) for segment in self.segments)
        return [end - 1 for end, segment in zip(ends, self.segments, strict=True) if segment.is_policy]

    @property
    def turns(self) -> int:
        """How many times the policy was asked to generate (Search-R1's number of actions)."""
        return sum(segment.is_policy for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one trajectory, its parts before weights, and its share for each turn where known.

    `error` says in one line why there is no score; an episode without one is not trained on.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    per_turn: tuple[float, ...] | None = None
    error: str = ""


class FailedEpisodes(NamedTuple):
    """How many of `episodes` failed, the first `fault` (empty without one), and `what` had it."""

    failed: int
    episodes: int
    fault: str
    what: str = "search"


def failed_episodes(trajectories: Sequence[Trajectory]) -> FailedEpisodes:
    """The episodes of `trajectories` that are not valid, counted."""
    failed = [trajectory for trajectory in trajectories if not trajectory.valid]
    first = next((trajectory for trajectory in failed if trajectory.fault), None)
    fault = first.fault if first else ""
    what = "the engine" if first and first.error else "search"
    if fault.startswith(REWARD_FAULT):
        what = "the reward"
    return FailedEpisodes(len(failed), len(trajectories), fault, what)
