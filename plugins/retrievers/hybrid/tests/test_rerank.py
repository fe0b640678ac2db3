"""A cross-encoder over any retriever: the right pairs, the right order, whatever shares the batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from hybrid_parts import PASSAGES, TEXTS, cross_encoder, tokenizer
from transformers import BertForSequenceClassification, BertModel

from srl.errors import UserError
from srl.index import Fault, build_index, live_index, open_index, timing
from srl.plugins import manager
from srl.testing import check_retriever
from srl.trajectory import Passage
from srl_hybrid.cross_encoder import CrossEncoder, model_directory
from srl_hybrid.rerank import text_of

QUERIES = ["the lighthouse of Genoa", "radium in the dark", "a volcano", "zzz", ""]
PAIRS = [(query, text_of(passage)) for query in QUERIES for passage in PASSAGES]


@pytest.fixture
def options(model: Path) -> dict:
    return {"model": str(model), "max_length": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def encoder(model: Path) -> CrossEncoder:
    return CrossEncoder(str(model), max_length=64, device="cpu", batch_size=4)


def ids(hits):
    return [hit.passage.id for hit in hits]


def alone(directory: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """The sigmoid of each pair's logit, one forward pass a pair, nothing padded."""
    model = BertForSequenceClassification.from_pretrained(directory).eval()
    scores = []
    for query, text in pairs:
        with torch.no_grad():
            logits = model(**tokenizer()(query, text, return_tensors="pt")).logits[0].double()
        scores.append(torch.sigmoid(logits[-1] - (logits[0] if len(logits) == 2 else 0)).item())
    return scores


@pytest.mark.parametrize("inner", ["bm25", "hybrid"])
def test_conforms_to_the_retriever_seam(options, inner):
    more = {"options": {"retrievers": ["bm25"]}} if inner == "hybrid" else {}
    check_retriever("rerank", {**options, "retriever": inner, **more})


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_each_pair_alone(tmp_path, labels):
    directory = cross_encoder(tmp_path / "model", labels)
    expected = alone(directory, PAIRS)
    assert np.ptp(expected) > 0.05
    for batch_size in (1, 4, 100):
        found = CrossEncoder(str(directory), max_length=64, device="cpu", batch_size=batch_size)
        assert found.scores(PAIRS) == pytest.approx(expected, rel=1e-5)
    assert found.scores(PAIRS[::-1]) == pytest.approx(expected[::-1], rel=1e-5)


def test_more_pairs_than_are_held_at_a_time_are_scored_alike(encoder, monkeypatch):
    monkeypatch.setattr("srl_hybrid.cross_encoder._WINDOW", 2)
    assert encoder.scores(PAIRS) == pytest.approx([encoder.scores([pair])[0] for pair in PAIRS], rel=1e-5)


def test_a_pair_that_comes_twice_has_one_score_to_the_last_bit(encoder):
    scores = encoder.scores([PAIRS[0], *PAIRS[1:], PAIRS[0]])
    assert scores[0] == scores[-1]


def test_pairs_of_like_length_share_a_batch_and_none_is_read_twice(encoder, monkeypatch):
    shapes: list[tuple[int, int]] = []
    logits = CrossEncoder._logits

    def spy(self, batch):
        lengths = [len(ids) for ids in batch["input_ids"]]
        shapes.append((max(lengths), min(lengths)))
        return logits(self, batch)

    monkeypatch.setattr(CrossEncoder, "_logits", spy)
    encoder.scores([("genoa", "the " * count) for count in (1, 9, 2, 8, 3, 7, 4, 6)] * 2)
    assert shapes == [(13, 10), (8, 5)]


def test_every_query_meets_its_own_candidates_and_no_others(options, tmp_path, monkeypatch):
    build_index(PASSAGES, tmp_path / "plain")
    build_index(PASSAGES, tmp_path / "one", "rerank", options)
    found = open_index(tmp_path / "one")
    seen: list[tuple[str, str]] = []
    scores = CrossEncoder.scores
    monkeypatch.setattr(CrossEncoder, "scores", lambda self, pairs: seen.extend(pairs) or scores(self, pairs))
    together = found.search(QUERIES, 5)
    candidates = dict(zip(QUERIES, open_index(tmp_path / "plain").search(QUERIES, 5), strict=True))
    assert seen == [(query, text_of(hit.passage)) for query in QUERIES for hit in candidates[query]]
    for query, hits in zip(QUERIES, together, strict=True):
        assert sorted(ids(hits)) == sorted(ids(candidates[query]))
        (single,) = found.search([query], 5)
        assert ids(hits) == ids(single)
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in single])


def test_the_order_is_the_cross_encoders(options, model, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "rerank", options)
    (hits,) = open_index(tmp_path / "one").search(["the lighthouse of Genoa in the dark"], 5)
    assert len(hits) >= 3
    exact = dict(
        zip(
            TEXTS,
            alone(model, [("the lighthouse of Genoa in the dark", text_of(one)) for one in PASSAGES]),
            strict=True,
        )
    )
    assert ids(hits) == sorted(ids(hits), key=lambda name: -exact[name])
    assert [hit.score for hit in hits] == pytest.approx([exact[name] for name in ids(hits)], rel=1e-5)


def test_equal_scores_keep_the_order_of_the_corpus(options, tmp_path):
    twins = [Passage(name, TEXTS["genoa"]) for name in "bca"]
    build_index([*PASSAGES[1:], *twins], tmp_path / "one", "rerank", options)
    (hits,) = open_index(tmp_path / "one").search(["genoa"], 5)
    assert ids(hits) == ["b", "c", "a"]
    assert len({hit.score for hit in hits}) == 1


def test_depth_is_how_many_candidates_are_read(options, tmp_path, monkeypatch):
    build_index(PASSAGES, tmp_path / "one", "rerank", {**options, "depth": 2})
    found = open_index(tmp_path / "one")
    counts: list[int] = []
    scores = CrossEncoder.scores
    monkeypatch.setattr(
        CrossEncoder, "scores", lambda self, pairs: counts.append(len(pairs)) or scores(self, pairs)
    )
    query = "lighthouse genoa radium port volcano"
    one, three = (found.search([query], k)[0] for k in (1, 3))
    assert counts == [2, 2]
    assert ids(three)[:1] == ids(one)
    assert ids(three)[2] == ids(found._retriever._retriever.search([query], 3)[0])[2]
    assert three[1].score > three[2].score > 0


def test_passages_longer_than_the_model_reads_are_cut(encoder):
    long = "genoa " * 500
    assert np.isfinite(encoder.scores([("genoa", long), (long, "genoa"), (long, long)])).all()


@pytest.mark.parametrize("text", ["\x00", "a \ud800 b", "﷽ 👩‍🚀", "[SEP] [CLS] [PAD]", ""])
def test_any_text_is_scored(encoder, text):
    assert 0 < encoder.scores([(text, text)])[0] < 1


def test_weights_are_part_of_what_an_index_is(options, tmp_path):
    mine = shutil.copytree(options["model"], tmp_path / "mine")
    given = {**options, "model": str(mine)}
    before = build_index(PASSAGES, tmp_path / "one", "rerank", given)
    shutil.rmtree(mine)
    cross_encoder(mine, seed=1)
    with pytest.raises(UserError, match="built with another cross-encoder"):
        open_index(tmp_path / "one")
    after = build_index(PASSAGES, tmp_path / "two", "rerank", given)
    assert before.options == after.options
    assert before.digest != after.digest


def test_an_index_remembers_its_cross_encoder_and_takes_it_from_elsewhere(options, tmp_path):
    mine = shutil.copytree(options["model"], tmp_path / "mine")
    manifest = build_index(PASSAGES, tmp_path / "one", "rerank", {**options, "model": str(mine)})
    assert manifest.digest == build_index(PASSAGES, tmp_path / "two", "rerank", options).digest
    assert "model" not in manifest.options
    before = open_index(tmp_path / "one").search(QUERIES, 3)
    mine.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="no model directory"):
        open_index(tmp_path / "one")
    assert open_index(tmp_path / "one", {"model": str(tmp_path / "moved")}).search(QUERIES, 3) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"format": 9, "model": "x"}', "has format 9"),
        (b'{"format": 1}', "expected the name of a cross-encoder in 'model', found None"),
    ],
)
def test_a_note_that_is_not_ours_is_named(options, tmp_path, content, message):
    made = manager.load("retriever", "rerank", options)
    made.build(PASSAGES, tmp_path, lambda done: None)
    (tmp_path / "rerank" / "model.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        manager.load("retriever", "rerank", {"max_length": 64}).open(tmp_path)


def test_what_belongs_to_the_machine_goes_through_every_layer(letters, options):
    inner = {"retrievers": {"letters": {"threads": 7, "size": 2}, "bm25": {"n_threads": 2}}}
    made = manager.load("retriever", "rerank", {**options, "retriever": "hybrid", "options": inner})
    assert made.options.options["retrievers"]["letters"] == {"size": 2}
    assert made.options.runtime == {"runtime": {"letters": {"threads": 7}, "bm25": {"n_threads": 2}}}
    assert made._retriever._retrievers["letters"].options.threads == 7


def test_what_the_retriever_depends_on_is_part_of_it_too(letters, options):
    inner = {"retriever": "hybrid", "options": {"retrievers": ["bm25", "letters"]}}
    made = manager.load("retriever", "rerank", {**options, **inner})
    assert set(made.identity()) == {"cross-encoder", "letters encoder"}
    assert made.resumable


def test_the_digest_holds_the_inner_options_and_nothing_of_the_machine(options, tmp_path):
    manifest = build_index(PASSAGES, tmp_path / "one", "rerank", {**options, "batch_size": 2})
    assert manifest.options["options"] == {"k1": 0.9, "b": 0.4, "stopwords": "english", "stemmer": "english"}
    assert not {"device", "batch_size", "runtime"} & set(manifest.options)
    found = open_index(tmp_path / "one", {"batch_size": 7, "runtime": {"n_threads": 2}})
    assert found._retriever.options.batch_size == 7
    assert found._retriever._retriever.options.n_threads == 2


def test_what_is_found_outside_is_reranked_too(letters, options):
    with pytest.raises(UserError, match="rerank needs a cross-encoder"):
        live_index("rerank", {"retriever": "outside"})
    found = live_index("rerank", {**options, "retriever": "outside", "depth": 4})
    assert found.live
    (hits,) = found.search(["genoa"], 2)
    assert len(hits) == 2
    assert hits[0].score >= hits[1].score
    assert {hit.passage.contents for hit in hits} <= {f"genoa {n}" for n in range(4)}


def test_an_index_of_what_is_found_outside_opens_with_its_cross_encoder(letters, options, tmp_path):
    given = {"retriever": "outside", "depth": 4}
    manifest = build_index(None, tmp_path / "one", "rerank", {**options, **given})
    found, loose = open_index(tmp_path / "one"), live_index("rerank", {**options, **given})
    assert (found.live, found.digest) == (True, manifest.digest)
    assert found.search(["genoa"], 2) == loose.search(["genoa"], 2)


def test_a_fault_of_the_retriever_is_the_querys_and_no_others(letters, options, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "rerank", {**options, "retriever": "letters"})
    found = open_index(tmp_path / "one")
    good, bad, other = found.outcomes(["radium", "radium boom", "volcano"], 3)
    assert isinstance(bad, Fault)
    assert (bad.status, bad.retry_after_s) == ("timed_out", 2.0)
    assert ids(good) == ids(found.search(["radium"], 3)[0])
    assert ids(other) == ids(found.search(["volcano"], 3)[0])


def test_a_score_that_is_no_number_is_a_fault_and_not_a_ranking(options, tmp_path, monkeypatch):
    build_index(PASSAGES, tmp_path / "one", "rerank", options)
    found = open_index(tmp_path / "one")
    logits = CrossEncoder._logits
    monkeypatch.setattr(CrossEncoder, "_logits", lambda self, batch: logits(self, batch) * np.nan)
    (fault,) = found.outcomes(["radium"], 3)
    assert isinstance(fault, Fault)
    assert fault.status == "failed"
    assert "dtype=float32" in str(fault)


def test_reranking_is_a_phase_of_its_own(options, tmp_path):
    build_index(PASSAGES, tmp_path / "one", "rerank", options)
    found = open_index(tmp_path / "one")
    with timing.collect_timings() as seconds:
        found.search(["radium"], 1)
    assert seconds["rerank"] > 0


def plain_bert(folder: Path, model: Path) -> None:
    BertModel.from_pretrained(model).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def relabelled(folder: Path, model: Path) -> None:
    cross_encoder(folder, labels=3)


def pickled(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def coded(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, "no model directory"),
        (lambda folder, model: folder.mkdir(), "is not a model directory: expected a config.json"),
        (plain_bert, "is not a cross-encoder: it has no weights for classifier"),
        (relabelled, "has 3 labels; a cross-encoder has 1 or 2"),
        (pickled, r"contains no \*\.safetensors file"),
        (cut, "is truncated"),
        (coded, "if you trust it set trust_remote_code=true"),
    ],
)
def test_what_is_no_cross_encoder_is_refused_before_anything_is_built(
    options, model, tmp_path, make, message
):
    if make is not None:
        make(tmp_path / "mine", model)
    with pytest.raises(UserError, match=message) as caught:
        build_index(PASSAGES, tmp_path / "one", "rerank", {**options, "model": str(tmp_path / "mine")})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("one*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 65}, "supports at most 64 tokens; type: --set max_length=64"),
        ({"model": ""}, r"retriever\.rerank\.model"),
        ({"model": None}, "rerank needs a cross-encoder; type: --set model=DIRECTORY"),
        ({"retriever": "bm26"}, "did you mean 'bm25'"),
        ({"options": {"k2": 1}}, r"no option retriever\.rerank\.options\.k2"),
        ({"options": {"n_threads": 0}}, r"retriever\.rerank\.options\.n_threads is .*number ≥"),
        ({"runtime": {"k1": 1}}, r"rerank\.options\.k1 is part of the index, not a machine-dependent option"),
        ({"runtime": {"k9": 1}}, r"no option retriever\.rerank\.options\.k9"),
        ({"dtype": "int8"}, r"retriever\.rerank\.dtype"),
        ({"device": "nonsense"}, "no device 'nonsense'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        build_index(PASSAGES, tmp_path / "one", "rerank", {**options, **change})
    assert "\n" not in str(caught.value)


def test_a_name_is_fetched_from_the_hub_without_code_or_pickles(model, monkeypatch):
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, allow_patterns))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert model_directory("org/name") == model
    ((name, patterns),) = asked
    assert name == "org/name"
    assert not any(pattern.endswith((".py", ".bin")) for pattern in patterns)


@pytest.mark.parametrize("path", ["/no/where", "/nowhere", "./nowhere", "../no/where", "no/../where"])
def test_a_path_is_never_asked_of_the_hub(monkeypatch, path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(UserError, match="no model directory"):
        model_directory(path)


def test_a_name_that_the_hub_does_not_give_says_what_to_type(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=r"org/name, .*\(no network\); type: hf download org/name"):
        model_directory("org/name")
