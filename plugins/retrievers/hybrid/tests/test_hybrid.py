"""Several retrievers as one: what they find is fused, what they need is shared, what fails is said."""

from fractions import Fraction

import pytest
from hybrid_parts import PASSAGES
from hypothesis import given
from hypothesis import strategies as st

from srl.errors import UserError
from srl.index import Fault, build_index, open_index
from srl.plugins import manager
from srl.testing import check_retriever
from srl_hybrid.fusion import best, fuse

BOTH = {"retrievers": {"bm25": {"k1": 1.2}, "letters": {}}}
QUERIES = ["the lighthouse of Genoa", "radium", "volcano in Kenya", "zzz", ""]


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
    assert {name.partition("/")[0] for name in manifest.files} == {"passages", "bm25", "letters"}
    same = {
        "retrievers": {"letters": {"size": 3}, "bm25": {"k1": 1.2}},
        "weights": {"letters": 1},
        "runtime": {"letters": {"threads": 4}},
    }
    assert build_index(PASSAGES, tmp_path / "two", "hybrid", same).digest == manifest.digest
    others = [{"retrievers": ["bm25", "letters"]}, {**BOTH, "weights": {"bm25": 2}}, {**BOTH, "depth": 10}]
    digests = {build_index(PASSAGES, tmp_path / str(n), "hybrid", o).digest for n, o in enumerate(others)}
    assert len(digests | {manifest.digest}) == 4
    letters.WEIGHTS[0] = "bbbb"
    with pytest.raises(UserError):
        open_index(tmp_path / "one")


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
        assert [hit.passage.id for hit in hits] == order
        assert [hit.score for hit in hits] == pytest.approx([expected[one] for one in order])


@pytest.mark.parametrize(
    ("query", "status", "retry"), [("boom", "timed_out", 2.0), ("crash", "failed", None)]
)
def test_a_retriever_that_fails_fails_the_query_and_no_other(letters, tmp_path, query, status, retry):
    build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    index = open_index(tmp_path / "one")
    good, bad, other = index.outcomes(["radium", f"radium {query}", "volcano"], 3)
    assert isinstance(bad, Fault)
    assert (bad.status, bad.retry_after_s) == (status, retry)
    assert str(bad).startswith("letters: ")
    assert [good, other] == index.search(["radium", "volcano"], 3)
    with pytest.raises(Fault):
        index.search(["radium", f"radium {query}"], 3)


@pytest.mark.parametrize("name", ["hybrid", "rerank"])
@pytest.mark.parametrize(
    "options",
    [
        {"retrievers": []}, {"retrievers": ["bm26"]}, {"retrievers": {"bm25": {"k2": 1}}},
        {"retrievers": ["outside", "bm25"]},
        {"retrievers": {"bm25": {}, "hybrid": {"retrievers": ["bm25"]}}}, {**BOTH, "weights": {"e5": 1}},
        {**BOTH, "weights": {"bm25": 0}}, {**BOTH, "runtime": {"bm25": {"k1": 1}}}, {**BOTH, "depht": 5},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_one_line(letters, name, options):
    with pytest.raises(UserError):
        manager.load("retriever", name, options)


# Reciprocal-rank fusion against numbers worked out by hand, and what must hold of any rankings.


EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0}


def test_scores_are_those_worked_out_by_hand():
    scores = fuse({"a": ["x", "y"], "b": ["y", "z"]}, EQUAL, 60)
    # x: 1/61; y: 1/62 + 1/61; z: 1/62
    assert scores == pytest.approx({"x": 0.01639344, "y": 0.03252247, "z": 0.01612903}, abs=1e-8)
    assert best(scores, 2, ord) == ["y", "x"]


ranking = st.permutations("pqrstuvw").flatmap(lambda ids: st.integers(0, 8).map(lambda size: ids[:size]))
rankings = st.fixed_dictionaries({"a": ranking, "b": ranking, "c": ranking})
weight = st.floats(0.01, 100)
weights = st.fixed_dictionaries({"a": weight, "b": weight, "c": weight})
constant = st.integers(0, 1000)


@given(rankings, weights, constant)
def test_scores_are_the_exact_sums_rounded(found, weights, constant):
    for name, score in fuse(found, weights, constant).items():
        shares = [
            Fraction(weights[key] / (constant + ids.index(name) + 1))
            for key, ids in found.items()
            if name in ids
        ]
        assert score == float(sum(shares))
        assert score > 0


@given(rankings, weights, constant, st.integers(1, 8))
def test_what_is_not_fused_follows_by_its_best_rank_with_a_lower_score(found, weights, constant, depth):
    first = fuse({name: ids[:depth] for name, ids in found.items()}, weights, constant)
    scores = fuse(found, weights, constant, depth)
    assert {name: scores[name] for name in first} == first
    rest = {name: score for name, score in scores.items() if name not in first}
    assert set(scores) == {name for ids in found.values() for name in ids}
    assert all(0 < score <= min(first.values()) for score in rest.values())
    ranks = {name: min(ids.index(name) for ids in found.values() if name in ids) for name in rest}
    order = [ranks[name] for name in sorted(rest, key=lambda name: -rest[name])]
    assert order == sorted(order)
