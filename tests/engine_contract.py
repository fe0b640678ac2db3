"""What every engine that runs a model holds to. A subclass of `EngineContract` makes the engine."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.tiny_models import byte_level_tokenizer, louder
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from srl.errors import SrlError, UserError
from srl.models.weights import add_lora, merged_weights
from srl.rollout.codec import Codec
from srl.rollout.delivery import NotDelivered, check_held, sampled
from srl.rollout.engine import Completion, Engine, Sampling

MAX_MODEL_LEN = 96
LETTERS = "who built the lighthouse of Velmar"
"""A prompt that is encoded letter by letter, as no tokenizer would: decoded and encoded again, it changes."""


Turn = Coroutine[Any, Any, Completion]


@dataclass
class Subject:
    """An engine under test. `model` is a copy of its model, with the same weights.

    `kill` makes the engine fail in the middle of what it generates from now on.
    """

    engine: Engine
    model: PreTrainedModel
    codec: Codec
    kill: Callable[[], None]

    def turn(self, ids: Sequence[int], *, name: str = "one", **sampling: Any) -> Turn:
        asked = {"max_tokens": 8, "temperature": 0.0, "key": (name, len(ids)), **sampling}
        return self.engine.generate(name, list(ids), Sampling(**asked))

    def run(self, *turns: Turn) -> list[Completion]:
        """The turns together, each of an episode of its own."""

        async def together() -> list[Completion]:
            async with asyncio.timeout(120):
                return list(await asyncio.gather(*turns))

        return asyncio.run(together())

    def greedy(self, ids: Sequence[int], **sampling: Any) -> Completion:
        """A greedy turn of an episode that has only this one."""
        found = self.run(self.turn(ids, **sampling))[0]
        self.engine.finish("one")
        return found


class EngineContract:
    """The contract. `subject` is made anew for each test."""

    tolerance = 1e-4
    """Largest difference of a log-prob from that of the model in transformers."""
    sizes: ClassVar[dict[str, int]] = {}
    weights_can_change = True
    tells_tokens = True

    def start(self, model: PreTrainedModel, codec: Codec, folder: Path) -> Iterator[Subject]:
        """Yield the engine of `model`, which may be changed; a copy is in the subject."""
        raise NotImplementedError

    def model(self, seed: int = 0) -> PreTrainedModel:
        return random_model(seed, **self.sizes)

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        yield from self.start(self.model(), Codec(byte_level_tokenizer()), tmp_path)

    def test_log_probs_are_those_of_the_ids_given_and_sampled_at_the_temperature(self, subject):
        """Of ids that were decoded and encoded on the way, or cut, the log-probs would be others."""
        ids = letters(subject)
        for temperature in (1.0, 0.7):
            (first,) = subject.run(subject.turn(ids, temperature=temperature, max_tokens=12))
            context = [*ids, *first.token_ids, *letters(subject)[:5]]
            (second,) = subject.run(subject.turn(context, temperature=temperature, max_tokens=12))
            subject.engine.finish("one")
            for before, completion in ((ids, first), (context, second)):
                assert len(completion.token_ids) == 12 or completion.stop_reason == "eos"
                expected = logprobs(subject.model, before, completion.token_ids, temperature)
                assert completion.logprobs == pytest.approx(expected, abs=self.tolerance)

    def test_token_that_completes_a_stop_string_is_returned_whole_with_its_overhang(self, subject):
        ids = letters(subject)
        said = subject.greedy(ids, max_tokens=12).token_ids
        end, stop = stop_inside_a_token(subject.codec, said)
        completion = subject.greedy(ids, max_tokens=12, stop=(stop,))
        assert completion.token_ids == said[: end + 1]
        assert completion.stop_reason == "stop"
        assert not subject.codec.decode(completion.token_ids).endswith(stop)
        assert len(completion.logprobs) == end + 1

    def test_turn_tells_its_tokens_as_they_are_sampled(self, subject):
        told: list[list[int]] = []
        ids = letters(subject)
        silent, completion = subject.run(
            subject.turn(ids, name="silent"), subject.turn(ids, on_tokens=lambda ids: told.append(list(ids)))
        )
        assert completion.token_ids == silent.token_ids
        expected = [list(completion.token_ids[: end + 1]) for end in range(8)] if self.tells_tokens else []
        assert told == expected[: len(told)]
        assert len(told) >= len(expected) - 1  # the last token may come with the completion

    def test_turn_ends_at_its_token_limit(self, subject):
        completion = subject.greedy(letters(subject), max_tokens=3)
        assert (len(completion.token_ids), completion.stop_reason) == (3, "length")

    def test_episodes_together_say_what_each_says_alone(self, subject):
        prompts = [letters(subject)[:length] for length in (5, 9, 14)]
        alone = [subject.greedy(ids) for ids in prompts]
        turns = [subject.turn(ids, name=f"e{len(ids)}") for ids in prompts]
        together = subject.run(*turns)
        assert [item.token_ids for item in together] == [item.token_ids for item in alone]

    def test_aborted_turn_leaves_the_others_and_the_engine_as_they_were(self, subject):
        ids = letters(subject)
        alone = subject.greedy(ids, max_tokens=20)

        async def abort() -> Completion:
            async with asyncio.timeout(120):
                gone = asyncio.ensure_future(subject.turn(ids, name="gone", max_tokens=40))
                other = asyncio.ensure_future(subject.turn(ids, name="other", max_tokens=20))
                for _ in range(5):
                    await asyncio.sleep(0)
                gone.cancel()
                await asyncio.wait([gone])
                assert gone.cancelled()
                subject.engine.finish("gone")
                return await other

        assert asyncio.run(abort()).token_ids == alone.token_ids
        assert subject.run(subject.turn(ids, name="gone", max_tokens=20))[0].token_ids == alone.token_ids

    def test_request_that_is_too_long_is_refused_in_one_line_and_the_others_go_on(self, subject):
        ids = letters(subject)
        alone = subject.greedy(ids)

        async def both() -> tuple[Completion, BaseException]:
            long = [*ids, *ids, *ids][:MAX_MODEL_LEN]
            found = await asyncio.gather(
                subject.turn(ids), subject.turn(long, name="long"), return_exceptions=True
            )
            return tuple(found)

        completion, error = asyncio.run(both())
        assert completion.token_ids == alone.token_ids
        assert isinstance(error, UserError)
        assert "\n" not in str(error)
        assert str(MAX_MODEL_LEN) in str(error)

    def test_after_sync_the_other_weights_generate(self, subject):
        ids, other = letters(subject), self.model(seed=1)
        before = subject.greedy(ids)
        if not self.weights_can_change:
            with pytest.raises(UserError, match=r"set rollout\.engine"):
                subject.engine.sync(merged_weights(other))
            return
        subject.engine.sleep()
        subject.engine.sync(merged_weights(other))
        subject.engine.wake()
        after = subject.greedy(ids)
        assert after.token_ids != before.token_ids
        (sampled,) = subject.run(subject.turn(ids, temperature=1.0))
        expected = logprobs(other, ids, sampled.token_ids, 1.0)
        assert sampled.logprobs == pytest.approx(expected, abs=self.tolerance)

    @pytest.mark.parametrize("adapted", [["v_proj"], ["up_proj"], ["down_proj"]])
    def test_weights_that_are_not_the_trainers_are_found_out(self, subject, adapted):
        """A sync that is dropped, one in which nothing is sent, and one that leaves out the adapter."""
        engine, trained = subject.engine, self.model(seed=1)
        add_lora(trained, 4, target_modules=adapted)
        for name, weight in trained.named_parameters():
            if "lora_B" in name:
                weight.data.normal_()
        sample: dict[str, Any] = {}
        weights = list(sampled(merged_weights(trained), sample))
        if not self.weights_can_change:
            assert engine.digests(sample) is None
            return
        with pytest.raises(NotDelivered):
            check_held(sample, engine.digests(sample))
        engine.sync(weights)
        assert len(engine.digests(sample)) == len(sample) == 7 * trained.config.num_hidden_layers
        check_held(sample, engine.digests(sample))
        with pytest.raises(NotDelivered):
            check_held({}, engine.digests({}))
        engine.sync(merged_weights(self.model(seed=1)))
        with pytest.raises(NotDelivered, match=adapted[0]):
            check_held(sample, engine.digests(sample))

    def test_engine_that_slept_says_what_it_said_before(self, subject):
        ids = letters(subject)
        before = subject.greedy(ids)
        subject.engine.sleep()
        subject.engine.wake()
        assert subject.greedy(ids).token_ids == before.token_ids

    def test_reset_forgets_episodes_that_were_not_finished(self, subject):
        ids = letters(subject)
        (first,) = subject.run(subject.turn(ids))
        subject.engine.reset()
        (again,) = subject.run(subject.turn(ids))
        assert again.token_ids == first.token_ids

    def test_engine_that_dies_in_the_middle_of_a_batch_fails_every_caller(self, subject):
        ids = letters(subject)
        subject.greedy(ids)

        async def batch() -> list[Any]:
            turns = [
                asyncio.ensure_future(subject.turn(ids, name=f"e{number}", max_tokens=40))
                for number in range(6)
            ]
            subject.kill()
            async with asyncio.timeout(120):
                return await asyncio.gather(*turns, return_exceptions=True)

        found = asyncio.run(batch())
        assert len(found) == 6
        assert all(isinstance(error, Exception) for error in found), found
        assert all("\n" not in str(error) for error in found if isinstance(error, SrlError))


def random_model(seed: int, **sizes: int) -> PreTrainedModel:
    """A random model whose logits are far apart, and which does not repeat itself when it is greedy."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 48, "max_position_embeddings": 512, **sizes}  # fmt: skip
    config = Qwen2Config(
        vocab_size=400, tie_word_embeddings=False, eos_token_id=0, pad_token_id=1, bos_token_id=None, **shape
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return louder(Qwen2ForCausalLM(config))


def letters(subject: Subject) -> list[int]:
    tokenizer = subject.codec.tokenizer
    ids = [token for letter in LETTERS for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
    return ids


def logprobs(
    model: PreTrainedModel, before: Sequence[int], said: Sequence[int], temperature: float
) -> list[float]:
    """log-softmax(logits / temperature) of the ids `said` after `before`, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *said]])).logits[0, len(before) - 1 : -1]
    table = torch.log_softmax(logits.double() / temperature, dim=-1)
    return table[range(len(said)), list(said)].tolist()


def stop_inside_a_token(codec: Codec, said: Sequence[int]) -> tuple[int, str]:
    """The position of a token, and a text that is first completed inside it, before its last character."""
    for end in range(1, len(said)):
        before, text = codec.decode(said[:end]), codec.decode(said[: end + 1])
        stop = text[len(before) - 1 : len(before) + 1]
        if len(text) > len(before) + 1 and text.startswith(before) and text.find(stop) == len(before) - 1:
            return end, stop
    raise AssertionError("no token of two characters; take another seed")
