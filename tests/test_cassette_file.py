"""The cassette as a file: killed, full, foreign, damaged, in use; and every outcome comes back from it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scripted_search import Scripted, ask, ok

from srl.errors import UserError
from srl.serve.cassette import (
    CassetteHeader,
    CassetteWriter,
    MissingFromCassette,
    Recorder,
    Replay,
    read_cassette,
)
from srl.trajectory import Hit, Passage, Search


def test_every_outcome_is_on_the_disk_before_the_next_query(tmp_path):
    recorder = Recorder(Scripted(a=[ok("a", "one")]), tmp_path / "t")
    asyncio.run(recorder.search("a"))
    assert ask(Replay(tmp_path / "t"), "a") == [ok("a", "one")]
    asyncio.run(recorder.aclose())


ENDLESS = """
import asyncio, itertools, sys
from srl.serve.cassette import Recorder
from srl.trajectory import Hit, Passage, Search

class Endless:
    index_digest = "d"

    async def search(self, query):
        return Search(query, (Hit(Passage(query, query * 1000), 1.0),))

async def main():
    search = Recorder(Endless(), sys.argv[1])
    for number in itertools.count():
        await search.search(str(number))
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_kill_loses_no_search_that_was_answered(tmp_path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answered = [int(process.stdout.readline()) for _ in range(50)]
        process.kill()
    found = ask(Replay(tmp_path / "t"), *map(str, answered))
    assert [len(search.hits[0].passage.contents) for search in found] == [
        1000 * len(str(number)) for number in range(50)
    ]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_left_out(tmp_path, cut):
    ask(Recorder(Scripted(a=[ok("a", "one")], b=[ok("b", "two")]), tmp_path / "t"), "a", "b")
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data[:-cut])
    replay = Replay(tmp_path / "t")
    assert ask(replay, "a") == [ok("a", "one")]
    with pytest.raises(MissingFromCassette):
        ask(replay, "b")


def test_a_cassette_is_not_overwritten(tmp_path):
    ask(Recorder(Scripted(a=[ok("a")]), tmp_path / "t"), "a")
    before = (tmp_path / "t").read_bytes()
    with pytest.raises(UserError, match="exists already; choose another name, or remove it first"):
        Recorder(Scripted(), tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == before


@pytest.mark.parametrize("left", [0, 5])
def test_a_run_killed_before_its_first_line_begins_its_cassette_anew(tmp_path, left):
    ask(Recorder(Scripted(a=[ok("a", "one")]), tmp_path / "t"), "a")
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:left])
    with pytest.raises(UserError, match=r"the cassette .* is empty"):
        Replay(tmp_path / "t")
    ask(Recorder(Scripted(a=[ok("a", "one")]), tmp_path / "t", append=True), "a")
    assert ask(Replay(tmp_path / "t"), "a") == [ok("a", "one")]


def test_a_cassette_goes_on_only_with_the_same_searches(tmp_path):
    search = Scripted(a=[ok("a")])
    ask(Recorder(search, tmp_path / "t", topk=3), "a")
    with pytest.raises(
        UserError, match="only be continued with the same searches: it was recorded with topk=3, not 5"
    ):
        Recorder(search, tmp_path / "t", topk=5, append=True)
    search.index_digest = "e" * 32
    with pytest.raises(UserError, match="expected the index with digest dddddddddddd, found eeeeeeeeeeee"):
        Recorder(search, tmp_path / "t", topk=3, append=True)
    with pytest.raises(UserError, match="was recorded with topk=3, not 5"):
        Replay(tmp_path / "t", topk=5)


def test_two_runs_do_not_record_on_one_cassette(tmp_path):
    first = Recorder(Scripted(a=[ok("a")]), tmp_path / "t")
    with pytest.raises(UserError, match="another run is recording to the cassette"):
        Recorder(Scripted(), tmp_path / "t", append=True)
    ask(first, "a")
    assert ask(Replay(tmp_path / "t"), "a") == [ok("a")]


def test_a_file_system_without_locks_is_good_enough(tmp_path, monkeypatch):
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    ask(Recorder(Scripted(a=[ok("a")]), tmp_path / "t"), "a")
    assert ask(Replay(tmp_path / "t"), "a") == [ok("a")]


def test_a_place_where_no_cassette_can_be_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the cassette .*file/t cannot be written: "):
        Recorder(Scripted(), tmp_path / "file" / "t")
    with pytest.raises(IsADirectoryError):
        Replay(tmp_path)
    with pytest.raises(
        UserError, match=r"there is no cassette .*/nowhere; record one: --set 'search.cassette=record"
    ):
        Replay(tmp_path / "nowhere")


def header(**changes: Any) -> str:
    plain = {
        "format": 1,
        "kind": "search cassette",
        "srl": "0",
        "topk": 3,
        "digests": {"": "d"},
        "retrievers": None,
    }
    return json.dumps({**plain, **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a letter\n", "is not a search cassette"),
        ("\x00\x01\n", "is not a search cassette"),
        ('{"query": "a"}\n', "is not a search cassette"),
        ("[1]\n", "is not a search cassette"),
        ("[" * 100_000 + "\n", "is not a search cassette"),
        (header(format=2) + "\n", "has format 2, this srl reads up to 1"),
        (header(digests=3) + "\n", "t:1: the cassette is damaged"),
        *(
            (header() + "\n" + line + "\n", "t:2: the cassette is damaged")
            for line in (
                "{",
                "3",
                "{}",
                '{"passage": 1, "id": "1", "contents": "c"}',
                '{"passage": 0, "id": 1, "contents": "c"}',
                '{"query": 3}',
                '{"query": "a", "hits": [[0, 1.0]]}',
                '{"query": "a", "hits": [[-1, 1.0]]}',
                '{"query": "a", "hits": 3}',
                '{"query": "a", "status": "fine"}',
                '{"query": "a", "attempts": "3"}',
                '{"query": "a", "retriever": []}',
                '{"session": "x"}',
            )
        ),
    ],
)
def test_what_is_no_cassette_is_refused_in_one_line(tmp_path, text, said):
    (tmp_path / "t").write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        Replay(tmp_path / "t")
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=said):
        Recorder(Scripted(), tmp_path / "t", append=True)
    assert (tmp_path / "t").read_text() == text


def test_a_full_disk_stops_the_run_in_one_line(tmp_path, monkeypatch):
    recorder = Recorder(Scripted(a=[ok("a")]), tmp_path / "t")
    with open("/dev/full", "ab", buffering=0) as full:
        monkeypatch.setattr(recorder._cassette, "_file", full)
        with pytest.raises(UserError, match=r"the cassette .*/t cannot be written: No space left on device"):
            asyncio.run(recorder.search("a"))


texts = st.text(st.characters(), max_size=20) | st.text('\ud800\udc00\n\r\u2028\x00a"\\', max_size=6)


searches = st.builds(
    Search,
    query=texts,
    hits=st.lists(
        st.builds(Hit, st.builds(Passage, texts, texts), st.floats(allow_nan=False)), max_size=4
    ).map(tuple),
    status=st.sampled_from(["ok", "empty", "rejected", "timed_out", "refused", "failed"]),
    latency_s=st.floats(0, allow_nan=False),
    attempts=st.integers(0),
    error=texts,
    index_digest=st.sampled_from(["", "d", "e"]),
    retriever=st.sampled_from(["", "web"]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(searches, texts), max_size=5))
def test_every_outcome_comes_back_as_it_was(tmp_path_factory, recorded):
    path = tmp_path_factory.mktemp("cassette") / "t"
    writer = CassetteWriter(path, CassetteHeader(3, {"": "d", "web": "e"}, ("web",)))
    for search, episode in recorded:
        writer.write(search, episode)
    writer.close()
    cassette = read_cassette(path)
    assert cassette is not None
    assert [(entry.search, entry.episode) for entry in cassette.searches] == recorded
    assert cassette.length == path.stat().st_size


def test_a_passage_is_on_the_cassette_once(tmp_path):
    text = "a long passage " * 100
    recorder = Recorder(Scripted(a=[ok("a", text)], b=[ok("b", text, "other")]), tmp_path / "t")
    ask(recorder, *"aabbaabb")
    assert (tmp_path / "t").read_text().count(text) == 3  # in its id, its title and its text
    assert len((tmp_path / "t").read_text().splitlines()) == 1 + 2 + 8
