"""Lucene rounds lengths and bm25 does not: what that changes, on the Cranfield collection."""

import pytest
from tests.shared_data import shared_data

from srl.data.corpus import read_corpus
from srl.data.trec import read_qrels, read_topics
from srl.errors import UserError
from srl.evaluate.index_eval import overlap_at
from srl.evaluate.retrieval_metrics import ranking_measures
from srl.index import build_index, open_index
from srl.trajectory import Hit
from srl_lucene import java

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, list[list[Hit]]]:
    """The first 1,000 hits of every query, by both retrievers with the same analysis."""
    for name in ("pyserini", "srl_bm25", "ir_measures"):
        pytest.importorskip(name)
    try:
        java.start("1g")
    except UserError as error:
        pytest.skip(str(error))
    data, folder = shared_data("cranfield"), tmp_path_factory.mktemp("cranfield")
    passages = list(read_corpus(data / "cran.all.1400.xml"))
    queries = [text for _, text in read_topics(data / "cran.qry.xml")]
    found = {}
    for name in ("bm25", "lucene"):
        build_index(passages, folder / name, name, {"stemmer": "porter"})
        found[name] = open_index(folder / name).search(queries, 1000)
    return found


def test_cranfield_is_ranked_as_well_as_by_lucene(answers):
    judged = read_qrels(shared_data("cranfield") / "cranqrel.trec.txt")
    means = {}
    for name, found in answers.items():
        rankings = {str(place): [hit.passage.id for hit in hits] for place, hits in enumerate(found, start=1)}
        values = ranking_measures(rankings, judged)
        means[name] = {measure: sum(per.values()) / len(per) for measure, per in values.items()}
    for measure in ("nDCG@10", "MAP"):
        assert means["bm25"][measure] == pytest.approx(means["lucene"][measure], abs=0.01)
    assert means["lucene"]["nDCG@10"] > 0.35
    assert means["lucene"]["MAP"] > 0.27


@pytest.mark.parametrize("k", [3, 10])
def test_first_hits_are_lucenes(answers, k):
    pairs = zip(answers["bm25"], answers["lucene"], strict=True)
    shares = [
        overlap_at(*([(hit.passage.id, hit.score) for hit in hits] for hits in pair), k) for pair in pairs
    ]
    assert sum(shares) / len(shares) > 0.95
