"""Several retrievers as one: what they find is fused, what they need is shared, what fails is said."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hybrid_parts import PASSAGES

from srl.errors import UserError
from srl.index import Fault, build_index, open_index, read_index_manifest, timing
from srl.index.manifest import index_digest
from srl.plugins import manager
from srl.testing import check_retriever
from srl_hybrid.options import HybridOptions

BOTH = {"retrievers": {"bm25": {"k1": 1.2}, "letters": {}}}
QUERIES = ["the lighthouse of Genoa", "radium", "volcano in Kenya", "zzz", ""]


def ids(hits):
    return [hit.passage.id for hit in hits]


@pytest.mark.parametrize("retrievers", [["bm25"], ["bm25", "letters"]])
def test_conforms_to_the_retriever_seam(letters, retrievers):
    check_retriever("hybrid", {"retrievers": retrievers})


def test_the_digest_covers_every_option_of_every_retriever(letters, tmp_path):
    manifest = build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    assert manifest.options == {
        "retrievers": {
            "bm25": {"k1": 1.2, "b": 0.4, "stopwords": "english", "stemmer": "english"},
            "letters": {"size": 3},
        },
        "weights": {"bm25": 1.0, "letters": 1.0},
        "rank_constant": 60,
        "depth": 100,
    }
    assert manifest.identity == {"letters encoder": "aaaa"}
    same = {
        "retrievers": {"letters": {"size": 3}, "bm25": {"k1": 1.2}},
        "weights": {"letters": 1},
        "runtime": {"letters": {"threads": 4}},
    }
    assert build_index(PASSAGES, tmp_path / "two", "hybrid", same).digest == manifest.digest
    others = [
        {"retrievers": {"bm25": {}, "letters": {}}},
        {**BOTH, "weights": {"bm25": 2}},
        {**BOTH, "depth": 10},
    ]
    digests = {build_index(PASSAGES, tmp_path / str(n), "hybrid", o).digest for n, o in enumerate(others)}
    assert len(digests | {manifest.digest}) == 4


def test_machine_dependent_options_inside_a_manifest_are_left_out(letters, tmp_path):
    """No build writes them: a manifest of somebody else could say trust_remote_code."""
    build_index(PASSAGES, tmp_path / "index", "hybrid", BOTH)
    manifest = read_index_manifest(tmp_path / "index")
    inside = {**manifest.options["retrievers"], "letters": {"size": 3, "threads": 9}}
    options = {**manifest.options, "retrievers": inside}
    digest = index_digest(manifest.corpus_digest, "hybrid", options, manifest.identity)
    manifest.model_copy(update={"options": options, "digest": digest}).write(tmp_path / "index")
    opened = open_index(tmp_path / "index")._retriever
    assert opened.options.runtime == {}
    assert opened._retrievers["letters"].options.threads == 1


def test_other_weights_inside_are_another_index(letters, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    letters.WEIGHTS[0] = "bbbb"
    with pytest.raises(UserError, match="another letters encoder"):
        open_index(tmp_path / "one")


@pytest.mark.parametrize("call", ["identity", "build", "open"])
@pytest.mark.parametrize("outer", ["hybrid", "rerank"])
def test_an_error_of_a_third_party_inside_names_it(letters, model, tmp_path, monkeypatch, outer, call):
    def fail(*given):
        raise KeyError("lost")

    around = {"model": str(model), "max_length": 64, "device": "cpu", "retriever": "letters"}
    act = partial(build_index, PASSAGES, tmp_path / "index", outer, BOTH if outer == "hybrid" else around)
    if call == "open":
        act()
        act = partial(open_index, tmp_path / "index")
    monkeypatch.setattr(letters.Letters, call, fail)
    with pytest.raises(UserError, match=r"^retriever 'letters' \(srl-search-letters 1\.0\) raised .*lost"):
        act()


def test_passages_are_kept_once_and_each_writes_below_its_name(letters, tmp_path):
    manifest = build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    assert {name.partition("/")[0] for name in manifest.files} == {"passages", "bm25", "letters"}


def test_hits_are_the_fusion_of_what_each_finds(letters, tmp_path):
    for name, options in BOTH["retrievers"].items():
        build_index(PASSAGES, tmp_path / name, name, options)
    build_index(PASSAGES, tmp_path / "both", "hybrid", {**BOTH, "weights": {"letters": 0.7}})
    alone = {name: open_index(tmp_path / name).search(QUERIES, 100) for name in ("bm25", "letters")}
    for row, hits in enumerate(open_index(tmp_path / "both").search(QUERIES, 3)):
        expected = dict.fromkeys([passage.id for passage in PASSAGES], 0.0)
        for name, weight in {"bm25": 1.0, "letters": 0.7}.items():
            for rank, hit in enumerate(alone[name][row], start=1):
                expected[hit.passage.id] += weight / (60 + rank)
        order = sorted((one for one in expected if expected[one]), key=lambda one: -expected[one])[:3]
        assert ids(hits) == order
        assert [hit.score for hit in hits] == pytest.approx([expected[one] for one in order])


def test_depth_is_how_far_rankings_are_read(letters, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "hybrid", {**BOTH, "depth": 1})
    found = open_index(tmp_path / "one")
    asked = []
    search = found._retriever._retrievers["bm25"].search
    found._retriever._retrievers["bm25"].search = lambda queries, k: asked.append(k) or search(queries, k)
    found.search(["radium"], 1)
    found.search(["radium"], 4)
    assert asked == [1, 4]


@pytest.mark.parametrize("depth", [1, 2, 3, 100])
def test_what_is_fused_does_not_depend_on_how_many_hits_are_requested(letters, tmp_path, depth):
    build_index(PASSAGES, tmp_path / "one", "hybrid", {**BOTH, "depth": depth})
    found = open_index(tmp_path / "one")
    query = " ".join(passage.text for passage in PASSAGES)
    (all_hits,) = found.search([query], len(PASSAGES))
    assert len(all_hits) == len(PASSAGES)
    assert [hit.score for hit in all_hits] == sorted((hit.score for hit in all_hits), reverse=True)
    for k in range(1, len(PASSAGES)):
        (hits,) = found.search([query], k)
        assert [(hit.passage.id, hit.score) for hit in hits] == [
            (hit.passage.id, hit.score) for hit in all_hits[:k]
        ]


@pytest.mark.parametrize(
    ("query", "status", "message", "retry"),
    [
        ("boom", "timed_out", "letters: too slow", 2.0),
        ("crash", "failed", "letters: OSError: the disk is gone", None),
    ],
)
def test_a_retriever_that_fails_fails_the_query_and_no_other(
    letters, tmp_path, query, status, message, retry
):
    build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    found = open_index(tmp_path / "one")
    good, bad, other = found.outcomes(["radium", f"radium {query}", "volcano"], 3)
    assert isinstance(bad, Fault)
    assert (bad.status, str(bad), bad.retry_after_s) == (status, message, retry)
    assert [good, other] == found.search(["radium", "volcano"], 3)
    with pytest.raises(Fault, match=message):
        found.search(["radium", f"radium {query}"], 3)


def test_a_build_goes_on_where_one_of_the_retrievers_does(letters, tmp_path):
    made = manager.load("retriever", "hybrid", BOTH)
    assert made.resumable
    assert not manager.load("retriever", "hybrid", {"retrievers": ["bm25"]}).resumable
    told: list[int] = []
    made.build(PASSAGES, tmp_path, told.append)
    assert letters.BUILT == ["letters"]
    assert told == sorted(told)
    assert told[-1] == len(PASSAGES)


def test_phases_are_those_of_the_retrievers(letters, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    found = open_index(tmp_path / "one")
    with timing.collect_timings() as seconds:
        found.search(["radium"], 1)
    assert set(seconds) <= {"embed", "search"}


@pytest.mark.parametrize(
    "given",
    [
        {"runtime": {"letters": {"threads": 7}, "bm25": {"n_threads": 2}}},
        {"retrievers": {"letters": {"threads": 7}, "bm25": {"n_threads": 2, "k1": 1.2}}},
        {
            "retrievers": {"letters": {"threads": 5}, "bm25": {"n_threads": 2, "k1": 1.2}},
            "runtime": {"letters": {"threads": 7}},
        },
    ],
)
def test_what_belongs_to_the_machine_reaches_its_retriever_wherever_it_is_said(letters, tmp_path, given):
    manifest = build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    assert build_index(PASSAGES, tmp_path / "two", "hybrid", {**BOTH, **given}).digest == manifest.digest
    inner = open_index(tmp_path / "one", given)._retriever._retrievers
    assert (inner["letters"].options.threads, inner["bm25"].options.n_threads) == (7, 2)
    assert inner["bm25"].options.k1 == 1.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"retriever\.hybrid fuses retrievers; type: --set \"retrievers=\[bm25, e5\]\""),
        ({"retrievers": []}, "fuses retrievers"),
        ({"retrievers": {}}, "fuses retrievers"),
        ({"retrievers": "bm25"}, r"retriever\.hybrid\.retrievers is .*mapping"),
        ({"retrievers": {"bm25": 1}}, r"retriever\.hybrid\.retrievers\.bm25 is .*mapping"),
        ({"retrievers": ["bm26"]}, "no retriever 'bm26': .*did you mean 'bm25'"),
        ({"retrievers": {"bm25": {"k2": 1}}}, r"no option retriever\.hybrid\.retrievers\.bm25\.k2: .*'k1'"),
        ({"retrievers": {"bm25": {"k1": "x"}}}, r"retriever\.hybrid\.retrievers\.bm25\.k1 is .*number"),
        ({"retrievers": {"bm25": {"n_threads": 0}}}, r"retrievers\.bm25\.n_threads is .*number ≥"),
        ({"retrievers": {"outside": {"x": 1}}}, r"retrievers\.outside takes no options; remove x"),
        ({"retrievers": ["outside", "bm25"]}, "outside searches an external service"),
        ({"retrievers": {"bm25": {}, "hybrid": {"retrievers": ["bm25"]}}}, "bm25 occurs 2 times"),
        ({**BOTH, "weights": {"e5": 1}}, r"weights: no retriever 'e5'; there are bm25, letters"),
        ({**BOTH, "weights": {"bm25": 0}}, r"weights\.bm25: expected a number above 0"),
        ({**BOTH, "weights": {"bm25": float("nan")}}, r"weights\.bm25: expected a number above 0"),
        ({**BOTH, "runtime": {"bm25": {"k1": 1}}}, r"bm25\.k1 is part of the index, not a machine"),
        ({**BOTH, "runtime": {"bm25": {"n_threads": 0}}}, r"bm25\.n_threads is .*number ≥"),
        ({**BOTH, "runtime": {"e5": {}}}, r"runtime: no retriever 'e5'; there"),
        ({**BOTH, "depth": 0}, r"retriever\.hybrid\.depth"),
        ({**BOTH, "depht": 5}, "did you mean 'depth'"),
    ],
)
def test_options_that_make_no_sense_are_refused(letters, options, message):
    with pytest.raises(UserError, match=message) as caught:
        manager.load("retriever", "hybrid", options)
    assert "\n" not in str(caught.value)


def test_a_list_of_names_stands_for_the_defaults(letters):
    assert HybridOptions(retrievers=["bm25"]) == HybridOptions(retrievers={"bm25": {}})


def test_an_index_with_a_part_gone_is_named(letters, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    next(Path(tmp_path / "one" / "letters").iterdir()).unlink()
    with pytest.raises(UserError, match="letters/size"):
        open_index(tmp_path / "one")
