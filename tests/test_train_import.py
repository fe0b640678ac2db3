"""A configuration of verl's or Search-R1's becomes ours, and what it means in another way is said."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.import_inputs import GRPO, imported, said, search_r1, verl

from srl.cli import main
from srl.config import load_config
from srl.config.keys import place
from srl.errors import UserError
from srl.train.importing import Imported, import_file
from srl.train.importing.key_table import (
    KEY_TABLE,
    NO_DEFAULT,
    SEARCH_R1,
    SEARCH_R1_ONLY,
    VERL,
    KeyMapping,
    why_replaced,
)

DOCS = Path(__file__).parent.parent / "docs"


def reported(folder: Path, text: str) -> Imported:
    """What is made of a script of this text."""
    (folder / "run.sh").write_text(text, encoding="utf-8")
    return import_file(folder / "run.sh")


def refused(folder: Path, text: str, name: str = "run.sh", **given: str) -> str:
    """The one line that the file is refused with."""
    with pytest.raises(UserError) as caught:
        imported(folder, text, name, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Search-R1's scripts


def test_script_for_grpo_becomes_the_same_run(tmp_path):
    config, _ = imported(tmp_path, search_r1(*GRPO, "actor_rollout_ref.actor.kl_loss_coef=0.002"))
    assert config.data.train_files == ("data/towns/train.parquet",)
    assert config.model.path == "models/small"
    assert (config.algorithm.name, config.rollout.n) == ("grpo", 5)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (
        True,
        0.002,
        "k3",
    )
    assert not config.algorithm.use_kl_in_reward
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 4096)
    assert (config.rollout.max_turn_tokens, config.rollout.max_obs_length) == (500, 450)
    assert (config.rollout.max_turns, config.search.url) == (4, ("http://127.0.0.1:8000/retrieve",))
    assert (config.trainer.total_training_steps, config.trainer.val_before_train) == (1005, False)
    assert config.trainer.logger == ("wandb",)
    assert config.sft.steps == 0


def test_script_for_ppo_has_the_penalty_in_the_reward_and_a_critic(tmp_path):
    config, made = imported(
        tmp_path,
        search_r1("algorithm.kl_ctrl.kl_coef=0.01", "critic.optim.lr=2e-5", "trainer.critic_warmup=3"),
    )
    assert config.algorithm.name == "ppo"
    assert config.algorithm.use_kl_in_reward
    assert (config.algorithm.kl_penalty, config.algorithm.kl_ctrl.kl_coef) == ("k1", 0.01)
    assert (config.critic.optim.lr, config.critic.ppo_mini_batch_size) == (2e-5, 256)
    assert config.trainer.critic_warmup == 2
    assert "only the critic for 2 steps" in said(made, "critic_warmup=3")


def test_defaults_there_and_not_ours_fill_what_a_script_leaves_out(tmp_path):
    config, made = imported(tmp_path, search_r1(*GRPO))
    assert config.rollout.top_p == 0.95
    assert config.actor.entropy_coeff == 0.001
    assert config.actor.clip_ratio_c is None
    assert config.cluster.tensor_model_parallel_size == 2
    assert config.eval.val_questions is None
    line = said(made, "defaults of Search-R1 written out")
    assert "rollout.top_p=0.95" in line
    assert "data.train_batch_size" not in line


@pytest.mark.parametrize(
    ("settings", "there", "here"),
    [
        (GRPO, 10, 2),
        ((*GRPO, "actor_rollout_ref.actor.ppo_epochs=2"), 20, 4),
        ((*GRPO, "actor_rollout_ref.actor.ppo_mini_batch_size=512"), 5, 1),
        ((*GRPO[:2], "actor_rollout_ref.rollout.n_agent=3"), 6, 2),
    ],
)
def test_optimiser_steps_of_a_rollout_are_counted_there_and_here(tmp_path, settings, there, here):
    config, made = imported(tmp_path, search_r1(*settings))
    assert f"{there} optimiser steps a rollout in Search-R1, {here} in srl" in said(made, "a mini-batch of")
    rows = config.data.train_batch_size * config.rollout.n * config.actor.ppo_epochs
    assert rows // (config.actor.ppo_mini_batch_size * config.rollout.n) == here


def test_mini_batch_that_comes_nearest_divides_the_batch(tmp_path):
    _, made = imported(tmp_path, search_r1(*GRPO))
    assert said(made, "a mini-batch of").endswith("actor.ppo_mini_batch_size=64 gives 8")


def test_nothing_is_said_of_mini_batches_where_both_count_alike(tmp_path):
    _, made = imported(tmp_path, search_r1("actor_rollout_ref.rollout.n_agent=1"))
    assert not [line for line in made.report if "optimiser steps" in line]


def test_validation_is_greedy_and_the_temperature_of_theirs_is_named(tmp_path):
    config, made = imported(tmp_path, search_r1("actor_rollout_ref.rollout.temperature=0.8"))
    assert config.eval.temperature == 0
    assert "temperature 0.8 and top_p 0.95" in said(made, "validation is greedy")


def test_test_questions_that_validate_are_named(tmp_path):
    config, made = imported(tmp_path, search_r1())
    assert config.data.val_files == ("data/towns/test.parquet",)
    assert "choose the checkpoint" in said(made, "data/towns/test.parquet")
    _, other = imported(tmp_path, search_r1("data.val_files=data/dev.parquet"))
    assert not [line for line in other.report if "choose the checkpoint" in line]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", ("top_p 0.9 is kept", "rollout.top_p=1.0")),
        ("actor_rollout_ref.rollout.n_agent=5", ("episodes of one question in srl", "row number")),
        ("max_turns=2", ("max_turns=2 means the same", "2 turns may search and one more")),
        ("data.max_start_length=1000", ("data.max_start_length=1000 is data.max_prompt_length",)),
        ("actor_rollout_ref.model.use_remove_padding=true", ("use_remove_padding", "flash_attention_2")),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", ("kept below verl:", "param_offload")),
        ("max_turns=3", ("3 turns of 500 + 450 tokens", "3350")),
        ("actor_rollout_ref.actor.state_masking=false", ("state_masking is off", "mask_observations=false")),
        ("algorithm.no_think_rl=true", ("no_think_rl has no equivalent",)),
        ("algorithm.state_masking.end_state_marker='</obs>'", ("end_state_marker has no equivalent",)),
        ("data.train_data_num=100", ("data.train_data_num has no equivalent",)),
        ("data.val_batch_size=256", ("drops an incomplete last batch",)),
        ("trainer.total_epochs=15", ("total_epochs=15 may end a run earlier",)),
        ("trainer.total_training_steps=305", ("305: srl trains all", "one fewer")),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.95", ("is 954 of 1005 steps", "955 in srl")),
        ("+trainer.val_only=true", ("only validates", "srl eval")),
        ("trainer.logger=[wandb,mlflow]", ("trainer.logger has no mlflow",)),
        ("critic.model.path=models/other", ("critic.model.path=models/other", "starts from the policy")),
        ("actor_rollout_ref.rollout.top_k=50", ("top_k=50 has no equivalent",)),
        ("reranker.do_rerank=true reranker.url=http://127.0.0.1:6980/rerank", ("search.url rerank",)),
        ("critic.model.fsdp_config.param_offload=true", ("param_offload=True differs",)),
        ("reward_model.structure_format_score=0.2", ("does not read the format scores",)),
        ("trainer.total_training_steps=null trainer.total_epochs=9", ("9 epochs: srl counts steps only",)),
        ("actor_rollout_ref.actor.ppo_mini_batchsize=3", ("ignored, unknown", "actor.ppo_mini_batchsize")),
        ("trainer.default_hdfs_dir=hdfs://x", ("dropped, runs", "trainer.default_hdfs_dir")),
        ("data.return_raw_chat=false", ("dropped, srl reads the questions", "data.return_raw_chat")),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=4", ("kept below verl:", "fsdp_config.fsdp_size")),
    ],
)  # fmt: skip
def test_change_of_meaning_is_said(tmp_path, setting, words):
    if words[0].startswith("3 turns"):
        setting += " data.max_prompt_length=2048"
    said(reported(tmp_path, search_r1(setting)), *words)


def test_program_with_format_scores_brings_the_format_reward(tmp_path):
    scores = {"structure_format_score": 0.3, "final_format_score": 0.05, "retrieval_score": 0.1}
    settings = [f"reward_model.{name}={score}" for name, score in scores.items()]
    config, _ = imported(tmp_path, search_r1(*settings, program="main_ppo_format"))
    assert config.reward.weights == {"format": 1.0}
    assert config.reward.options("format") == {
        "structure_score": 0.3, "final_format_score": 0.05, "retrieval_score": 0.1,
    }  # fmt: skip
    plain, _ = imported(tmp_path, search_r1(*settings))
    assert plain.reward.weights == {"em": 1.0}


def test_report_stands_at_the_head_of_the_file(tmp_path):
    _, made = imported(tmp_path, search_r1(*GRPO))
    head = [line for line in made.text.splitlines() if line.startswith("#")]
    assert head == ["# From run.sh, a configuration of Search-R1's.", *(f"# {line}" for line in made.report)]


# verl's configurations


def test_verl_counts_mini_batches_as_srl_does(tmp_path):
    config, made = imported(
        tmp_path,
        verl(
            "data.train_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.rollout.n=5",
        ),
    )
    assert (config.rollout.n, config.actor.ppo_mini_batch_size) == (5, 16)
    assert "16 questions × 5 episodes in verl and srl: 4 optimiser steps" in said(made, "a mini-batch of")


@pytest.mark.parametrize(
    ("setting", "ours", "value"),
    [
        ("actor_rollout_ref.actor.kl_loss_type=mse", "actor.kl_loss_type", "k2"),
        ("actor_rollout_ref.actor.kl_loss_type=kl", "actor.kl_loss_type", "k1"),
        ("actor_rollout_ref.actor.kl_loss_type=k3+", "actor.kl_loss_type", "k3+"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor.policy_loss.loss_mode", "gspo"),
        ("algorithm.kl_penalty=low_var_kl", "algorithm.kl_penalty", "k3"),
        ("algorithm.adv_estimator=reinforce++", "algorithm.name", "reinforce_plus_plus"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.name", "reinforce_plus_plus"),
        ("algorithm.adv_estimator=rloo", "algorithm.name", "rloo"),
        ("algorithm.adv_estimator=gae", "algorithm.name", "ppo"),
        ("algorithm.adv_estimator=srl_grpo", "algorithm.name", "grpo"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_agg_mode", "constant"),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "actor.optim.lr_scheduler_type", "cosine"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=7", "actor.optim.lr_warmup_steps", 7),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor.optim.lr_warmup_steps", 0),
        ("actor_rollout_ref.rollout.name=sglang_async", "cluster.rollout", "sglang"),
        ("actor_rollout_ref.actor.strategy=fsdp2", "cluster.strategy", "fsdp2"),
        ("+actor_rollout_ref.actor.megatron.sequence_parallel=true", "cluster.strategy", "megatron"),
        ("actor_rollout_ref.actor.megatron.param_offload=true", "cluster.param_offload", True),
        ("trainer.save_freq=-1", "trainer.save_freq", 0),
        ("data.val_max_samples=-1", "eval.val_questions", None),
        ("data.val_max_samples=99", "eval.val_questions", 99),
        ("data.seed=7", "trainer.seed", 7),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.enable=true", "reward.overlong_buffer.enable", True),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=64", "reward.overlong_buffer.len", 64),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "rollout.max_turns", 2),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns=3", "rollout.max_turns", 3),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns=0", "rollout.max_turns", 4),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "actor.grad_clip", 0.5),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0.6", "eval.temperature", 0.0),
        ("data.train_files=\"[a.parquet,'b c.parquet']\"", "data.train_files", ("a.parquet", "b c.parquet")),
    ],
)  # fmt: skip
def test_name_of_verls_has_its_counterpart(tmp_path, setting, ours, value):
    config, _ = imported(tmp_path, verl(setting))
    assert reduce(getattr, ours.split("."), config) == value


def test_a_temperature_of_validation_that_is_not_used_is_said(tmp_path):
    _, made = imported(tmp_path, verl("actor_rollout_ref.rollout.val_kwargs.temperature=0.6"))
    said(made, "val_kwargs.temperature=0.6 is not used", "eval.temperature=0.6")


def test_validation_samples_where_verl_says_so(tmp_path):
    settings = ("val_kwargs.do_sample=true", "val_kwargs.temperature=0.6", "val_kwargs.n=4")
    config, made = imported(tmp_path, verl(*(f"actor_rollout_ref.rollout.{item}" for item in settings)))
    assert config.eval.temperature == 0.6
    said(made, "val_kwargs.n=4", "asked once")


def test_weights_between_sampler_and_trainer_are_carried(tmp_path):
    section = "algorithm.rollout_correction"
    given = {"rollout_is": "sequence", "rollout_is_threshold": "0.5_4", "rollout_is_batch_normalize": "true",
             "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1", "bypass_mode": True}  # fmt: skip
    config, made = imported(tmp_path, verl(*(f"{section}.{name}={value}" for name, value in given.items())))
    found = config.algorithm.rollout_correction
    assert (found.rollout_is, found.bounds, found.rollout_is_batch_normalize) == (
        "sequence",
        (0.5, 4.0),
        True,
    )
    assert found.rejections == [("seq_mean_k1", 0.9, 1.1)]
    said(made, "srl has no bypass mode")
    assert "switches it off" not in made.text
    _, made = imported(tmp_path, verl())
    said(made, "truncated importance sampling", f"{section}.rollout_is=off switches it off")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("actor_rollout_ref.actor.clip_ratio=0.3", ("clip_ratio=0.3 is used in srl",)),
        ("actor_rollout_ref.actor.grad_clip=0.5", ("grad_clip=0.5: verl 0.9.1 reads",)),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", ("the loss sapo is verl's own",)),
        ("algorithm.filter_groups.enable=true", ("filter_groups is not converted",)),
        ("custom_reward_function.path=my.py", ("my.py is not read", "plugin")),
        ("reward.custom_reward_function.path=my.py", ("my.py is not read", "plugin")),
        ("reward_model.enable=true", ("a reward model has no equivalent",)),
        ("data.truncation=left", ("srl truncates no prompt",)),
        ("data.prompt_key=question", ("data.prompt_key=question",)),
        ("data.train_max_samples=5", ("train_max_samples has no equivalent",)),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", ("t.yaml is not read",)),
        ("actor_rollout_ref.rollout.multi_turn.max_tool_response_length=9", ("=9 counts characters",)),
        ("actor_rollout_ref.model.trust_remote_code=true", ("trust_remote_code is kept",)),
        ("actor_rollout_ref.actor.optim.min_lr_ratio=0.1", ("min_lr_ratio has no equivalent",)),
    ],
)  # fmt: skip
def test_change_against_verl_is_said(tmp_path, setting, words):
    said(reported(tmp_path, verl(setting)), *words)


@pytest.mark.parametrize("setting", ["algorithm.adv_estimator=remax", "algorithm.adv_estimator=my_own"])
def test_estimator_that_srl_has_not_is_refused_with_those_it_has(tmp_path, setting):
    line = refused(tmp_path, verl(setting))
    assert setting in line
    assert all(name in line for name in ("grpo", "ppo", "rloo", "reinforce_plus_plus", "srl plugins new"))


@pytest.mark.parametrize(
    "setting",
    [
        "actor_rollout_ref.actor.kl_loss_type=abs",
        "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        "actor_rollout_ref.rollout.name=trtllm",
        "actor_rollout_ref.actor.strategy=veomni",
    ],
)
def test_value_that_srl_has_nothing_for_is_refused(tmp_path, setting):
    line = refused(tmp_path, verl(setting))
    assert line.startswith(f"run.sh: {setting}: srl has no equivalent")


def test_value_that_does_not_fit_is_refused_with_both_names(tmp_path):
    line = refused(tmp_path, verl("actor_rollout_ref.actor.clip_ratio=wide"))
    assert "actor.clip_ratio is 'wide', expected number" in line
    assert "actor_rollout_ref.actor.clip_ratio=wide" in line
    assert "imported.yaml" not in line


def test_key_of_verls_alone_is_kept_for_its_engine(tmp_path):
    config, made = imported(
        tmp_path,
        verl("actor_rollout_ref.rollout.free_cache_engine=false", "+actor_rollout_ref.actor.my_own.knob=3"),
    )
    assert config.verl["actor_rollout_ref"]["rollout"] == {"free_cache_engine": False}
    assert config.verl["+actor_rollout_ref"] == {"actor": {"my_own": {"knob": 3}}}
    line = said(made, "kept below verl:")
    assert "free_cache_engine" in line
    assert "my_own.knob" in line


def test_yaml_is_read_with_its_references_and_bases(tmp_path):
    text = """
defaults: [ppo_trainer, my_base, _self_]
data: {train_files: ~/a.parquet, train_batch_size: 32, max_prompt_length: 100}
actor_rollout_ref:
  model: {path: small}
  actor: {ppo_mini_batch_size: 16, optim: {lr: 1e-6}}
  rollout: {prompt_length: "${data.max_prompt_length}", n: "${oc.select:data.many,4}"}
critic: {ppo_mini_batch_size: "${actor_rollout_ref.actor.ppo_mini_batch_size}", ppo_epochs: "${.missing}"}
trainer: {experiment_name: "run-${..data.train_batch_size}", project_name: "p-${actor_rollout_ref.rollout.n}"}
"""
    config, made = imported(tmp_path, text, "verl.yaml")
    assert config.rollout.n == 4
    assert config.critic.ppo_mini_batch_size == 16
    assert config.actor.optim.lr == 1e-6
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("run-32", "p-4")
    assert config.data.train_files == (str(Path.home() / "a.parquet"),)
    said(made, "the bases of the file are not read: my_base")
    said(made, "${.missing} is not defined", "critic.ppo_epochs")


def test_offload_of_the_reference_is_kept_only_where_it_differs(tmp_path):
    both = [f"actor_rollout_ref.{role}.fsdp_config.param_offload=true" for role in ("actor", "ref")]
    config, made = imported(tmp_path, verl(*both))
    assert config.cluster.param_offload
    assert config.verl == {}
    assert not [line for line in made.report if "kept below" in line]


def test_list_of_overrides_may_be_yaml_too(tmp_path):
    config, _ = imported(tmp_path, "- algorithm.adv_estimator=grpo\n- max_turns=3\n", "overrides.yaml")
    assert (config.algorithm.name, config.rollout.max_turns) == ("grpo", 3)


# The table


def test_each_row_leads_to_a_key_and_to_values_that_it_takes():
    for name in KEY_TABLE:
        assert place(name.ours.split("."))[0] == "leaf", name
        if name.values:
            for value in set(name.values.values()):
                assert value is None or load_config(None, flags={name.ours: value})


def test_key_of_a_row_is_not_dropped():
    for name in KEY_TABLE:
        assert not ({SEARCH_R1, VERL} <= name.defaults.keys() and why_replaced(name.theirs)), name.theirs


def test_later_rows_for_one_key_have_no_default():
    """Of two rows for one of our keys the later would win with its default over what is given."""
    for dialect in (SEARCH_R1, VERL):
        seen: set[str] = set()
        for name in (name for name in KEY_TABLE if dialect in name.defaults):
            assert name.ours not in seen or name.defaults[dialect] is NO_DEFAULT, name
            seen.add(name.ours)


OTHER_VALUES = {
    "model.path": "words", "model.tokenizer": "words", "model.lora_target_modules": "q_proj",
    "model.trust_remote_code": True, "model.attn_implementation": "eager", "data.train_files": "a.parquet",
    "data.val_files": "b.parquet", "search.url": "http://127.0.0.1:1/retrieve", "data.train_batch_size": 256,
    "data.max_prompt_length": 64, "data.max_response_length": 640, "rollout.max_turn_tokens": 48,
    "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.25, "actor.clip_ratio_low": 0.25,
    "actor.clip_ratio_high": 0.25, "actor.clip_ratio_c": 4.5, "actor.optim.betas": [0.8, 0.9],
    "critic.optim.betas": [0.8, 0.9], "trainer.project_name": "words", "trainer.experiment_name": "words",
    "cluster.strategy": "fsdp2", "cluster.rollout": "sglang", "actor.loss_agg_mode": "seq-mean-token-sum",
    "algorithm.rollout_correction.rollout_is": "sequence",
    "algorithm.rollout_correction.rollout_rs": "token_k3",
    "algorithm.rollout_correction.rollout_is_batch_normalize": True, "reward.overlong_buffer.enable": True,
    "critic.loss_agg_mode": "seq-mean-token-sum", "algorithm.kl_penalty": "mse", "actor.kl_loss_type": "mse",
    "actor.optim.lr_scheduler_type": "linear", "critic.optim.lr_scheduler_type": "linear",
}  # fmt: skip
READ_AS = {"mse": "k2"}


def other_value(name: KeyMapping, dialect: str) -> Any:
    """A value that the key takes and that is not its default there."""
    default = name.defaults[dialect]
    if name.ours in OTHER_VALUES:
        return OTHER_VALUES[name.ours]
    if isinstance(default, bool):
        return not default
    return 0.25 if isinstance(default, float) else 4


@pytest.mark.parametrize("dialect", [SEARCH_R1, VERL])
def test_value_of_each_row_arrives(tmp_path, dialect):
    rows = {name.ours: name for name in KEY_TABLE if dialect in name.defaults}
    for elsewhere in ("algorithm.name", "trainer.critic_warmup"):
        del rows[elsewhere]
    settings = [f"{name.theirs}={other_value(name, dialect)}".replace(" ", "") for name in rows.values()]
    assert len(set(settings)) > 50
    config, _ = imported(tmp_path, "\n".join(settings))
    found = {ours: reduce(getattr, ours.split("."), config) for ours in rows}
    expected = {ours: other_value(name, dialect) for ours, name in rows.items()}
    if dialect == VERL:
        expected["rollout.max_turn_tokens"] = found["rollout.max_turn_tokens"] = 640
    for ours, value in expected.items():
        of_text = READ_AS.get(value, value) if isinstance(value, str) else value
        wanted = tuple(of_text) if isinstance(of_text, list) else of_text
        assert found[ours] in (wanted, (wanted,)), ours


def cell(name: KeyMapping, dialect: str) -> str:
    value = name.defaults.get(dialect, "")
    if value in ("", NO_DEFAULT):
        return "·" if value else ""
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def test_table_of_the_page_is_that_of_the_names():
    lines = (DOCS / "import.md").read_text(encoding="utf-8").partition("## Names")[2].splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == [
        f"| `{name.theirs}` | `{name.ours}` | {cell(name, SEARCH_R1)} | {cell(name, VERL)} |"
        for name in KEY_TABLE
    ]


# The command


def test_command_writes_the_file_and_says_the_changes_on_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(search_r1(*GRPO))
    assert main(["train", "import", "train.sh", "--out", "deep/ours.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == list(import_file("train.sh").report)
    assert Path("deep/ours.yaml").read_text() == import_file("train.sh").text
    assert main(["train", "import", "train.sh"]) == 0
    assert capsys.readouterr().out == import_file("train.sh").text


def test_imported_file_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(search_r1(*GRPO, "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))
    assert main(["train", "import", "train.sh", "--out", "ours.yaml"]) == 0
    assert main(["train", "--config", "ours.yaml", "--dry-run"]) == 0
    assert "512 questions × 5 episodes a step, 2 optimiser steps" in capsys.readouterr().out


def test_command_does_not_write_over_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(search_r1())
    Path("ours.yaml").write_text("kept")
    assert main(["train", "import", "train.sh", "--out", "ours.yaml"]) == 2
    assert capsys.readouterr().err.startswith("srl: ours.yaml exists already")
    assert Path("ours.yaml").read_text() == "kept"


def test_command_takes_values_of_variables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(search_r1("data.train_files=$WHERE/a.parquet"))
    assert main(["train", "import", "train.sh"]) == 2
    assert "type: --define WHERE=VALUE" in capsys.readouterr().err
    assert main(["train", "import", "train.sh", "--define", "WHERE=my/data"]) == 0
    assert "train_files: my/data/a.parquet" in capsys.readouterr().out
    Path("train.sh").write_text(search_r1("data.train_files=$1/a.parquet"))
    assert main(["train", "import", "train.sh"]) == 2
    assert "type: --define 1=VALUE" in capsys.readouterr().err
    assert main(["train", "import", "train.sh", "--define", "1=my/data"]) == 0
    assert "train_files: my/data/a.parquet" in capsys.readouterr().out
    for wrong in ("WHERE", "=x", "a b=x"):
        assert main(["train", "import", "train.sh", "--define", wrong]) == 2
        assert "expected NAME=VALUE" in capsys.readouterr().err


# Whatever is in it

ODD = [
    None,
    True,
    False,
    -1,
    0,
    3,
    2.5,
    1e300,
    10**30,
    "",
    "x",
    "x\ny: 1",
    "\u2028x",
    "~/x",
    "${a.b}",
    "${.a}",
    [],
    [1],
    ["x", None],
    {},
    {"a": 1},
]
KEYS = [
    *sorted({name.theirs for name in KEY_TABLE} | SEARCH_R1_ONLY),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "trainer.logger", "trainer.total_epochs",
    "critic.model.path", "actor_rollout_ref.actor.optim.clip_grad", "algorithm.rollout_correction.rollout_is",
    "algorithm.norm_adv_by_std_in_grpo", "actor_rollout_ref.rollout.val_kwargs.temperature", "a.b", "a",
    "actor_rollout_ref.rollout.engine_kwargs.vllm", "actor_rollout_ref.rollout.engine_kwargs.vllm.x",
]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD), min_size=1, max_size=6))
def test_odd_values_are_imported_or_refused_in_one_line(tmp_path_factory, found):
    file = tmp_path_factory.mktemp("odd") / "odd.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in found.items()))
    try:
        text = import_file(file).text
    except UserError as error:
        text = f"# {error}"
    assert all(line.startswith("#") for line in text.partition("\n\n")[0].splitlines())
