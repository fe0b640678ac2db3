"""A step's batch between verl and our estimators, and how a turn is asked of verl's servers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.store_builder import episode
from tests.tiny_models import byte_level_tokenizer
from tests.training import config as towns
from tests.training import questions

from srl.config import load_config
from srl.plugins import manager
from srl.reward import RewardMix
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling, stop_reason
from srl.train.compute_advantages import compute_advantages, token_rewards
from srl.train.episodes import Splits
from srl.train.question_order import QuestionOrder
from srl.train.verl.batch import (
    returns_and_values,
    step_batch,
    token_columns,
    tokens_by_trajectory,
    update_fields,
)
from srl.train.verl.dataset import Questions, read_row, row
from srl.train.verl.engine import VerlEngine, server_params
from srl.train.verl.job import TORCH
from srl.trajectory import Question, Score
from srl.update.kl import kl_controller
from srl.update.rollout_correction import Rejection, RolloutCorrection

MASK = [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
SCORES = [1.0, 0.0, 1.0, 0.0]


def extra(**given):
    known = {"srl_id": "t", "srl_group": "q", "srl_valid": True, "srl_per_turn": None, "srl_turn_ends": []}
    return {**known, **given}


def batch(extras=None, padding=(False, False, False, True), **fields):
    scores = torch.zeros(4, 5)
    scores[:, -1] = torch.tensor(SCORES)  # where verl puts them: on the last column
    known = {
        "response_mask": torch.tensor(MASK), "rm_scores": scores, "old_log_probs": torch.full((4, 5), -1.0),
        "rollout_log_probs": torch.full((4, 5), -1.0), **fields,
    }  # fmt: skip
    given = extras or [extra(srl_id=f"t{n}") for n in range(4)]
    return step_batch(known, given, list(padding))


def test_score_stands_on_the_last_token_that_the_policy_wrote():
    rewards = token_rewards(batch())
    assert rewards[0].tolist() == [0, 0, 0, 1, 0]
    assert rewards[2].tolist() == [0, 0, 0, 0, 1]
    assert rewards[3].tolist() == [0, 0, 0, 0, 0]


def test_reward_of_each_turn_stands_on_its_last_token():
    rows = [extra(srl_per_turn=[0.25, 0.75], srl_turn_ends=[1, 3]), extra(), extra(), extra()]
    assert token_rewards(batch(rows))[0].tolist() == [0, 0.25, 0, 0.75, 0]


def test_failed_episode_and_filled_up_row_lose_their_mask():
    rows = [extra(), extra(srl_valid=False), extra(), extra()]
    made = batch(rows)
    assert made.valid.tolist() == [True, False, True, False]
    assert made.mask.sum(1).tolist() == [3, 0, 5, 0]
    assert len(set(made.groups)) == 2, "a row that fills the batch up has a group of its own"


@pytest.mark.slow
@pytest.mark.must_run
def test_episode_that_a_reward_cannot_score_reaches_verl_without_a_mask():
    from srl.train.verl.agent_loop import to_output

    class Down:
        def score(self, trajectories):
            return [Score(1.0, error="it is down" * item.sample) for item in trajectories]

    mix, engine = RewardMix({"judge": 1.0}, plugins={"judge": Down()}), SimpleNamespace(steps=[], seconds=0.0)
    sent = []
    for sample in (0, 1):
        trajectory = replace(episode(0), sample=sample)
        [score] = asyncio.run(mix.score([trajectory]))
        sent.append(to_output(trajectory, score, engine))
    assert [output.reward_score for output in sent] == [1, 0]
    assert [sum(output.response_mask) > 0 for output in sent] == [True, False]
    assert [output.extra_fields["srl_valid"] for output in sent] == [True, False]


@pytest.mark.slow
@pytest.mark.must_run
def test_episode_that_fails_before_its_first_turn_has_a_masked_token_for_verl():
    from srl.train.verl.agent_loop import to_output

    made = episode(0, passages=None)
    made.segments, made.end = made.segments[:1], "failed"
    output = to_output(made, Score(0.0), SimpleNamespace(steps=[], seconds=0.0))
    assert (output.response_ids, output.response_mask) == ([made.token_ids[-1]], [0])
    assert output.response_logprobs == [0.0]
    row = output.extra_fields
    assert (row["srl_valid"], row["srl_turn_ends"]) == (False, [])
    assert tokens_by_trajectory({"advantages": torch.zeros(1, 1)}, [row], [False], [1]) == {}


def test_failed_episode_is_in_no_baseline_and_no_mean():
    """Groups q (1, failed, 1) and the filled-up row: nothing to tell apart, and a mean score of 1."""
    rows = [extra(srl_id=name, srl_valid=name != "b", srl_turn_ends=[1]) for name in "abcd"]
    config = load_config(None, None, "grpo", {"rollout.n": 3}).config
    step = batch(rows)
    made = compute_advantages(step, config, manager.load("algorithm", "grpo"), kl_controller("fixed", 0.0))
    assert made.advantages.abs().max() == 0
    assert made.metrics["critic/score/mean"] == 1.0
    assert returns_and_values(step, made)["critic/returns/max"] == 0
    entropy = torch.arange(20.0).reshape(4, 5)
    columns = token_columns(step, made, entropy)
    tokens = tokens_by_trajectory(columns, rows, [False, False, False, True], [4, 1, 5, 5])
    names = ("advantages", "returns", "trainer_logprobs", "entropies")
    lengths = {"a": 4, "b": 1, "c": 5}
    assert {name: {of: len(values) for of, values in row.items()} for name, row in tokens.items()} == {
        name: dict.fromkeys(names, length) for name, length in lengths.items()
    }
    assert tokens["b"]["trainer_logprobs"] == [-1.0]
    assert tokens["c"]["entropies"] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert "entropies" not in token_columns(step, made, None)


def test_kl_in_the_reward_is_taken_from_the_policys_tokens_only():
    config = load_config(None, None, "grpo", {"rollout.n": 3, "algorithm.use_kl_in_reward": True}).config
    given = batch(ref_log_prob=torch.full((4, 5), -1.5))
    made = compute_advantages(given, config, manager.load("algorithm", "grpo"), kl_controller("fixed", 0.1))
    torch.testing.assert_close(made.rewards[0], torch.tensor([-0.05, -0.05, 0.0, 0.95, 0.0]))
    assert made.metrics["critic/kl"] == pytest.approx(0.5)


def test_rejected_episodes_leave_both_masks_that_verl_reads_and_keep_their_place_in_the_group():
    """The first row is off by e^1 a token, so its mean is out of bounds; the padding has no mask."""
    config = load_config(None, None, "grpo", {"rollout.n": 3}).config
    sampler = torch.full((4, 5), -1.0)
    sampler[0] -= 1.0
    step = batch(rollout_log_probs=sampler)
    rejection = Rejection("seq_mean_k1", math.log(0.9), math.log(1.1))
    step.correction = RolloutCorrection("token", rejections=(rejection,))
    made = compute_advantages(step, config, manager.load("algorithm", "grpo"), kl_controller("fixed", 0.0))
    fields = update_fields(step, made)
    kept = step.mask * torch.tensor([[0], [1], [1], [0]])
    assert torch.equal(fields["response_mask"], kept)
    assert torch.equal(fields["loss_mask"], kept), "verl divides by the tokens of this one"
    assert fields["rollout_is_weights"][0].tolist() == [2.0, 2.0, 1.0, 2.0, 1.0]
    assert made.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    assert float(made.advantages[1, 0]) < 0 < float(made.advantages[2, 0])
    step.correction = RolloutCorrection()
    everything = compute_advantages(
        step, config, manager.load("algorithm", "grpo"), kl_controller("fixed", 0.0)
    )
    assert torch.equal(everything.advantages, made.advantages), "a rejected episode stays in the baseline"
    assert "loss_mask" not in update_fields(step, everything)


@pytest.mark.parametrize("given", [None, [], [-1.0]])
def test_a_turn_without_its_log_probs_is_an_error(given):
    """With log-probs of 0 in their place the weights would be those of a sampler that is always certain."""

    async def generate(**asked):
        return SimpleNamespace(token_ids=[5, 6], log_probs=given, stop_reason="stop", extra_fields={})

    engine = VerlEngine(generate, Codec(byte_level_tokenizer()), "vllm")
    with pytest.raises(RuntimeError, match=r"e1: the server returned \d log-probs for 2 tokens"):
        asyncio.run(engine.generate("e1", [1], Sampling(max_tokens=4)))


def test_question_comes_out_of_verls_row_as_it_went_in():
    question = Question(
        "q1", "who?", ("a", "b"), "nq", "train", ({"role": "user", "content": "who?"},), {"hops": 2}
    )
    made = row(question, "val", 5)
    assert read_row(made["srl"]) == (question, "val")
    assert (made["index"], made["data_source"]) == (5, "nq")


def test_training_asks_the_questions_of_all_steps_in_the_local_backends_order(tmp_path):
    config = towns(tmp_path, "grpo", trainer__total_training_steps=3)
    splits = Splits(questions("train", 8), questions("val", 6))
    order = QuestionOrder(splits.train, 4, 0)
    expected = [question for step in (1, 2, 3) for question in order.batch(step)]
    asked = Questions.of(splits, "train", config)
    assert [read_row(asked[position]["srl"]) for position in range(len(asked))] == [
        (question, "train") for question in expected
    ]


def test_validation_has_its_own_questions_and_one_of_training_where_there_are_none(tmp_path):
    config = towns(tmp_path, "grpo")
    splits = Splits(questions("train", 8), questions("val", 6))
    assert len(Questions.of(splits, "val", config)) == 6
    (only,) = Questions.of(splits, "test", config).questions
    assert only == splits.train[0]


SAMPLING = Sampling(
    max_tokens=7, temperature=0.5, top_p=0.9, stop=("</search>",), key=(0, "train", 1, "q", 2, 0, 1)
)


def test_each_server_is_asked_in_its_own_words():
    vllm, sglang, ours = (server_params("r", SAMPLING, name) for name in ("vllm", "sglang", TORCH))
    assert vllm["max_tokens"] == ours["max_tokens"] == sglang["max_new_tokens"] == 7
    assert vllm["include_stop_str_in_output"]
    assert sglang["no_stop_trim"]
    assert "srl_key" not in vllm
    assert ours["srl_key"] == list(SAMPLING.key)
    assert all(
        params["stop"] == ["</search>"] and params["temperature"] == 0.5 for params in (vllm, sglang, ours)
    )


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_no_server_gets_a_seed_for_a_request_which_it_would_loop_over_in_python(server):
    assert not [name for name in server_params("r", SAMPLING, server) if "seed" in name or "key" in name]


def test_why_a_turn_ended_is_read_off_its_ids():
    codec = Codec(byte_level_tokenizer())
    stop = codec.encode_text("where is it</search>")
    assert stop_reason(stop, SAMPLING.stop, codec) == "stop"
    assert stop_reason(codec.encode_text("and so on"), SAMPLING.stop, codec) == "length"
    assert stop_reason([*stop, *codec.eos_ids], SAMPLING.stop, codec) == "eos"
