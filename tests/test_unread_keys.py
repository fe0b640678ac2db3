"""Nothing that is typed is ignored: each kind of run reads a key, or it is named in a warning."""

from __future__ import annotations

import re

import pytest
from tests.cli_mistakes import place

from srl.config import load_config, load_saved, save_config
from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import facts, keys, value_of
from srl.config.load import typed_keys, with_changes
from srl.config.unread import KINDS, Backend, Kind, unread
from srl.errors import UserError

__all__ = ["place"]
KEYS = [key.name for key in keys()]


def test_every_key_is_read_by_a_kind_of_run_that_there_is():
    for key in KEYS:
        assert set(facts(key).read_by.split()) & set(KINDS) == set(facts(key).read_by.split()) != set(), key


@pytest.mark.parametrize(
    ("algo", "key"),
    [
        ("sft", "actor.optim.lr=1e-3"),
        ("sft", "rollout.n=3"),
        ("sft", "sft.filter=em = 1"),
        ("rft", "trainer.save_freq=3"),
        ("rft", "sft.patience=3"),
        ("rft", "algorithm.filter_groups.enable=true"),
        ("grpo", "rft.questions=3"),
        ("grpo", "critic.optim.lr=1e-3"),
        ("grpo", "algorithm.filter_groups.metric=em"),
        ("grpo", "model.lora_alpha=9"),
        ("grpo", "cluster.nnodes=2"),
        ("grpo", "verl.trainer.nnodes=2"),
    ],
)
def test_a_typed_key_that_the_run_does_not_read_is_named_in_a_warning(algo, key):
    resolved = load_config(algo=algo, sets=[key, "rollout.n=2"])
    name = key.partition("=")[0]
    assert any(name in line for line in resolved.warnings)
    assert value_of(resolved.config, name) is not None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["actor.use_kl_loss=false", "actor.kl_loss_coef=.1"], "actor.kl_loss_coef"),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=.1"],
            "algorithm.kl_ctrl.target_kl",
        ),
        (["actor.policy_loss.loss_mode=cispo", "actor.clip_ratio_c=4"], "actor.clip_ratio_c"),
        (["search.index=i", "retriever.bm25.k1=1.5"], "retriever.bm25.k1"),
        (
            ["search.index=i", "retriever.name=hybrid", "retriever.hybrid.retrievers.bm25.k1=1.5",
             "retriever.hybrid.runtime.bm25.n_threads=2"],
            "retriever.name retriever.hybrid.retrievers.bm25.k1",
        ),
        (["actor.use_kl_loss=false", "ref.path=m"], "ref.path"),
        (["actor.clip_ratio=.1", "actor.clip_ratio_low=.2", "actor.clip_ratio_high=.3"], "actor.clip_ratio"),
        (["rollout.search=false", "search.topk=2"], "search.topk"),
        (["rollout.search=false", "search.max_failed=.2"], ""),
        (["actor.optim.lr_warmup_steps=3", "actor.optim.lr_warmup_steps_ratio=.1"],
         "actor.optim.lr_warmup_steps_ratio"),
        (["actor={optim: {lr: 1e-3}}", "critic={optim: {lr: 1e-3}}"], "critic.optim.lr"),
        (["actor.clip_ratio=.1", "actor.clip_ratio_high=.3", "search.url=http://h/", "search.retries=1"], ""),
        (
            ["algorithm.rollout_correction={rollout_is: 'off', rollout_is_threshold: 3}"],
            "algorithm.rollout_correction.rollout_is_threshold",
        ),
        (["sft.steps=0", "sft.epochs=3", "sft.optim.lr=1e-3"], "sft.epochs sft.optim.lr"),
        (["search.url=http://h/", "data.corpus=c.jsonl"], "data.corpus"),
        (["search.index=i", "data.corpus=c.jsonl"], ""),  # compared
        (["data.examples=e.txt"], "data.examples"),
        (["data.examples=e.txt", "data.template=few-shot"], ""),
        (["retriever.e5.model=x", "retriever.bm25.k1=1.5"], "retriever.e5.model"),
        (["reward.format.structure_score=.3"], "reward.format.structure_score"),
        (["reward.weights={format: 1.0}", "reward.format.structure_score=.3"], ""),
    ],
)  # fmt: skip
def test_keys_that_another_key_makes_void_are_named_and_no_others(settings, key):
    config = load_config(algo="grpo", sets=settings).config
    assert set(unread(config, typed_keys({}, settings), "rl", "local", algorithm_plugin("grpo"))) == set(
        key.split()
    )


@pytest.mark.parametrize(
    ("algo", "sets", "key"),
    [
        ("rft", ["sft.mix={a: 1}"], "sft.mix"),
        ("rft", ["sft.steps=0"], "sft.steps"),
        ("sft", ["sft.steps=0"], "sft.steps"),
        ("grpo", ["model.dtype=float16"], "model.dtype"),
        ("grpo", ["rollout.engine=openai", "rollout.openai.url=http://h/"], "rollout.engine"),
        ("sft", ["sft.patience=3", "trainer.test_freq=0"], "sft.patience"),
        (
            "ppo",
            ["search.retrievers={a: {url: 'http://h/', options: {k1: 1}}}"],
            "search.retrievers.a.options",
        ),
        (
            "grpo",
            ["algorithm.rollout_correction.rollout_rs_threshold=3"],
            "algorithm.rollout_correction.rollout_rs ",
        ),
    ],
)
def test_what_such_a_run_cannot_do_is_refused_with_its_key(tmp_path, monkeypatch, algo, sets, key):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(key)):
        load_config(algo=algo, sets=sets)


def test_a_file_is_typed_where_the_user_wrote_it_but_not_for_other_algorithms(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "critic: {optim: {lr: 1e-3}}\nper_algorithm: {grpo: {critic: {grad_clip: 2.0}}}\n", encoding="utf-8"
    )
    (said,) = load_config(file=file, algo="grpo").warnings
    assert "critic.optim.lr" in said
    assert "critic.grad_clip" not in said
    assert load_config(file=file, algo="ppo").warnings == ()
    save_config(tmp_path, load_config(file=file, algo="ppo").config)
    saved = load_config(file=tmp_path / "config.yaml", algo="grpo").warnings
    assert not [line for line in saved if "critic.optim.lr" in line]


def test_a_resumed_run_says_which_change_it_does_not_read(tmp_path):
    save_config(tmp_path, load_config(algo="grpo").config)
    cases: list[tuple[Kind, Backend, int]] = [("rl", "local", 2), ("rl", "verl", 1), ("rft", "local", 3)]
    for kind, backend, count in cases:
        sets = ["critic.ppo_max_token_len=9", "cluster.watchdog_s=60", "trainer.save_freq=1"]
        _, lines = with_changes(load_saved(tmp_path), sets, kind, backend)
        assert sum(text.partition("=")[0] in line for text in sets for line in lines) == count
