"""BM25 on real questions: a change that makes search worse is noticed."""

from __future__ import annotations

import json

import pytest
from bench.retrieval_quality import recalls
from tests.conftest import ROOT
from tests.shared_data import shared_data


def test_real_questions_find_their_paragraphs_as_often_as_published():
    data = shared_data("squad").parent
    published = json.loads((ROOT / "bench" / "results" / "retrieval_quality.json").read_text())["rows"][0]
    found = recalls(data, {})
    assert found == {name: pytest.approx(published[name], abs=0.002) for name in found}
    assert found["recall@3"] > 0.85
