"""BM25 on real questions: a change that makes search worse is noticed."""

import json

import pytest
from bench.retrieval_quality import recalls
from tests.conftest import ROOT
from tests.shared_data import shared_data


@pytest.mark.must_run
def test_real_questions_find_their_paragraphs_as_often_as_published():
    pytest.importorskip("ir_measures")
    data = shared_data("squad").parent
    published = json.loads((ROOT / "bench" / "results" / "retrieval_quality.json").read_text())["rows"][0]
    found = recalls(data, {})
    means = {name: figure.mean for name, figure in found.items()}
    assert means == {name: pytest.approx(published[name], abs=0.002) for name in means}
    assert means["recall@3"] > 0.85
