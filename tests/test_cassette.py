"""Record and replay: a run repeats from its cassette alone, which survives a kill and is of one kind."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl.errors import UserError
from srl.serve.cassette import MissingFromCassette, Recorder, Replay, read_cassette
from srl.serve.named_retrievers import aclose
from srl.trajectory import Hit, Passage, Search, current_episode


class Scripted:
    """Answers from a list of outcomes for each query, one after the other, the last for ever."""

    def __init__(self, **outcomes: Sequence[Search]) -> None:
        self.outcomes = {query: list(found) for query, found in outcomes.items()}
        self.index_digest = "d" * 32
        self.closed = 0

    async def search(self, query: str) -> Search:
        found = self.outcomes[query]
        return found.pop(0) if len(found) > 1 else found[0]

    async def aclose(self) -> None:
        self.closed += 1


def hit(text: str, score: float = 1.0) -> Hit:
    return Hit(Passage(text, f'"{text}"\n{text}'), score)


def ok(query: str, *texts: str, **fields: Any) -> Search:
    return Search(query, tuple(hit(text) for text in texts), index_digest="d" * 32, **fields)


def ask(search: Recorder | Replay, *queries: str, episode: str = "") -> list[Search]:
    async def in_turn() -> list[Search]:
        current_episode.set(episode)
        try:
            return [await search.search(query) for query in queries]
        finally:
            await aclose(search)

    return asyncio.run(in_turn())


def test_an_episode_gets_what_it_got_whatever_the_order(tmp_path):
    recorder = Recorder(Scripted(a=[ok("a", "one"), ok("a", "two"), ok("a", "three")]), tmp_path / "t")
    first = ask(recorder, "a", episode="train/0/q/0/0")
    second = ask(recorder, "a", "a", episode="train/0/q/1/0")
    replay = Replay(tmp_path / "t")
    assert ask(replay, "a", "a", episode="train/0/q/1/0") == second
    assert ask(replay, "a", episode="train/0/q/0/0") == first
    assert ask(replay, "a", "a", "a", episode="eval/0/another/0/0") == [*first, *second]


@pytest.mark.parametrize("torn", [0, 1, 9])
def test_a_resumed_run_goes_on_with_its_cassette(tmp_path, torn):
    path = tmp_path / "t"
    lost = Scripted(a=[ok("a", "one")], b=[Search("b", status="failed")])
    ask(Recorder(lost, path, topk=3), "a", "b", episode="train/1/q/0/0")
    path.write_bytes(path.read_bytes()[: -torn or None])
    again = Scripted(a=[ok("a", "one")], b=[ok("b", "one", "two")])
    ask(Recorder(again, path, topk=3, append=True), "a", "b", episode="train/1/q/0/0")

    replay = Replay(path, topk=3)
    found = ask(replay, "a", "b", "b", episode="train/1/q/0/0")
    assert found == [ok("a", "one"), ok("b", "one", "two"), ok("b", "one", "two")]


def test_what_was_not_recorded_is_missing(tmp_path):
    ask(Recorder(Scripted(a=[ok("a", "one")]), tmp_path / "t"), "a")
    with pytest.raises(MissingFromCassette):
        ask(Replay(tmp_path / "t"), "what else")


def test_a_cassette_is_not_overwritten_and_goes_on_only_with_the_same_searches(tmp_path):
    search = Scripted(a=[ok("a")])
    ask(Recorder(search, tmp_path / "t", topk=3), "a")
    before = (tmp_path / "t").read_bytes()

    def mistake(make: Any, *given: Any, **options: Any) -> str | None:
        with pytest.raises(UserError) as raised:
            make(*given, **options)
        assert (tmp_path / "t").read_bytes() == before
        return raised.value.key

    assert mistake(Recorder, search, tmp_path / "t", topk=3) == "search.cassette"
    assert mistake(Recorder, search, tmp_path / "t", topk=5, append=True) == "search.topk"
    assert mistake(Replay, tmp_path / "t", topk=5) == "search.topk"
    search.index_digest = "e" * 32
    assert mistake(Recorder, search, tmp_path / "t", topk=3, append=True) == "search.cassette"


def header(**changes: Any) -> str:
    plain = {"format": 1, "kind": "search cassette", "srl": "0", "topk": 3}
    return json.dumps({**plain, "digests": {"": "d"}, "retrievers": None, **changes})


BAD_LINES = (
    "{", "3", "{}", '{"passage": 0}', '{"query": "a", "hits": [[0, 1.0]]}', '{"query": "a", "hits": 3}',
    '{"query": "a", "colour": "red"}', '{"session": "x"}',
)  # fmt: skip
NO_HEADERS = ("a letter", "\x00\x01", '{"query": "a"}', "[1]", "[" * 100_000)


@pytest.mark.parametrize(
    "text", [*NO_HEADERS, header(format=2), header(digests=3), *(f"{header()}\n{line}" for line in BAD_LINES)]
)
def test_what_is_no_cassette_is_refused_in_one_line_and_left_alone(tmp_path, text):
    (tmp_path / "t").write_text(text + "\n")
    for make in (lambda: Replay(tmp_path / "t"), lambda: Recorder(Scripted(), tmp_path / "t", append=True)):
        with pytest.raises(UserError):
            make()
    assert (tmp_path / "t").read_text() == text + "\n"


texts = st.text(st.characters(), max_size=20) | st.text('\ud800\udc00\n\r\u2028\x00a"\\', max_size=6)
passages = st.builds(Passage, texts, texts, st.sampled_from(["", "http://a"]))
searches = st.builds(
    Search,
    query=texts,
    hits=st.lists(st.builds(Hit, passages, st.floats(allow_nan=False)), max_size=4).map(tuple),
    status=st.sampled_from(["ok", "empty", "rejected", "timed_out", "refused", "failed"]),
    latency_s=st.floats(0, allow_nan=False),
    attempts=st.integers(0),
    error=texts,
    index_digest=st.sampled_from(["", "d", "e"]),
    retriever=st.sampled_from(["", "web"]),
)


class Next:
    """A search tool with the outcome that is put into it."""

    retrievers = ("web",)
    outcome: Search

    @property
    def digests(self) -> dict[str, str]:
        return {"": "d", "web": "e"}

    async def search(self, query: str, retriever: str = "") -> Search:
        return self.outcome


@given(st.lists(st.tuples(searches, texts), max_size=5))
def test_every_outcome_comes_back_as_it_was(tmp_path_factory, recorded):
    path = tmp_path_factory.mktemp("cassette") / "t"
    tool = Next()
    recorder = Recorder(tool, path, topk=3)

    async def record() -> None:
        for tool.outcome, episode in recorded:
            current_episode.set(episode)
            await recorder.search(tool.outcome.query, tool.outcome.retriever)

    asyncio.run(record())
    cassette = read_cassette(path)
    assert cassette is not None
    assert [(search, episode) for _, episode, search in cassette.searches] == recorded
    assert cassette.length == path.stat().st_size
