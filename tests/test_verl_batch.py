"""A step's batch between verl and our estimators, the order of its rows, and the turns of its episodes."""

import asyncio
import random
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
from srl.rollout.engine import Sampling
from srl.train.compute_advantages import compute_advantages
from srl.train.questions import QuestionOrder, Splits
from srl.train.verl.batch import balanced_order, block_of, step_batch, tokens_by_trajectory, update_fields
from srl.train.verl.dataset import Questions, read_row, row
from srl.train.verl.engine import VerlEngine, server_params
from srl.train.verl.job import TORCH
from srl.trajectory import Question, Score
from srl.update.actor import mini_batches
from srl.update.kl import kl_controller
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection

MASK = [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
SCORES = [1.0, 0.0, 1.0, 0.0]
PADDING = (False, False, False, True)


def extra(**given):
    known = {"srl_id": "t", "srl_group": "q", "srl_valid": True, "srl_per_turn": None, "srl_turn_ends": []}
    return {**known, **given}


def batch(extras=None, **fields):
    scores = torch.zeros(4, 5)
    scores[:, -1] = torch.tensor(SCORES)  # where verl puts them: on the last column
    known = {
        "response_mask": torch.tensor(MASK), "rm_scores": scores, "old_log_probs": torch.full((4, 5), -1.0),
        "rollout_log_probs": torch.full((4, 5), -1.0), **fields,
    }  # fmt: skip
    return step_batch(known, extras or [extra(srl_id=f"t{n}") for n in range(4)], PADDING)


def advantages(step, coef=0.0, correction=NO_CORRECTION, **sets):
    config = load_config(None, None, "grpo", {"rollout.n": 3, **sets}).config
    grpo, control = manager.load("algorithm", "grpo"), kl_controller("fixed", coef)
    return compute_advantages(step, config, grpo, control, correction)


def test_rewards_stand_on_the_last_token_that_the_policy_wrote_or_on_that_of_each_turn():
    assert batch().rewards.tolist() == [[0, 0, 0, 1, 0], [0] * 5, [0, 0, 0, 0, 1], [0] * 5]
    rows = [extra(srl_per_turn=[0.25, 0.75], srl_turn_ends=[1, 3]), extra(), extra(), extra()]
    assert batch(rows).rewards[0].tolist() == [0, 0.25, 0, 0.75, 0]


def test_failed_episode_is_in_no_mask_no_baseline_and_no_mean():
    """Group q (1, failed, 1) and the row that fills up: nothing to tell apart, and a mean score of 1."""
    rows = [extra(srl_id=name, srl_valid=name != "b", srl_turn_ends=[1]) for name in "abcd"]
    step = batch(rows)
    assert step.valid.tolist() == [True, False, True, False]
    assert step.mask.sum(1).tolist() == [3, 0, 5, 0]
    assert len(set(step.group_ids.tolist())) == 2, "a row that fills the batch up has a group of its own"
    made = advantages(step)
    assert made.advantages.abs().max() == 0
    assert made.metrics["critic/score/mean"] == 1.0

    entropy = torch.arange(20.0).reshape(4, 5)
    tokens = tokens_by_trajectory(made, entropy, rows, PADDING, [4, 1, 5, 5])
    names = ("advantages", "returns", "trainer_logprobs", "entropies")
    assert {name: {of: len(values) for of, values in row.items()} for name, row in tokens.items()} == {
        name: dict.fromkeys(names, length) for name, length in {"a": 4, "b": 1, "c": 5}.items()
    }
    assert tokens["b"]["trainer_logprobs"] == [-1.0]
    assert tokens["c"]["entropies"] == [10.0, 11.0, 12.0, 13.0, 14.0]
    without = tokens_by_trajectory(made, None, [extra(), *rows[1:]], PADDING, [4, 1, 5, 5])
    assert set(without) == {"b", "c"}, "an episode without a turn has no token but the one for verl"
    assert "entropies" not in without["b"]


def test_fields_of_the_update_have_the_weights_of_a_sampler_that_is_apart():
    step = batch(rollout_log_probs=torch.full((4, 5), -2.0))
    fields = update_fields(advantages(step, correction=RolloutCorrection("token")))
    assert torch.equal(fields["response_mask"], step.mask)
    assert fields["rollout_is_weights"][0].tolist() == [2.0, 2.0, 1.0, 2.0, 1.0]
    assert "rollout_is_weights" not in update_fields(advantages(step))


@pytest.mark.slow
@pytest.mark.must_run
def test_episode_without_a_score_or_a_turn_reaches_verl_without_a_mask():
    from srl.train.verl.agent_loop import to_output

    engine = SimpleNamespace(steps=[], seconds=0.0)
    outputs = []
    for error in ("", "it is down"):
        trajectory = episode(0)
        mix = RewardMix(
            {"judge": 1.0},
            plugins={"judge": SimpleNamespace(score=lambda _, error=error: [Score(1.0, error=error)])},
        )
        [score] = asyncio.run(mix.score([trajectory]))
        outputs.append(to_output(trajectory, score, engine))
    failed = episode(0, passages=None)
    failed.segments, failed.end = failed.segments[:1], "failed"
    outputs.append(to_output(failed, Score(0.0), engine))
    assert [output.reward_score for output in outputs] == [1, 0, 0]
    assert [output.extra_fields["srl_valid"] for output in outputs] == [True, False, False]
    assert [sum(output.response_mask) > 0 for output in outputs] == [True, False, False]
    last = outputs[-1]
    assert (last.response_ids, last.response_logprobs) == ([failed.token_ids[-1]], [0.0]), (
        "verl needs a token"
    )
    assert last.extra_fields["srl_turn_ends"] == []


def shuffled():
    """Places and lengths of a batch's rows, in the order in which their episodes ended."""
    rng = random.Random(0)
    places = [(question, sample) for question in range(8) for sample in range(4)]
    rng.shuffle(places)
    return places, [rng.randrange(20, 400) for _ in places]


def verls_mini_batches(order, workers, size):
    """What verl's workers hold together in each of their mini-batches."""
    share, mine = len(order) // workers, size // workers
    parts = [order[worker * share : (worker + 1) * share] for worker in range(workers)]
    return [{row for part in parts for row in part[k : k + mine]} for k in range(0, share, mine)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("actor", "critic"), [(8, None), (16, 8), (32, None)])
def test_mini_batches_hold_the_rows_of_the_local_backends(workers, actor, critic):
    places, lengths = shuffled()
    local = sorted(range(len(places)), key=places.__getitem__)
    order = balanced_order(places, lengths, workers=workers, block=block_of(actor, critic, workers))
    for size in filter(None, (actor, critic)):
        expected = [{local[row] for row in index.tolist()} for index in mini_batches(len(local), size)]
        assert verls_mini_batches(order, workers, size) == expected
    if workers == 1:
        assert [places[row] for row in order] == sorted(places)


@pytest.mark.slow
@pytest.mark.must_run
def test_verls_own_iterator_cuts_the_workers_parts_so():
    pytest.importorskip("verl")
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    order = balanced_order(*shuffled(), workers=2, block=8)
    rows = TensorDict({"row": torch.tensor(order)}, batch_size=len(order))
    parts = [
        [part["row"].tolist() for part in tensordict_utils.make_iterator(
            share, mini_batch_size=4, epochs=1, seed=worker, dataloader_kwargs={"shuffle": False}
        )]
        for worker, share in enumerate(tensordict_utils.chunk_tensordict(rows, 2))
    ]  # fmt: skip
    together = [set(first) | set(second) for first, second in zip(*parts, strict=True)]
    assert together == verls_mini_batches(order, 2, 8)


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
    asked = Questions.of(splits, "train", config)
    assert [read_row(asked[position]["srl"])[0] for position in range(len(asked))] == [
        question for step in (1, 2, 3) for question in order.batch(step)
    ]
    assert Questions.of(splits, "val", config).questions == splits.val


SAMPLING = Sampling(
    max_tokens=7, temperature=0.5, top_p=0.9, stop=("</search>",), key=(0, "train", 1, "q", 2, 0, 1)
)


def test_each_server_is_asked_in_its_own_words_and_only_ours_gets_a_key():
    """vLLM and SGLang would loop in Python over requests with a seed each."""
    vllm, sglang, ours = (server_params(SAMPLING, name, {7, 5}) for name in ("vllm", "sglang", TORCH))
    assert vllm["max_tokens"] == ours["max_tokens"] == sglang["max_new_tokens"] == 7
    assert vllm["include_stop_str_in_output"]
    assert sglang["no_stop_trim"]
    assert ours["srl_key"] == list(SAMPLING.key)
    for params in (vllm, sglang):
        assert (params["stop"], params["stop_token_ids"]) == (["</search>"], [5, 7])
        assert params["temperature"] == 0.5
        assert not [name for name in params if "seed" in name or "key" in name]


@pytest.mark.parametrize("logprobs", [None, [], [-1.0]])
def test_a_turn_without_its_log_probs_is_an_error(logprobs):
    """With log-probs of 0 in their place the weights would be those of a sampler that is always certain."""

    async def generate(**request):
        return SimpleNamespace(token_ids=[5, 6], log_probs=logprobs, stop_reason="stop", extra_fields={})

    engine = VerlEngine(generate, Codec(byte_level_tokenizer()), "vllm")
    with pytest.raises(RuntimeError):
        asyncio.run(engine.generate("e1", [1], Sampling(max_tokens=4)))
