"""Record and replay: a run repeats from its cassette alone, which survives a kill and is of one kind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scripted_search import Scripted, ask, hit, ok
from tests.scripts import rollout
from tests.tiny_models import byte_level_tokenizer

from srl.errors import UserError
from srl.index.retriever import Fault
from srl.protocol import TEMPLATES
from srl.rollout.codec import Codec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.episode import EpisodeOptions
from srl.serve import LocalSearch
from srl.serve.cassette import MissingFromCassette, Recorder, Replay, read_cassette
from srl.trajectory import Hit, Passage, Question, Search, Trajectory, current_episode


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


QUESTIONS = [Question(f"q/{number}", f"Who is number {number}?", ("nobody",)) for number in range(4)]


class Sick:
    """An index that finds something else each time, and is too slow for some queries at first."""

    digest = "s" * 32

    def __init__(self) -> None:
        self.asked: list[str] = []

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        raise NotImplementedError

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        return [self.outcome(query, k) for query in queries]

    def outcome(self, query: str, k: int) -> list[Hit] | Fault:
        self.asked.append(query)
        if query.endswith("/0") and self.asked.count(query) == 1:
            return Fault("timed_out", "no answer within 3 s")
        return [hit(f"{query} as number {len(self.asked)}", 1 / 3)] * k


def say(request: str, turn: int) -> str:
    """Two searches, of which the first is the same in all episodes, then an answer."""
    if turn == 0:
        return "<search>who is who</search>"
    return f"<search>{request.rpartition('/')[0]}</search>" if turn == 1 else "<answer>nobody</answer>"


def episodes(codec: Codec, search: Any, script: Any = say) -> list[Trajectory]:
    return asyncio.run(
        rollout(
            QUESTIONS, ScriptedEngine(codec, script), search, codec=codec, template=TEMPLATES["search-r1"],
            options=EpisodeOptions(max_turn_tokens=200), n=2,
        )
    )  # fmt: skip


def test_episodes_repeat_from_the_cassette_alone_faults_and_all_and_ask_nothing_else(tmp_path):
    codec = Codec(byte_level_tokenizer())
    recorded = episodes(codec, Recorder(LocalSearch(Sick(), 2), tmp_path / "t", topk=2))
    assert episodes(codec, Replay(tmp_path / "t", topk=2)) == recorded
    assert {search.status for one in recorded for search in one.searches} == {"ok"}
    assert [one.attempt for one in recorded] == [1, 0] * 4
    done: list[str] = []

    def other(request: str, turn: int) -> str:
        done.append(request)
        return "<search>what else</search>"

    with pytest.raises(MissingFromCassette):
        episodes(codec, Replay(tmp_path / "t"), other)
    assert not any(request.endswith("/1") for request in done), "no episode is sampled again"


# The file


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
        with pytest.raises(UserError) as raised:
            make()
        assert "\n" not in str(raised.value)
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
