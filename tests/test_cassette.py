"""Record and replay: a run repeats from its cassette alone, and one that does not fit is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.scripted_search import Scripted, ask, hit, ok
from tests.tiny_models import byte_level_tokenizer

from srl.errors import EXIT_USER
from srl.index.retriever import Fault
from srl.protocol import TEMPLATES
from srl.rollout.codec import Codec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.episode import EpisodeOptions
from srl.rollout.many_episodes import rollout
from srl.serve import LocalSearch
from srl.serve.cassette import MissingFromCassette, Recorder, Replay
from srl.serve.named_retrievers import NamedRetrievers
from srl.trajectory import Hit, NamedSearchTool, Question, Search, Trajectory


def test_a_cassette_answers_as_the_search_did(tmp_path):
    outcomes = {
        "a": [ok("a", "one", "two", latency_s=0.1 + 0.2)],
        "b": [Search("b", (), "empty", index_digest="d" * 32)],
        "c": [Search("c", (), "timed_out", 30.0, 4, "no answer within 30 s")],
        "": [Search("", status="rejected", error="the query is empty", attempts=0)],
    }
    recorded = ask(Recorder(Scripted(**outcomes), tmp_path / "t"), *outcomes)
    replay = Replay(tmp_path / "t")
    assert ask(replay, *outcomes) == recorded == [found for (found,) in outcomes.values()]
    assert replay.index_digest == "d" * 32
    assert replay.digests == {"": "d" * 32}


def test_outcomes_of_one_query_come_in_order_and_the_last_again(tmp_path):
    outcomes = [Search("a", status="refused"), ok("a", "one"), ok("a", "two")]
    ask(Recorder(Scripted(a=outcomes), tmp_path / "t"), *"aaa")
    assert ask(Replay(tmp_path / "t"), *"aaaaa") == [*outcomes, outcomes[-1], outcomes[-1]]


def test_an_episode_gets_what_it_got_whatever_the_order(tmp_path):
    recorder = Recorder(Scripted(a=[ok("a", "one"), ok("a", "two"), ok("a", "three")]), tmp_path / "t")
    first = ask(recorder, "a", episode="train/0/q/0/0")
    second = ask(recorder, "a", "a", episode="train/0/q/1/0")
    replay = Replay(tmp_path / "t")
    assert ask(replay, "a", "a", episode="train/0/q/1/0") == second
    assert ask(replay, "a", episode="train/0/q/0/0") == first
    assert ask(replay, "a", "a", "a", episode="eval/0/another/0/0") == [*first, *second]


def test_a_query_that_is_not_on_the_cassette_is_the_users_mistake(tmp_path):
    ask(Recorder(Scripted(a=[ok("a")]), tmp_path / "t"), "a")
    with pytest.raises(MissingFromCassette) as raised:
        ask(Replay(tmp_path / "t"), "x" * 1000)
    message = str(raised.value)
    assert message.startswith(f"the cassette {tmp_path}/t has no answer to '{'x' * 40} … {'x' * 40}': ")
    assert "record again: --set 'search.cassette=record FILE'" in message
    assert "\n" not in message
    assert raised.value.exit_code == EXIT_USER


def test_closing_closes_the_search_and_another_query_opens_the_cassette_again(tmp_path):
    search = Scripted(a=[ok("a", "one")], b=[ok("b", "two")])
    recorder = Recorder(search, tmp_path / "t")
    ask(recorder, "a")
    ask(recorder, "b")
    assert search.closed == 2
    assert len(ask(Replay(tmp_path / "t"), "a", "b")) == 2


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


def test_retrievers_are_told_apart(tmp_path):
    several = NamedRetrievers(Scripted(a=[ok("a", "default")]), {"web": Scripted(a=[ok("a", "web")])})
    recorder = Recorder(several, tmp_path / "t")

    async def play(search: Recorder | Replay) -> list[Search]:
        found = [await search.search("a"), await search.search("a", "web"), await search.search("a", "no")]
        await search.aclose()
        return found

    recorded = asyncio.run(play(recorder))
    replay = Replay(tmp_path / "t")
    assert asyncio.run(play(replay)) == recorded
    assert [found.status for found in recorded] == ["ok", "ok", "rejected"]
    assert recorded[0].hits != recorded[1].hits
    assert isinstance(recorder, NamedSearchTool)
    assert isinstance(replay, NamedSearchTool)
    assert replay.retrievers == ("web",)
    assert replay.digests == {"": "d" * 32, "web": "d" * 32}


def test_a_cassette_of_one_retriever_knows_no_others(tmp_path):
    recorder = Recorder(Scripted(a=[ok("a")]), tmp_path / "t")
    ask(recorder, "a")
    assert not isinstance(recorder, NamedSearchTool)
    assert not isinstance(Replay(tmp_path / "t"), NamedSearchTool)


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


def test_episodes_repeat_from_the_cassette_alone_faults_and_all(tmp_path):
    codec = Codec(byte_level_tokenizer())
    recorded = episodes(codec, Recorder(LocalSearch(Sick(), 2), tmp_path / "t", topk=2))
    replayed = episodes(codec, Replay(tmp_path / "t", topk=2))
    assert replayed == recorded
    assert {search.status for one in recorded for search in one.searches} == {"ok"}
    assert [one.attempt for one in recorded] == [1, 0] * 4


def test_a_query_missing_from_the_cassette_ends_the_run_and_blames_no_episode(tmp_path):
    codec = Codec(byte_level_tokenizer())
    episodes(codec, Recorder(LocalSearch(Sick(), 2), tmp_path / "t"))
    done: list[str] = []

    def other(request: str, turn: int) -> str:
        done.append(request)
        return "<search>what else</search>"

    with pytest.raises(MissingFromCassette, match="has no answer to 'what else'"):
        episodes(codec, Replay(tmp_path / "t"), other)
    assert not any(request.endswith("/1") for request in done)  # no episode is sampled again
