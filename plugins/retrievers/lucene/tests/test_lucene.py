"""The real Lucene: the retriever seam, agreement with pyserini, threads, and what may go wrong."""

import json
import os
import random
from pathlib import Path

import pytest

from srl.errors import UserError
from srl.index import build_index, import_index, open_index
from srl.testing import check_retriever
from srl.trajectory import Hit, Passage
from srl_lucene import java
from srl_lucene.options import Options
from srl_lucene.retriever import LuceneRetriever

pytestmark = [pytest.mark.slow, pytest.mark.must_run]

WORDS = "river town king bridge castle poet song war ship island church opera"
SCORE = 2e-4
"""pyserini rounds scores to four digits and moves equal ones apart by a millionth."""


@pytest.fixture(scope="module", autouse=True)
def java_runs() -> None:
    """Java runs; where it cannot, these tests are skipped."""
    pytest.importorskip("pyserini")
    try:
        java.start("1g")
    except UserError as error:
        pytest.skip(str(error))


def made(count: int, seed: int = 0) -> list[Passage]:
    """Passages of a few words each, so that many score the same; their ids are in no order at all."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS.split(), k=chance.randint(1, 12))) for _ in range(count)]
    names = [f"{chance.getrandbits(40):x}-{row}" for row in range(count)]
    return [Passage(name, f'"{name}"\n{text}') for name, text in zip(names, texts, strict=True)]


def queries(count: int) -> list[str]:
    chance = random.Random(1)
    return [" ".join(chance.choices(WORDS.split(), k=chance.randint(1, 4))) for _ in range(count)]


def opened(passages: list[Passage], directory: Path, **options: object) -> LuceneRetriever:
    retriever = LuceneRetriever(Options(**options))
    retriever.build(iter(passages), directory, lambda done: None)
    return retriever.open(directory)


def shown(found: list[list[Hit]]) -> list[list[tuple[str, float]]]:
    return [[(hit.passage.id, hit.score) for hit in hits] for hits in found]


def write_corpus(file: Path, passages: list[Passage]) -> Path:
    lines = [json.dumps({"id": passage.id, "contents": passage.contents}) for passage in passages]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> tuple[list[Passage], Path]:
    """1,500 passages and the index that pyserini's own indexer makes of them with two threads."""
    passages, folder = made(1500), tmp_path_factory.mktemp("foreign")
    (folder / "corpus").mkdir()
    for part in range(3):
        write_corpus(folder / "corpus" / f"{part}.jsonl", passages[part::3])
    args = java.java_class("io.anserini.index.IndexCollection$Args")()
    args.input, args.index = str(folder / "corpus"), str(folder / "index")
    args.collectionClass, args.threads, args.storeRaw = "JsonCollection", 2, True
    java.java_class("io.anserini.index.IndexCollection")(args).run()
    return passages, folder / "index"


@pytest.fixture(scope="module")
def pyserini(foreign):
    """pyserini's own searcher over that index."""
    keep = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = keep or "none"
    try:
        from pyserini.search.lucene import LuceneSearcher
    finally:
        os.environ.pop("OPENAI_API_KEY")
        os.environ.update({"OPENAI_API_KEY": keep} if keep else {})
    return LuceneSearcher(str(foreign[1]))


def assert_as_pyserini(searcher, found: list[list[Hit]], asked: list[str], k: int) -> None:
    """The scores of pyserini in its order, and its passages wherever they are not tied with the last."""
    for query, hits in zip(asked, found, strict=True):
        theirs = {hit.docid: hit.score for hit in searcher.search(query, k)}
        assert [hit.score for hit in hits] == pytest.approx(list(theirs.values()), abs=SCORE)
        last = min(theirs.values()) + SCORE
        assert {h.passage.id for h in hits if h.score > last} <= set(theirs)
        assert {name for name, score in theirs.items() if score > last} <= {h.passage.id for h in hits}


@pytest.mark.parametrize("options", [{}, {"n_threads": 3}, {"language": "zh"}, {"stemmer": "none"}])
def test_conforms_to_the_retriever_seam(options):
    check_retriever("lucene", options)


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75)])
def test_index_of_ours_ranks_as_pyserini_does(tmp_path, foreign, pyserini, k1, b):
    pyserini.set_bm25(k1, b)
    asked = queries(60)
    found = opened(foreign[0], tmp_path, k1=k1, b=b).search(asked, 10)
    assert_as_pyserini(pyserini, found, asked, 10)


def test_index_of_pyserini_is_imported_and_ranks_the_same_as_if_built_here(tmp_path, foreign, pyserini):
    passages, source = foreign
    corpus, asked = write_corpus(tmp_path / "corpus.jsonl", passages), queries(60)
    manifest = import_index(source, tmp_path / "imported", "lucene", corpus=corpus)
    stored = import_index(source, tmp_path / "stored", "lucene")  # its own texts, in its own order
    assert stored.passages == len(passages)
    assert manifest.digest == build_index(corpus, tmp_path / "built", "lucene").digest
    imported, built, own = (open_index(tmp_path / name) for name in ("imported", "built", "stored"))
    assert {passage.id: passage for passage in own.passages} == {p.id: p for p in passages}
    pyserini.set_bm25(0.9, 0.4)
    for index in (imported, own):
        assert_as_pyserini(pyserini, index.search(asked, 10), asked, 10)
    for k in (1, 3, 50):
        assert shown(imported.search(asked, k)) == shown(built.search(asked, k))


def test_what_does_not_fit_or_is_no_index_is_refused_in_one_line(tmp_path, foreign):
    passages, source = foreign
    fewer = write_corpus(tmp_path / "fewer", passages[1:])
    other = write_corpus(tmp_path / "other", [*passages[1:], Passage("new", "text")])
    opened(made(20), tmp_path / "ours")
    (tmp_path / "bad").mkdir()
    for path in source.iterdir():
        (tmp_path / "bad" / path.name).write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for folder, corpus in (
        (source, fewer),
        (source, other),
        (tmp_path / "ours" / "lucene", None),  # without texts
        (tmp_path / "ours" / "lucene", write_corpus(tmp_path / "twenty", made(20))),  # without ids
        (tmp_path / "bad", None),
        (tmp_path, None),
    ):
        with pytest.raises(UserError):
            import_index(folder, tmp_path / "out", "lucene", corpus=corpus)
        assert not (tmp_path / "out").exists()
