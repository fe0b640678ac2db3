"""How many threads a run uses: the rule, and what comes before it."""

from pathlib import Path

import pytest
import torch
from tests.tiny_models import tiny_model

from srl.config import load_config
from srl.train import threads
from srl.train.threads import set_threads


@pytest.mark.parametrize(
    ("parameters", "sets", "quota", "asked", "expected"),
    [
        (700_000, [], "max 100000", None, 1),
        (20_000_000, [], "max 100000", None, 2),
        (134_000_000, [], "max 100000", None, 6),
        (134_000_000, [], "150000 100000", None, 2),
        (700_000, [], "max 100000", "6", 6),
        (700_000, ["trainer.threads=3"], "max 100000", "6", 3),
        (134_000_000, ["rollout.deterministic=true"], "max 100000", None, 1),
        (None, [], "max 100000", None, 6),
    ],
)
def test_a_larger_model_has_more_threads_up_to_the_cores_unless_a_number_is_set(
    monkeypatch, tmp_path: Path, parameters, sets, quota, asked, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(threads, "CORES", 6)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(threads, "count_parameters", lambda model: parameters)
    before, model = torch.get_num_threads(), tiny_model()
    try:
        found = set_threads(model if parameters else model.to("meta"), load_config("tiny", sets=sets).config)
        assert (found, torch.get_num_threads()) == (expected, expected)
    finally:
        torch.set_num_threads(before)
