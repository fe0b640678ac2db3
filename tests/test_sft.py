"""Fine-tuning on demonstrations: the very tokens and masks of a rollout, and a loss by hand."""

import asyncio
from dataclasses import replace

import pytest
import torch
from tests.rows import gradients, trajectory
from tests.scripts import TableSearch
from tests.tiny_models import new_model
from tests.training import OPTIONS, PASSAGES, tokenizer

from srl.config.sections import Sft
from srl.data.demonstration_file import write_demonstrations
from srl.errors import UserError
from srl.protocol import template
from srl.rollout.codec import Codec
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.rollout.torch_engine import TorchEngine
from srl.train.sft import accumulate, batches, demonstrate, demonstrated, fine_tune_step, token_weights
from srl.trajectory import Question, Search
from srl.update.batch import collate
from srl.update.optimiser import Optimiser

TURNS = [
    "<think> I think velmar </think> <search> velmar </search>",
    "<think> velmar </think> <answer> red </answer>",
]


def shown(turns=TURNS, name="demo/0"):
    return Question(name, "what flag has velmar", ("red",), metadata={"turns": list(turns)})


def play(demonstrations, search=None, codec=None, options=OPTIONS, prompt="tiny"):
    return demonstrate(demonstrations, environment(search, codec, options, prompt))


def environment(search=None, codec=None, options=OPTIONS, prompt="tiny"):
    search, codec = search or TableSearch(PASSAGES[:1]), codec or Codec(tokenizer())
    return Environment(codec, template(prompt), options, search)


def policy():
    return new_model("qwen2", vocab_size=40, layers=1, width=16, heads=2, ffn=16, max_length=64)


LONG = f"<think> {'velmar ' * 30}</think> <search> velmar </search>"
NOT_AS_WRITTEN = {
    "cut": [LONG, TURNS[1]],
    "too many searches": [TURNS[0]] * 5 + TURNS[1:],
    "no answer": [TURNS[0]],
    "after the answer": [*TURNS, TURNS[1]],
    "after its tag": [f"{TURNS[0]} <think> velmar", TURNS[1]],
    "no action": ["<think> velmar </think>", TURNS[1]],
}


@pytest.mark.parametrize("kind", NOT_AS_WRITTEN)
def test_a_demonstration_that_does_not_play_as_it_is_written_is_left_out(tmp_path, kind):
    file, notes, bad = tmp_path / "mine.jsonl", [], shown(NOT_AS_WRITTEN[kind], "bad")
    write_demonstrations(file, [shown(), bad])
    assert [item.question.id for item in demonstrated(file, environment(), notes.append)] == ["demo/0"]
    assert "1 of 2" in notes[0]
    write_demonstrations(file, [bad])
    with pytest.raises(UserError):
        demonstrated(file, environment(), notes.append)


def test_a_demonstration_of_a_training_question_has_the_prompt_of_its_file(tmp_path):
    own = ({"role": "user", "content": "find it : what flag has velmar"},)
    file, other = tmp_path / "mine.jsonl", replace(shown(name="other"), text="what flag has velmar red")
    write_demonstrations(file, [shown(), shown([TURNS[1]]), other])
    asked = [Question("demo/0", shown().text, ("red",), prompt=own)]
    found = demonstrated(file, environment(), training_questions=asked)
    assert [item.question.prompt == own for item in found] == [True, True, False]
    assert found[0].segments[0].token_ids == tuple(Codec(tokenizer()).encode_prompt(own)[0])
    assert [item.question.prompt for item in demonstrated(file, environment())][2] == found[2].question.prompt


def test_a_demonstration_is_the_episode_of_a_model_that_says_the_same():
    """A model that has learnt one demonstration by heart plays it: the same tokens, masks and ends."""
    codec = Codec(tokenizer())
    (demonstration,) = play([shown()])
    learner = new_model(
        "qwen2", vocab_size=len(tokenizer()), layers=1, width=32, heads=2, ffn=32, max_length=256
    )
    optimiser = Optimiser(learner.parameters(), lr=1e-2)
    told = [fine_tune_step(learner, optimiser, [demonstration]) for _ in range(40)]
    assert told[-1]["sft/loss"] < told[0]["sft/loss"]
    engine = TorchEngine(learner, codec, max_num_seqs=1, max_model_len=160)
    options = EpisodeOptions(
        **{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__} | {"temperature": 0.0}
    )
    (played,) = asyncio.run(environment(options=options, codec=codec).play_all(engine, [shown()]))
    assert played.token_ids == demonstration.token_ids
    assert played.response_mask == demonstration.response_mask
    assert [segment.kind for segment in played.segments] == ["prompt", "policy", "observation", "policy"]
    assert (played.end, played.answer, played.valid_searches) == ("answered", demonstration.answer, 1)


def test_a_failed_search_stops_the_demonstrations():
    broken = TableSearch(outcomes=[Search("velmar", status="refused", error="nobody listens")] * 2)
    with pytest.raises(
        UserError, match=r"search failed in 1 of 1 demonstrations \(refused: nobody listens\)"
    ):
        play([shown()], broken)
    passing = TableSearch(outcomes=[Search("velmar", status="timed_out")])
    (trajectory,) = play([shown()], passing)
    assert trajectory.valid, "one that fails once is asked again"


def test_weights_are_one_on_the_policys_tokens_and_less_on_what_it_read():
    batch = collate([trajectory("ppaaoa"), trajectory("pa")])
    assert token_weights(batch, 0.25).tolist() == [[0, 0.25, 1, 1, 0.25, 1], [0, 1, 0, 0, 0, 0]]
    assert token_weights(batch, 0.0).tolist() == batch.response_mask.tolist()


def by_hand(learner, batch, weight):
    """Σ w·(−log p) / Σ w from the model's own logits, and the same over the policy's tokens alone."""
    logits = learner(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none"
    ).view(len(batch), -1)
    weights, own = token_weights(batch, weight)[:, 1:], batch.response_mask[:, 1:]
    return (nll * weights).sum() / weights.sum(), (nll * own).sum() / own.sum()


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_the_weighted_cross_entropy_of_the_whole_batch(weight):
    learner = policy()
    batch = collate([trajectory(spec, seed=n) for n, spec in enumerate(("ppaaooaa", "paa", "ppppa"))])
    loss, own = by_hand(learner, batch, weight)
    loss.backward()
    expected = gradients(learner)
    for budget in (1, 12, 1000):
        metrics = accumulate(learner, batch, observation_weight=weight, max_tokens=budget)
        assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["sft/policy_loss"] == pytest.approx(own.item(), rel=1e-5)
        for name, gradient in gradients(learner).items():
            torch.testing.assert_close(gradient, expected[name], msg=name, rtol=1e-4, atol=1e-6)


def test_every_demonstration_comes_once_an_epoch():
    rows = [trajectory("pa", seed=n) for n in range(6)]
    found = list(batches(rows, Sft(batch_size=2, steps=9), seed=0))
    assert all(len(batch) == 2 for batch in found)
    for epoch in range(3):
        seen = [id(row) for batch in found[3 * epoch : 3 * epoch + 3] for row in batch]
        assert sorted(seen) == sorted(map(id, rows))
    again = list(batches(rows, Sft(batch_size=2, steps=9), seed=0))
    other = list(batches(rows, Sft(batch_size=2, steps=9), seed=1))
    assert again == found
    assert other != found
