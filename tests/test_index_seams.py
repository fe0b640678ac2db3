"""What a retriever may be besides one that indexes a corpus in one go: resumable, live, a reader of files."""

import json
from pathlib import Path

import pytest
from tests.plugin_site import Site, site  # noqa: F401

from srl.errors import UserError
from srl.index import build_index, import_index, live_index, open_index

PLUGIN = """
    from pydantic import BaseModel, Field
    from srl.index import Fault
    from srl.index.passages import keep_passages, PassageStore
    from srl.plugins import hookimpl
    from srl.trajectory import Hit, Passage

    FAIL_AT = []
    WEIGHTS = ["aaaa"]
    DONE = []

    class Options(BaseModel):
        size: int = 1
        threads: int = Field(default=1, json_schema_extra={"runtime": True})

    class Shards:
        name = "shards"
        resumable = True

        def __init__(self, options):
            self.options = options

        def identity(self):
            return {"encoder": WEIGHTS[0]}

        def build(self, passages, directory, progress):
            store = keep_passages(passages, directory)
            (directory / self.name).mkdir(exist_ok=True)
            for row, passage in enumerate(store):
                shard = directory / self.name / str(row)
                if not shard.exists():
                    if FAIL_AT == [row]:
                        raise KeyboardInterrupt
                    shard.write_text(passage.id)
                    DONE.append(row)
                progress(row + 1)

        def open(self, directory):
            self.store = PassageStore(directory / "passages")

        def search(self, queries, k):
            if "boom" in queries:
                raise OSError("the disk is gone")
            return [[Hit(self.store[0], 1.0)] for _ in queries]

        def adopt(self, source, store, directory, progress):
            (directory / self.name).mkdir()
            (directory / self.name / "0").write_text(source.read_text())

    class Live:
        name = "live"
        live = True

        def open(self, directory):
            self.directory = directory

        def outcomes(self, queries, k):
            return [Fault("timed_out", "too slow") if query == "slow" else
                    [Hit(Passage("u", query), 1.0)] for query in queries]

        def search(self, queries, k):
            return self.outcomes(queries, k)

    @hookimpl
    def srl_retrievers(register):
        register("shards", Shards, "resumable", options=Options)
        register("live", Live, "live")
"""


@pytest.fixture
def plugin(site: Site):  # noqa: F811
    import importlib

    return importlib.import_module(site.install("srl-search-shards", PLUGIN))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "contents": f"text {n}"}) + "\n" for n in range(4)))
    return path


def interrupted(plugin, corpus: Path, out: Path) -> None:
    plugin.FAIL_AT[:] = [2]
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, out, "shards")
    plugin.FAIL_AT.clear()


def test_a_killed_build_goes_on_where_it_was(plugin, corpus, tmp_path):
    out = tmp_path / "out"
    interrupted(plugin, corpus, out)
    assert not out.exists()
    assert plugin.DONE == [0, 1]
    manifest = build_index(corpus, out, "shards", {"threads": 4})
    assert plugin.DONE == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]
    assert not (out / "building.json").exists()
    assert open_index(out).manifest == manifest
    never_killed = build_index(corpus, tmp_path / "other", "shards")
    assert (manifest.digest, manifest.checksums) == (never_killed.digest, never_killed.checksums)


@pytest.mark.parametrize("change", ["options", "weights"])
def test_other_options_do_not_go_on_with_it(plugin, corpus, tmp_path, change):
    out = tmp_path / "out"
    interrupted(plugin, corpus, out)
    options = {"size": 2} if change == "options" else {}
    if change == "weights":
        plugin.WEIGHTS[0] = "bbbb"
    with pytest.raises(UserError, match=r"out\.building"):
        build_index(corpus, out, "shards", options)
    build_index(corpus, out, "shards", options, overwrite=True)
    assert plugin.DONE == [0, 1, 0, 1, 2, 3]


def test_another_encoder_is_another_index_and_is_not_searched_with(plugin, corpus, tmp_path):
    one = build_index(corpus, tmp_path / "one", "shards")
    plugin.WEIGHTS[0] = "bbbb"
    other = build_index(corpus, tmp_path / "other", "shards")
    assert one.digest != other.digest
    with pytest.raises(UserError, match="another encoder"):
        open_index(tmp_path / "one")


def test_a_live_retriever_takes_no_corpus_and_is_searched(plugin, corpus, tmp_path):
    with pytest.raises(UserError, match="live"):
        build_index(corpus, tmp_path / "out", "live")
    with pytest.raises(UserError, match="shards"):
        build_index(None, tmp_path / "out", "shards")
    manifest = build_index(None, tmp_path / "out", "live")
    opened, loose = open_index(tmp_path / "out"), live_index("live")
    assert manifest.digest == opened.digest == loose.digest
    assert (len(opened), opened.live, opened.passages, loose.directory) == (0, True, None, None)
    assert loose.search(["x"], 3)[0][0].passage.contents == "x"
    with pytest.raises(KeyError):
        loose.passage("u")
    with pytest.raises(UserError, match="shards"):
        live_index("shards")


def test_an_index_of_another_program_is_imported_with_its_corpus(plugin, corpus, tmp_path):
    (tmp_path / "foreign").write_text("vectors")
    with pytest.raises(UserError, match="foreign"):
        import_index(tmp_path / "foreign", tmp_path / "out", "shards")
    with pytest.raises(UserError, match="nowhere"):
        import_index(tmp_path / "nowhere", tmp_path / "out", "shards", corpus=corpus)
    with pytest.raises(UserError, match="live"):
        import_index(tmp_path / "foreign", tmp_path / "out", "live", corpus=corpus)
    manifest = import_index(tmp_path / "foreign", tmp_path / "out", "shards", corpus=corpus)
    assert manifest.passages == 4
    assert (tmp_path / "out" / "shards" / "0").read_text() == "vectors"
    assert open_index(tmp_path / "out").passage("p2").contents == "text 2"
