"""`srl index pull` against a stand-in of the hub."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import namedtuple
from hashlib import sha256
from pathlib import Path

import pytest
from tests.hub import COMMIT, Hub, serving

from srl.cli import main
from srl.data.corpus import read_corpus
from srl.errors import UserError
from srl.index import pull as download
from srl.index.pull import plan_pull, run_pull

pytest.importorskip("huggingface_hub")

E5 = "PeterJinGo/wiki-18-e5-index"
PARTS = {"part_aa": os.urandom(300_000), "part_ab": os.urandom(200_001)}
WHOLE = PARTS["part_aa"] + PARTS["part_ab"]
ROWS = [{"id": str(n), "contents": f'"Title {n}"\ntext {n}'} for n in range(5)]


_HELD = 20_000
"""Bytes that may have been sent and not be in the file yet."""


def _corpus() -> bytes:
    """The corpus as it is published: a tar archive inside, whatever the name says."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("data00/dump.jsonl")
        member.size = len(lines)
        archive.addfile(member, io.BytesIO(lines))
    return packed.getvalue()


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    lucene = {"bm25/segments_2": b"small", "bm25/_0.fdt": os.urandom(1000), ".gitattributes": b"x"}
    repositories = {E5: {**PARTS, "README.md": b"#"}, "PeterJinGo/wiki-18-bm25-index": lucene}
    repositories["PeterJinGo/wiki-18-corpus"] = {"wiki-18.jsonl.gz": _corpus()}
    with serving(Hub(repositories)) as running:
        yield running


def get(hub: Hub, out: Path, name: str = "wiki18-e5", revision: str | None = None) -> Path:
    return run_pull(plan_pull(name, out, revision, hub.url))


def test_parts_are_joined_as_they_arrive_and_nothing_else_stays(hub, tmp_path):
    out = get(hub, tmp_path / "e5")
    assert (out / "e5_Flat.index").read_bytes() == WHOLE
    assert sorted(path.name for path in out.iterdir()) == ["e5_Flat.index", "manifest.json"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["revision"] == COMMIT
    assert manifest["digests"] == {name: sha256(data).hexdigest() for name, data in PARTS.items()}


def test_the_corpus_is_read_as_it_is_published(hub, tmp_path):
    out = get(hub, tmp_path / "corpus", "wiki18-corpus")
    found = [{"id": each.id, "contents": each.contents} for each in read_corpus(out / "wiki-18.jsonl.gz")]
    assert found == ROWS


def test_broken_connections_resume_where_they_broke(hub, tmp_path):
    hub.breaks_after = {"part_aa": [100_000, 50_000], "part_ab": [7]}
    assert (get(hub, tmp_path / "e5") / "e5_Flat.index").read_bytes() == WHOLE
    aa = [asked for name, asked in hub.ranges if name == "part_aa"]
    assert aa == ["bytes=0-", "bytes=100000-", "bytes=150000-"]


def test_a_busy_hub_is_asked_again_and_a_dead_one_given_up(hub, tmp_path):
    hub.statuses = [503, 429, 500]
    assert (get(hub, tmp_path / "e5") / "e5_Flat.index").read_bytes() == WHOLE
    hub.statuses = [503] * 6
    with pytest.raises(UserError, match=r"part_aa.*503"):
        get(hub, tmp_path / "other")


def test_the_token_stays_with_the_hub(hub, tmp_path):
    get(hub, tmp_path / "e5")
    given = {path.partition("/PeterJinGo")[0]: token for path, token in hub.tokens}
    assert given["/datasets"] == "Bearer hf_secret"
    assert given["/files/datasets"] == ""


def test_a_wrong_digest_throws_the_part_away_and_keeps_the_others(hub, tmp_path):
    hub.sent_instead = {"part_ab": b"x" * len(PARTS["part_ab"])}
    with pytest.raises(UserError, match="part_ab"):
        get(hub, tmp_path / "e5")
    assert (tmp_path / "e5/e5_Flat.index.partial").read_bytes() == PARTS["part_aa"]
    hub.sent_instead, hub.ranges = {}, []
    assert (get(hub, tmp_path / "e5") / "e5_Flat.index").read_bytes() == WHOLE
    assert {name for name, _ in hub.ranges} == {"part_ab"}


def test_a_disk_too_small_is_noticed_before_anything_is_written(hub, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, len(WHOLE) - 1))
    with pytest.raises(UserError, match=r"0\.5 MB"):
        get(hub, tmp_path / "e5")
    assert not (tmp_path / "e5").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, len(WHOLE)))
    assert plan_pull("wiki18-e5", tmp_path / "e5", endpoint=hub.url).missing == len(WHOLE)


def test_one_directory_holds_one_thing_at_one_revision(hub, tmp_path):
    out = get(hub, tmp_path / "e5")
    with pytest.raises(UserError, match="wiki18-e5"):
        get(hub, out, "wiki18-bm25")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"revision": "f" * 40}))
    with pytest.raises(UserError, match="f" * 12):
        get(hub, out, revision=COMMIT)
    with pytest.raises(UserError, match="v9"):
        get(hub, tmp_path / "other", revision="v9")


def test_a_hub_out_of_reach_or_unknown_is_one_line(tmp_path, hub, monkeypatch):
    with pytest.raises(UserError, match="PeterJinGo/wiki-18-e5-index"):
        plan_pull("wiki18-e5", tmp_path / "e5", endpoint="http://127.0.0.1:9")
    hub.repositories.clear()
    with pytest.raises(UserError, match="PeterJinGo/wiki-18-e5-index"):
        plan_pull("wiki18-e5", tmp_path / "e5", endpoint=hub.url)
    with pytest.raises(UserError, match="wiki18-e5"):
        plan_pull("wiki18", tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"\[hub\]'"):
        plan_pull("wiki18-e5", tmp_path / "e5")


def test_the_command_says_what_it_takes_and_what_to_type_next(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    out = tmp_path / "e5"
    assert main(["index", "pull", "wiki18-e5", "--out", str(out)]) == 0
    found = capsys.readouterr()
    assert found.out == f"{out}/e5_Flat.index\n"
    assert f"srl index import {out}/e5_Flat.index --retriever e5" in found.err
    assert "hf_secret" not in found.err


@pytest.mark.parametrize(
    ("part", "sent", "how", "code"),
    [("part_aa", 123_456, signal.SIGKILL, -signal.SIGKILL), ("part_ab", 100_000, signal.SIGINT, 130)],
)
def test_a_pull_killed_at_any_moment_goes_on_where_it_was(hub, tmp_path, part, sent, how, code):
    hub.stalls_after, out = {part: sent}, tmp_path / "e5"
    before = 0 if part == "part_aa" else len(PARTS["part_aa"])
    script = "import sys; from srl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "index", "pull", "wiki18-e5", "--out", str(out)]
    process = subprocess.Popen(command, env={**os.environ, "HF_ENDPOINT": hub.url}, stderr=subprocess.DEVNULL)
    try:
        assert hub.stalled.wait(120)
        _wait_for(out / "e5_Flat.index.partial", before + max(sent - _HELD, 0))
    finally:
        process.send_signal(how)
        assert process.wait(120) == code
    arrived = (out / "e5_Flat.index.partial").stat().st_size
    assert before <= arrived <= before + sent
    hub.ranges = []
    assert (get(hub, out) / "e5_Flat.index").read_bytes() == WHOLE
    assert hub.ranges[0] == (part, f"bytes={arrived - before}-")


def _wait_for(path: Path, size: int) -> None:
    """Wait until the file has `size` bytes."""
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.stat().st_size >= size):
        assert time.monotonic() < deadline, f"{path} never grew"
        time.sleep(0.01)
