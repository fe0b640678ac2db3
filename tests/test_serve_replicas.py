"""Several processes behind one port: who gets a connection, what happens when one ends, what all say.

The replicas here are scripts that speak the link's language and nothing else; those of
tests/test_serve_replicas_real.py are real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from srl.cli import main
from srl.errors import UserError
from srl.index import Index, build_index, open_index
from srl.serve.server import bind, default_threads, replicas
from srl.serve.server.app import IndexSource, ServerSettings
from srl.serve.server.replica_messages import MessageChannel, whole_health, whole_metrics
from srl.serve.server.replicas import Replica, _Supervisor
from srl.serve.wire import Limits
from srl.trajectory import Passage

READY = """
import json, os, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
told = json.loads(link.recv(65536))
def say(**message):
    link.send(json.dumps({**message, "sockets": 0}).encode() + b"\\n")
def given():
    text, (number, *_), _, _ = socket.recv_fds(link, 65536, 9)
    return socket.socket(fileno=number)
say(ready={"i": {"digest": "d1"}})
"""
GREETS = (
    READY
    + """
kept = []
while True:
    kept.append(given())
    kept[-1].sendall(b"%d %d;" % (told["replica"], os.getpid()))
"""
)
ENDS_WHEN_GREETED = READY + "given(); sys.exit(7)"
"""What a replica does, each a program of its own."""


def office(count: int, ready: Callable[..., None] = lambda *_: None) -> tuple[_Supervisor, list[str]]:
    """What hands connections out to `count` replicas, at a port of its own, and the notes it makes."""
    notes: list[str] = []
    listener = bind(port=0)
    listener.listen()
    return _Supervisor(ServerSettings({"i": IndexSource("DIR")}), count, listener, ready, notes.append), notes


def serve(count: int, clients: Callable[..., Awaitable[object]]) -> tuple[object, list[Replica], list[str]]:
    """What the clients saw, once all replicas were ready; the replicas afterwards, and the notes."""

    async def run() -> tuple[object, list[Replica], list[str]]:
        begun = asyncio.Event()
        here, notes = office(count, lambda *_: begun.set())
        address = here._listener.getsockname()
        serving = asyncio.create_task(here.run())
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        try:
            if serving.done():
                waiting.cancel()
                serving.result()
            seen = asyncio.create_task(clients(*address))
            await asyncio.wait([serving, seen], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                seen.cancel()
                serving.result()
            return await seen, here._replicas, notes
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert all(one.process.returncode is not None for one in here._replicas if one.process)

    return asyncio.run(run())


async def greeting(host: str, port: int) -> str:
    """Who answers a connection, which stays open; another one where it went to a replica that had died."""
    while True:
        reader, _ = await asyncio.open_connection(host, port)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            return (await reader.readuntil(b";")).decode().strip(";")


@pytest.fixture
def greets(monkeypatch):
    monkeypatch.setattr(replicas, "COMMAND", GREETS)
    monkeypatch.setattr(replicas, "FIRST_REST_S", 0.0)


def test_each_connection_goes_to_the_replica_with_the_fewest(greets):
    async def six(host: str, port: int) -> list[str]:
        return [(await greeting(host, port)).split()[0] for _ in range(6)]

    seen, _, _ = serve(3, six)
    assert seen == ["1", "2", "3", "1", "2", "3"]


def test_a_replica_that_dies_is_said_and_started_again_and_the_others_answer_meanwhile(greets):
    async def kill_one(host: str, port: int) -> list[str]:
        first, pid = (await greeting(host, port)).split()
        assert first == "1"
        os.kill(int(pid), signal.SIGKILL)
        seen = [await greeting(host, port)]
        while not seen[-1].startswith("1 "):
            await asyncio.sleep(0.02)  # every connection stays open: there must not be thousands
            seen.append(await greeting(host, port))
        assert seen[-1] != f"1 {pid}"
        return seen

    seen, (one, two), notes = serve(2, kill_one)
    assert seen[0].startswith("2 ")
    assert (one.starts, two.starts) == (2, 1)
    assert notes == ["replica 1 of 2 was ended by SIGKILL, perhaps out of memory; restarting it in 0 s"]


def test_a_replica_that_ends_again_and_again_ends_the_server_in_one_line(monkeypatch):
    monkeypatch.setattr(replicas, "COMMAND", ENDS_WHEN_GREETED)
    monkeypatch.setattr(replicas, "FIRST_REST_S", 0.0)

    async def connect(host: str, port: int) -> None:
        while True:
            reader, writer = await asyncio.open_connection(host, port)
            await asyncio.gather(reader.read(), return_exceptions=True)
            writer.close()

    with pytest.raises(UserError) as caught:
        serve(1, connect)
    assert str(caught.value).startswith("replica 1 of 1 ended with exit code 7, 5 times in a row; ")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit(3)", "replica 1 of 1 ended with exit code 3"),
        ("import os; os.abort()", "replica 1 of 1 was ended by SIGABRT"),
        (READY.replace('say(ready={"i": {"digest": "d1"}})', 'say(error="no such index")'), "no such index"),
    ],
)
def test_what_cannot_serve_from_the_start_is_not_tried_again(monkeypatch, program, why):
    monkeypatch.setattr(replicas, "COMMAND", program)

    async def nobody(*_: object) -> None: ...

    with pytest.raises(UserError) as caught:
        serve(1, nobody)
    assert str(caught.value) == why


def test_a_replica_that_finds_another_index_is_not_let_in(monkeypatch):
    other = GREETS.replace('"d1"', '"d" + str(told["replica"])')
    monkeypatch.setattr(replicas, "COMMAND", other)

    async def nobody(*_: object) -> None: ...

    with pytest.raises(UserError, match=r"index at DIR has changed: expected digest d[12], found d[12]"):
        serve(2, nobody)


def test_connections_wait_where_no_replica_is_ready(greets):
    async def all_gone(host: str, port: int) -> str:
        _, pid = (await greeting(host, port)).split()
        os.kill(int(pid), signal.SIGKILL)
        return await greeting(host, port)

    seen, (one,), _ = serve(1, all_gone)
    assert seen.startswith("1 ")
    assert one.starts == 2


def test_a_link_carries_messages_and_sockets_in_their_order():
    link, theirs = MessageChannel.pair()
    other = MessageChannel(theirs)
    here, there = socket.socketpair()
    assert link.send({"a": 1})
    assert link.send({"b": "ž"}, [there, here])
    assert other.first() == {"a": 1}
    ((message, (first, second)),) = other.receive()
    assert message == {"b": "ž"}
    first.sendall(b"x")
    assert second.recv(1) == b"x"
    assert other.receive() == []
    link.close()
    with pytest.raises(EOFError):
        other.receive()
    assert not other.send({"c": 1})


def test_what_is_served_is_the_same_in_another_process():
    serving = ServerSettings(
        {"a": IndexSource("DIR", {"n_threads": 2})},
        5,
        Limits(queries=7),
        token="t",
        hosts=("a.test",),
        log_queries=True,
    )
    assert ServerSettings.read(json.loads(json.dumps(serving.as_json()))) == serving


def view(number: int, **more: object) -> dict[str, object]:
    return {"replica": number, "pid": 10 + number, "ready": True, "starts": 1, **more}


def health(waiting: int) -> dict[str, object]:
    return {"status": "ok", "waiting": waiting, "indexes": {"i": {"waiting": waiting}}}


def test_health_adds_up_what_waits_and_tells_which_replica_is_away():
    seen = [view(1), view(2), view(3), view(4, ready=False, starts=3)]
    whole = whole_health(2, health(1), seen, {1: json.dumps(health(4)).encode()})
    assert (whole["status"], whole["waiting"], whole["indexes"]["i"]["waiting"]) == ("degraded", 5, 5)
    assert [one["status"] for one in whole["replicas"]] == ["ok", "ok", "silent", "starting"]
    assert [one["waiting"] for one in whole["replicas"]] == [4, 1, 0, 0]
    alone = whole_health(1, health(0), [view(1)], {})
    assert alone["status"] == "ok"


def test_metrics_of_all_replicas_are_series_of_one_metric():
    text = (
        "# HELP n_total N.\n# TYPE n_total counter\n"
        'n_total{{index="a b"}} {0}\n# HELP g G.\n# TYPE g gauge\ng {0}\n'
    )
    whole = whole_metrics(
        2, text.format(2.0).encode(), [view(1), view(2), view(3, starts=4)], {1: text.format(1.0).encode()}
    )
    found = {family.name: family.samples for family in text_string_to_metric_families(whole.decode())}
    assert [(one.labels, one.value) for one in found["n"]] == [
        ({"replica": "1", "index": "a b"}, 1.0),
        ({"replica": "2", "index": "a b"}, 2.0),
    ]
    assert [one.labels for one in found["g"]] == [{"replica": "1"}, {"replica": "2"}]
    assert [one.value for one in found["srl_search_replica_up"]] == [1.0, 1.0, 0.0]
    assert [one.value for one in found["srl_search_replica_starts"]] == [1.0, 1.0, 4.0]
    assert whole.decode().count("# TYPE n_total") == 1


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    build_index([Passage("p", '"T"\nred fox')], directory)
    return open_index(directory)


def test_replicas_share_the_cores(index, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [default_threads(index, count) for count in (1, 2, 4, 8, 16)] == [4, 4, 2, 1, 1]


def test_replicas_of_nothing_or_none_are_one_line_and_exit_code_2(index, tmp_path, capsys):
    nowhere = ["serve", "retriever", "--index", str(tmp_path / "nowhere"), "--port", "0", "--replicas", "2"]
    assert main(nowhere) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["serve", "retriever", "--index", str(index.directory), "--replicas", "0"]) == 2
    err = capsys.readouterr().err
    assert "--replicas" in err
    assert len(err.splitlines()) == 1


def test_replicas_at_a_busy_port_are_one_line_and_exit_code_2(index, capsys):
    with bind(port=0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert (
            main(["serve", "retriever", "--index", str(index.directory), "--port", port, "--replicas", "2"])
            == 2
        )
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert len(err.splitlines()) == 1
