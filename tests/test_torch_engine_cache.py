"""What the cache gives is what a full forward gives, for any mixture of lengths, turns and neighbours."""

import asyncio
import inspect
import logging

import numpy as np
import pytest
import torch
from tests import model_families as families
from tests.scripts import rollout
from tests.tiny_models import byte_level_tokenizer, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from srl.advantage import masked_mean
from srl.models.load import cast_head, load_model
from srl.protocol import TEMPLATES
from srl.rollout.cached_forward import CachedForward, PlainForward, padded_groups
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.episode import EpisodeOptions
from srl.rollout.slot_table import SlotTable
from srl.rollout.torch_engine import TorchEngine
from srl.trajectory import Question
from srl.update.batch import collate
from srl.update.logprobs import batched_stats

VOCABULARY = 400
FLOAT32_ROUNDING = 1e-6


def new_engine(model, **options) -> TorchEngine:
    settings = {"max_num_seqs": 6, "max_model_len": 300} | options
    return TorchEngine(model, Codec(byte_level_tokenizer()), **settings)


async def converse(engine, name, plan, temperature=0.0):
    """One episode: each entry of `plan` is what is read before a turn, and how long the turn is."""
    ids, turns = [], []
    for turn, (read, length) in enumerate(plan):
        ids += read
        sampling = Sampling(max_tokens=length, temperature=temperature, key=(name, turn))
        completion = await engine.generate(name, list(ids), sampling)
        turns.append((len(ids), completion))
        ids += completion.token_ids
        await asyncio.sleep(0)
    engine.finish(name)
    return ids, turns


def converse_all(engine, plans, temperature=0.0):
    async def main():
        episodes = (converse(engine, f"e{i}", plan, temperature) for i, plan in enumerate(plans))
        return await asyncio.gather(*episodes)

    return asyncio.run(main())


def plans(count, seed=0):
    """Episodes of one to four turns, all of different lengths."""
    rng = np.random.default_rng(seed)
    return [
        [
            (rng.integers(2, VOCABULARY, rng.integers(1, 40)).tolist(), int(rng.integers(1, 12)))
            for _ in range(rng.integers(1, 5))
        ]
        for _ in range(count)
    ]


def assert_as_full_forward(model, episodes, temperature=1.0, greedy=False):
    """Log-probs (and greedy choices) of every sampled token are those of a forward over the whole."""
    for ids, turns in episodes:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        logprobs = torch.log_softmax(logits / temperature, -1)
        for start, completion in turns:
            where = torch.arange(start - 1, start - 1 + len(completion.token_ids))
            expected = logprobs[where, torch.tensor(completion.token_ids)]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-4)
            if greedy:
                assert logits[where].argmax(-1).tolist() == list(completion.token_ids)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_greedy_turns_are_those_of_a_full_forward(kind):
    model = tiny_model(kind)
    engine = new_engine(model)
    assert isinstance(engine._forward, CachedForward)
    episodes = converse_all(engine, plans(6))
    assert len(episodes) == 6
    assert_as_full_forward(model, episodes, greedy=True)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_sampled_logprobs_are_those_of_a_full_forward_at_the_temperature(kind):
    model = tiny_model(kind)
    episodes = converse_all(new_engine(model), plans(6, seed=1), temperature=0.7)
    assert_as_full_forward(model, episodes, temperature=0.7)


def test_slots_are_reused_and_grow_without_a_trace_of_what_was_there():
    model = tiny_model()
    engine = new_engine(model, max_num_seqs=3)
    long = [([5] * 250, 30)]
    episodes = converse_all(engine, [*plans(5, seed=2), long, *plans(5, seed=3)])
    assert_as_full_forward(model, episodes, greedy=True)
    assert engine._forward.cache.access.capacity > 256


def test_sampler_logprobs_of_whole_episodes_are_those_the_trainer_would_compute():
    model, codec = tiny_model(), Codec(byte_level_tokenizer())
    engine = new_engine(model, max_num_seqs=4, max_model_len=900)
    questions = [
        Question(f"q/{i}", f"Who built the lighthouse of Velmar {i * '?'}", ("x",)) for i in range(2)
    ]
    options = EpisodeOptions(max_turns=2, max_turn_tokens=12)
    trajectories = asyncio.run(
        rollout(questions, engine, None, codec=codec, template=TEMPLATES["search-r1"], options=options, n=3)
    )
    assert len({tuple(trajectory.token_ids) for trajectory in trajectories}) == 6
    for trajectory in trajectories:
        ids, mask = torch.tensor([trajectory.token_ids]), torch.tensor(trajectory.response_mask).bool()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
        expected = logprobs.gather(1, ids[0, 1:, None])[:, 0][mask[1:]]
        sampled = torch.tensor(trajectory.logprobs)[mask]
        torch.testing.assert_close(sampled, expected, rtol=1e-4, atol=1e-4)


def test_a_head_in_float32_brings_sampler_and_trainer_closer_in_bfloat16():
    """The same episodes; the trunk rounds alike in both, so what is left is what the head rounded.

    Where the processor has no bfloat16, it is computed in float32, and the head rounds alike in both too.
    """
    gaps = []
    for cast in (False, True):
        model, codec = tiny_model(dtype=torch.bfloat16), Codec(byte_level_tokenizer())
        if cast:
            cast_head(model)
        engine = new_engine(model, max_num_seqs=4, max_model_len=900)
        options = EpisodeOptions(max_turns=2, max_turn_tokens=24)
        question = Question("q", "Who built the lighthouse of Velmar?", ("x",))
        trajectories = asyncio.run(
            rollout(
                [question], engine, None, codec=codec, template=TEMPLATES["search-r1"], options=options, n=8
            )
        )
        batch = collate(trajectories)
        stats = batched_stats(model, batch, batch.response_mask, max_tokens=2048)
        gaps.append(float(masked_mean((stats.logprobs - batch.sampler_logprobs).abs(), batch.response_mask)))
    assert gaps[1] < max(0.8 * gaps[0], FLOAT32_ROUNDING)


def test_long_idle_row_is_not_disturbed_by_shorter_neighbours():
    model = tiny_model()
    engine = new_engine(model)

    async def main():
        ids = list(range(2, 62))
        first = await engine.generate("long", list(ids), Sampling(max_tokens=2, temperature=0.0))
        await asyncio.gather(*(converse(engine, f"e{i}", [([7, 8, i], 20)]) for i in range(2, 6)))
        start, ids = len(ids), [*ids, *first.token_ids, 5]
        second = await engine.generate("long", list(ids), Sampling(max_tokens=9, temperature=0.0))
        return [*ids, *second.token_ids], [(start, first), (len(ids), second)]

    assert_as_full_forward(model, [asyncio.run(main())], greedy=True)


def test_feeding_some_rows_leaves_what_is_stored_as_it_was_to_the_bit():
    forward, table, turn = CachedForward(tiny_model(), 4, 100), SlotTable(4), Sampling(max_tokens=9)
    lengths = [30, 6, 9, 12]
    with torch.no_grad():
        for row, length in enumerate(lengths):
            table.begin(row, list(range(2, 2 + length)), turn, 0)
        forward.feed(table, np.arange(4))
        table.append(np.arange(4), np.full(4, 50), np.zeros(4, dtype=np.float32))
        before = [layer.keys.clone() for layer in forward.cache.layers]
        forward.feed(table, np.array([1, 2, 3]))  # a step in which row 0 is idle
        table.append(np.array([1, 2, 3]), np.full(3, 51), np.zeros(3, dtype=np.float32))
        table.begin(1, [*range(2, 8), 50, 51, *range(60, 80)], turn, 0)
        table.begin(2, [*range(2, 11), 50, 51, *range(60, 70)], turn, 0)
        forward.feed(table, np.array([1, 2]))  # a long span and a shorter one, padded
    for layer, keys in zip(forward.cache.layers, before, strict=True):
        for row, length in enumerate(lengths):
            assert torch.equal(layer.keys[row, :, :length], keys[row, :, :length])
        assert not layer.keys[0, :, lengths[0] :].any()


def test_a_few_rows_among_many_idle_slots_are_gathered_and_right():
    model = tiny_model()
    engine = new_engine(model, max_num_seqs=12)
    short = [([7, 8, 9, 10 + i], 1) for i in range(9)]
    episodes = converse_all(engine, [*([turn] * 4 for turn in short), *plans(2, seed=4)])
    assert_as_full_forward(model, episodes, greedy=True)


class Fed:
    """A cached forward over a table, which counts the ids that go through the model."""

    def __init__(self, model, slots):
        self.model, self.table, self.forward = model, SlotTable(slots), CachedForward(model, slots, 200)
        self.ids = 0
        model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module, inputs):
        self.ids += inputs[0].numel()

    def turn(self, rows, texts, tokens):
        """Begin a turn of each row, compare the logits with a full forward's, and let `tokens` be drawn."""
        for row, text in zip(rows, texts, strict=True):
            self.table.begin(row, text, Sampling(max_tokens=1), 0)
        with torch.no_grad():
            self.ids = 0
            logits = self.forward.feed(self.table, np.array(rows))
            fed = self.ids
            full = torch.cat([self.model(torch.tensor([text])).logits[:, -1] for text in texts])
        torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)
        self.table.append(np.array(rows), np.array(tokens), np.zeros(len(rows), dtype=np.float32))
        return fed


def span(first, length):
    return [20 + (first * 37 + place) % 300 for place in range(length)]


def test_samples_that_have_written_the_same_read_on_together():
    fed, prompt, passage = Fed(tiny_model(), 4), span(1, 30), span(2, 40)
    assert fed.turn([2, 0, 3], [prompt] * 3, [5, 5, 6]) == 30
    texts = [[*prompt, 5, *passage], [*prompt, 5, *passage], [*prompt, 6, *passage]]
    assert fed.turn([2, 0, 3], texts, [7, 8, 9]) == 2 * 41
    texts = [[*text, token, *passage] for text, token in zip(texts, [7, 8, 9], strict=True)]
    assert fed.turn([2, 0, 3], texts, [7, 8, 9]) == 3 * 41


def test_groups_to_pad_hold_everyone_once_and_are_at_most_a_quarter_padding():
    counts = np.random.default_rng(0).integers(1, 500, 100)
    groups = list(padded_groups(counts, 2000, 0.75))
    assert sorted(np.concatenate(groups).tolist()) == list(range(100))
    for group in groups:
        assert counts[group].max() * len(group) <= 2000 or len(group) == 1
        assert 4 * counts[group].min() >= 3 * counts[group].max()


def mamba():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config).eval()


def test_model_that_our_cache_does_not_fit_computes_all_again_and_says_so(caplog):
    model = mamba()
    with caplog.at_level(logging.WARNING):
        engine = new_engine(model)
    assert isinstance(engine._forward, PlainForward)
    assert len([record for record in caplog.records if record.name.startswith("srl")]) == 1
    assert_as_full_forward(model, converse_all(engine, plans(4)), greedy=True)


WINDOWED = ["mistral", "starcoder2", "phi3", "gemma2", "gemma3_text", "gemma4_text", "olmo3", "cohere2"]
WINDOWED += ["exaone4", "modernbert-decoder", "llama4_text", "gpt_oss"]


@pytest.mark.parametrize("graphs", [False, True], ids=["in place", "by index"])
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_and_chunks_are_masks_over_the_one_cache(family, graphs):
    """Episodes are up to ten times as long as a window, and rows of all lengths share the steps."""
    model = families.of_sizes(family, **families.FAMILIES[family] | {"sliding_window": families.WINDOW})
    engine = new_engine(model, graphs=graphs)
    assert isinstance(engine._forward, CachedForward)
    episodes = converse_all(engine, plans(6))
    assert max(len(ids) for ids, _ in episodes) > 5 * families.WINDOW
    assert_as_full_forward(model, episodes, greedy=True)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_are_capped_where_the_models_own_attention_caps_them(attention):
    """transformers' sdpa leaves the cap out; the trainer computes with it all the same."""
    model = families.of_sizes("gemma2", **families.FAMILIES["gemma2"] | {"attn_logit_softcapping": 0.2})
    model.set_attn_implementation(attention)
    engine = new_engine(model)
    assert isinstance(engine._forward, CachedForward)
    for ids, turns in converse_all(engine, plans(6)):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        for start, turn in turns:
            where = torch.arange(start - 1, start - 1 + len(turn.token_ids))
            expected = logprobs[where, torch.tensor(turn.token_ids)]
            torch.testing.assert_close(torch.tensor(turn.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_model_whose_scores_are_capped_is_loaded_with_the_attention_that_caps_them(tmp_path):
    families.of_sizes("gemma2", **families.FAMILIES["gemma2"]).save_pretrained(tmp_path)
    assert load_model(tmp_path).config._attn_implementation == "eager"
    assert load_model(tmp_path, attn_implementation="sdpa").config._attn_implementation == "sdpa"


def test_model_with_an_attention_of_its_own_has_a_cache_that_is_read_by_index():
    model = families.of_sizes("nemotron")
    engine = new_engine(model)
    assert isinstance(engine._forward, CachedForward)
    assert_as_full_forward(model, converse_all(engine, plans(4)), greedy=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_half_precision_is_no_reason_to_give_up_the_cache(dtype):
    model = tiny_model(dtype=dtype, layers=6)
    assert isinstance(new_engine(model)._forward, CachedForward)


def test_learned_positions_work_with_the_cache():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=400)
    )
    engine = new_engine(model.eval())
    assert isinstance(engine._forward, CachedForward)
    assert_as_full_forward(model, converse_all(engine, plans(4)), greedy=True)


def test_model_whose_cached_logits_differ_is_found_out(caplog):
    model = tiny_model()
    forward = model.forward

    def forgetful(*args, position_ids=None, **kwargs):
        return forward(*args, **kwargs)

    forgetful.__signature__ = inspect.signature(forward)
    model.forward = forgetful
    with caplog.at_level(logging.WARNING):
        engine = new_engine(model)
    assert isinstance(engine._forward, PlainForward)
    assert "without a key-value cache" in caplog.text
