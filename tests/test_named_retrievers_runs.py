"""Runs and evaluations with several retrievers: what is searched, logged and said."""

import json
from pathlib import Path

import pytest
from tests.store_builder import log_rows
from tests.training import only_run, train
from tests.two_retrievers import place, scripted, searched, settings

from srl.config import Config
from srl.errors import UserError
from srl.index import open_index
from srl.serve.named_retrievers import digest_of
from srl.train.eval_run import evaluate_model
from srl.train.model_settings import settings_of
from srl.train.search import load_search
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")
__all__ = ["place", "scripted"]


def test_a_training_run_searches_two_retrievers_and_says_which_in_its_log(place, tmp_path, scripted):
    train(settings(place), tmp_path)
    run = only_run(tmp_path)
    assert searched(run) == [
        ("", "velmar", "ok", 1),
        ("papers", "lighthouse", "ok", 1),
        ("wbe", "lighthouse", "rejected", 0),
    ]
    pages, papers = (open_index(place / name).digest for name in ("pages", "papers"))
    digests = log_rows(run, "SELECT DISTINCT retriever, index_digest FROM searches ORDER BY ALL")
    (prompt,) = log_rows(run, "SELECT DISTINCT text FROM segments WHERE kind = 'prompt'")[0]
    (told,) = log_rows(run, "SELECT DISTINCT text FROM segments WHERE kind = 'feedback'")[0]
    assert digests == [("", pages), ("papers", papers), ("wbe", "")]
    assert '<search engine="papers"> query </search> (papers). Question: Who built' in prompt
    assert '<search engine="papers">' in told
    known = json.loads((run / "checkpoints" / "step-000001" / "srl.json").read_text(encoding="utf-8"))
    assert known["indexes"] == {"": pages, "papers": papers}
    inputs = json.loads((run / "run.json").read_text(encoding="utf-8"))["inputs"]
    assert (inputs["index"], inputs["index of papers"]) == (pages, papers)


def test_another_index_of_a_named_retriever_is_said_aloud(place, tmp_path, scripted, capsys):
    from srl.cli.eval.run import _show

    train(settings(place, "search.digest=" + open_index(place / "pages").digest[:12]), tmp_path)
    run = only_run(tmp_path)
    model = run / "checkpoints" / "step-000001"
    files, workspace = [str(place / "train.parquet")], Workspace(tmp_path)
    same = evaluate_model(settings_of(model, None, None, {}, []), files, workspace)
    assert same.indexes == same.trained_with
    assert same.settings["search"].metrics["eval/em"] == 1
    sets = [f"search.retrievers.papers.index={place / 'pages'}", f"search.index={place / 'papers'}"]
    other = evaluate_model(settings_of(model, None, None, {}, sets), files, workspace)
    _show(other, as_json=True)
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    trained = json.loads((model / "srl.json").read_text(encoding="utf-8"))["indexes"]
    assert found["indexes"] == {"": trained["papers"], "papers": trained[""]}
    assert found["trained_with"] == trained
    assert captured.err.count("trained with the index") == 2
    _show(same, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["searches", "per", "question", "2.000"] in rows
    assert ["by", "papers", "1.000"] in rows


def loaded(config: Config, workspace: Path) -> object:
    return load_search(config, Workspace(workspace), lambda text: None)


def test_the_index_must_be_the_expected_one(place, tmp_path):
    digest = open_index(place / "pages").digest
    assert digest_of(loaded(settings(place, search__digest=digest[:12]), tmp_path)) == digest
    with pytest.raises(UserError) as caught:
        loaded(settings(place, search__digest="0" * 12), tmp_path)
    assert caught.value.key == "search.digest"
