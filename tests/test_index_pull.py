"""`srl index pull` against a stand-in of the hub."""

import io
import json
import os
import shutil
import tarfile
from collections import namedtuple
from pathlib import Path

import pytest
from tests.hub import COMMIT, Hub, serving

from srl.cli import main
from srl.data.corpus import read_corpus
from srl.errors import UserError
from srl.index.pull import plan_pull, run_pull

pytest.importorskip("huggingface_hub")

E5 = "PeterJinGo/wiki-18-e5-index"
PARTS = {"part_aa": os.urandom(300_000), "part_ab": os.urandom(200_001)}
WHOLE = PARTS["part_aa"] + PARTS["part_ab"]
ROWS = [{"id": str(n), "contents": f'"Title {n}"\ntext {n}'} for n in range(5)]


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
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    lucene = {"bm25/segments_2": b"small", "bm25/_0.fdt": os.urandom(1000), ".gitattributes": b"x"}
    repositories = {E5: {**PARTS, "README.md": b"#"}, "PeterJinGo/wiki-18-bm25-index": lucene}
    repositories["PeterJinGo/wiki-18-corpus"] = {"wiki-18.jsonl.gz": _corpus()}
    with serving(Hub(repositories)) as running:
        yield running


def get(hub: Hub, out: Path, name: str = "wiki18-e5") -> Path:
    run_pull(plan_pull(name, out, None, hub.url), hub.url)
    return out


def visible(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()
                  and ".cache" not in path.parts)  # fmt: skip


def test_parts_are_joined_and_what_is_there_is_not_downloaded_again(hub, tmp_path):
    hub.refuses = {"part_ab": 403}
    with pytest.raises(UserError):
        get(hub, tmp_path / "e5")
    assert plan_pull("wiki18-e5", tmp_path / "e5", endpoint=hub.url).missing == len(PARTS["part_ab"])
    hub.refuses, hub.ranges = {}, []
    for _ in range(2):
        out = get(hub, tmp_path / "e5")
        assert visible(out) == ["e5_Flat.index"]
        assert (out / "e5_Flat.index").read_bytes() == WHOLE
        assert [name for name, _ in hub.ranges] == ["part_ab"]
    assert plan_pull("wiki18-e5", out, endpoint=hub.url).missing == 0


def test_an_index_and_the_corpus_are_as_they_are_published(hub, tmp_path):
    assert visible(get(hub, tmp_path / "bm25", "wiki18-bm25")) == ["bm25/_0.fdt", "bm25/segments_2"]
    out = get(hub, tmp_path / "corpus", "wiki18-corpus")
    found = [{"id": each.id, "contents": each.contents} for each in read_corpus(out / "wiki-18.jsonl.gz")]
    assert found == ROWS


def test_the_token_stays_with_the_hub(hub, tmp_path):
    get(hub, tmp_path / "e5")
    given = {path.partition("/PeterJinGo")[0]: token for path, token in hub.tokens}
    assert given["/datasets"] == "Bearer hf_secret"
    assert given["/files/datasets"] == ""


def test_a_disk_too_small_is_noticed_before_anything_is_written(hub, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, len(WHOLE)))
    with pytest.raises(UserError, match=r"0\.7 MB"):
        get(hub, tmp_path / "e5")
    assert visible(tmp_path / "e5") == []


def test_the_command_says_what_it_takes_and_what_to_type_next(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    out = tmp_path / "e5"
    assert main(["index", "pull", "wiki18-e5", "--out", str(out)]) == 0
    found = capsys.readouterr()
    assert found.out == f"{out}/e5_Flat.index\n"
    assert COMMIT[:12] in found.err
    assert f"srl index import {out}/e5_Flat.index --retriever e5" in found.err
    assert "hf_secret" not in found.err
