"""A model that verl would train wrongly is refused before any process starts; verl itself is not needed."""

import pytest
import torch
from tests import model_families as families
from tests.tiny_models import tiny_model
from tests.training import Said, config
from tests.verl_configs import job, made

from srl.errors import UserError
from srl.models.load import load_model, load_tokenizer
from srl.models.weights import save_model
from srl.train.verl.launch import prepare
from srl.train.verl.model_check import check_start_on_verl
from srl.train.verl.translate import settings
from srl.workspace import Workspace

SHORT = ("data.max_prompt_length=48", "data.max_response_length=48", "rollout.max_num_seqs=4")


@pytest.fixture
def saved(tmp_path):
    def save(family: str) -> str:
        model = tiny_model() if family == "tied" else families.build(family)
        model.save_pretrained(tmp_path / family)
        return f"model.path={tmp_path / family}"

    return save


@pytest.mark.parametrize("family", ["tied", "opt", "gpt2", "gpt_oss"])
def test_train_mode_without_dropout_is_right(saved, family):
    """OPT and GPT-2 have dropout, which our overrides turn off."""
    check_start_on_verl(made(saved(family), *SHORT), job(), pytest.fail)


def test_a_router_that_samples_in_train_mode_is_refused(saved):
    with pytest.raises(UserError):
        check_start_on_verl(made(saved("phimoe"), *SHORT), job(), pytest.fail)


@pytest.mark.parametrize(("family", "modules"), [("tied", "[lm_head]"), ("mixtral", "all-linear")])
def test_adapters_that_verl_merges_wrongly_are_refused(saved, family, modules):
    chosen = made(saved(family), *SHORT, "model.lora_rank=4", f"model.lora_target_modules={modules}")
    with pytest.raises(UserError, match=r"^model\.lora_target_modules"):
        check_start_on_verl(chosen, job(), pytest.fail)


def test_the_launch_checks_before_anything_starts(tmp_path):
    chosen = config(tmp_path)
    model, (tokenizer, _) = load_model(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    save_model(model, tokenizer, tmp_path / "broken")
    workspace, terminal = Workspace(tmp_path / "workspace"), Said()
    prepare(chosen, "grpo", workspace, terminal)
    with pytest.raises(UserError):
        prepare(chosen.with_settings({"model.path": str(tmp_path / "broken")}), "grpo", workspace, terminal)


@pytest.mark.parametrize(
    ("family", "typed", "expected"),
    [("tied", "auto", "sdpa"), ("gpt_oss", "auto", "eager"), ("gpt_oss", "sdpa", "sdpa")],
)
def test_verl_gets_the_attention_that_the_model_has(saved, family, typed, expected):
    chosen = made(saved(family), f"model.attn_implementation={typed}")
    changed = settings(chosen, job())["actor_rollout_ref.model.override_config.attn_implementation"]
    assert changed == expected
