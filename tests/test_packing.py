"""Packed rows have the log-probs, values and gradients of padded ones, and no tensor of tokens by tokens."""

import copy
import inspect
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import experience, gradients, trajectory
from tests.tiny_models import louder, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from srl.models.load import recompute_layers
from srl.models.weights import add_lora, save_model
from srl.update import logits, packing
from srl.update.batch import Batch, collate
from srl.update.critic import Critic
from srl.update.logprobs import token_stats

SPECS = ("ppaaoaa" * 3, "paaa", "ppppafffa", "paaoa" * 5)


def batch_of(specs=SPECS):
    return collate([trajectory(spec, vocabulary=400) for spec in specs])


def of_library(name, **changes):
    """A small model of another kind, with weights large enough that tokens matter to each other."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    return louder(transformers.AutoModelForCausalLM.from_config(config))


def padded(model):
    """A copy of the model that is never packed."""
    made = copy.deepcopy(model)
    logits.trunk(made).config._attn_implementation = "sdpa"
    packing._packs[logits.trunk(made)] = {20: False}
    return made


def learn(model, batch):
    """Log-probs, and the gradients of a sum in which every token counts differently."""
    stats = token_stats(model, batch, batch.response_mask, 0.7)
    weights = torch.linspace(0.5, 1.5, stats.logprobs.shape[1])
    (stats.logprobs * weights + 0.1 * stats.entropy).sum().backward()
    return stats.logprobs.detach(), gradients(model)


def one_by_one(model, batch):
    logprobs, total = torch.zeros_like(batch.response_mask), None
    for row in range(len(batch)):
        alone = batch.rows(torch.tensor([row]))
        width = alone.input_ids.shape[1]
        stats = token_stats(model, alone, alone.response_mask, 0.7)
        logprobs[row, :width] = stats.logprobs.detach()[0]
        weights = torch.linspace(0.5, 1.5, batch.input_ids.shape[1])[:width]
        (stats.logprobs * weights + 0.1 * stats.entropy).sum().backward()
    total = gradients(model)
    return logprobs, total


def same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    for name, gradient in expected[1].items():
        scale = 1e-4 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[1][name], gradient, msg=name, rtol=0, atol=scale)


def with_adapter():
    torch.manual_seed(0)
    model = tiny_model("llama")
    add_lora(model, 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def recomputing():
    model = tiny_model("qwen2")
    recompute_layers(model)
    return model


MODELS = {
    "grouped heads": tiny_model,
    "an adapter": with_adapter,
    "recomputed layers": recomputing,
    "learned positions": lambda: of_library("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0),
}


def learned_three_ways(name, batch):
    """What is learned from packed rows, which padded rows and rows one by one teach too."""
    model = MODELS[name]()
    assert logits.try_packing(model, 64)
    found = learn(model, batch)
    same(found, learn(padded(model), batch))
    same(found, one_by_one(padded(model), batch))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_packed_is_padded_is_one_by_one(name):
    found = learned_three_ways(name, batch_of())
    assert max(float(gradient.abs().max()) for gradient in found[1].values()) > 0.1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mistral", {"sliding_window": 4}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": None}),
        ("Falcon", {"alibi": True}),
    ],
)
def test_a_model_whose_attention_is_more_than_causal_stays_padded(name, changes):
    model, batch = of_library(name, **changes), batch_of()
    expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.log_softmax(-1)
    assert not logits.try_packing(model, 64)
    stats = token_stats(model, batch, batch.response_mask)
    chosen = expected[:, :-1].gather(2, batch.input_ids[:, 1:, None])[..., 0] * batch.response_mask[:, 1:]
    torch.testing.assert_close(stats.logprobs[:, 1:], chosen, rtol=1e-4, atol=1e-4)


def test_a_model_that_lets_rows_see_each_other_stays_padded(monkeypatch):
    def leaking(module, query, key, value, attention_mask, scaling=None, **options):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2), None

    packing._register()
    monkeypatch.setitem(AttentionInterface._global_mapping, packing.ATTENTION, leaking)
    model = tiny_model()
    assert not logits.try_packing(model, 64)
    assert model.config._attn_implementation == "sdpa"


def test_other_passes_of_a_packing_model_are_what_they_were():
    batch = batch_of()
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    expected = tiny_model()(**inputs).logits
    model = tiny_model()
    assert logits.try_packing(model, 64)
    assert torch.equal(model(**inputs).logits, expected)
    assert torch.equal(
        model.generate(batch.input_ids[1:2, :4], max_new_tokens=5, do_sample=False),
        tiny_model().generate(batch.input_ids[1:2, :4], max_new_tokens=5, do_sample=False),
    )


def test_a_packing_model_is_saved_without_a_trace(tmp_path):
    from tests.tiny_models import byte_level_tokenizer

    model = tiny_model()
    assert logits.try_packing(model, 64)
    save_model(model, byte_level_tokenizer(), tmp_path / "model")
    assert packing.ATTENTION not in (tmp_path / "model" / "config.json").read_text(encoding="utf-8")


def test_the_critic_has_the_same_values_and_gradients_packed():
    torch.manual_seed(0)
    batch = experience([trajectory(spec) for spec in SPECS]).batch
    made = Critic(tiny_model())
    torch.nn.init.normal_(made.head.weight)
    other = copy.deepcopy(made)
    other.decoder = padded(made.decoder)
    assert packing.try_packing(made.decoder, 64)

    def learned(critic):
        values = critic(batch)
        (values * torch.linspace(0.5, 1.5, values.shape[1])).sum().backward()
        return values.detach(), gradients(critic)

    same(learned(made), learned(other))


def mask_of(lengths):
    """The mask of rows of such lengths that share nothing."""
    tokens = torch.arange(sum(lengths), dtype=torch.int32)
    return packing.Layout(torch.tensor(lengths), tokens, tokens).as_mask()


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()
        self.keys: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.seen.add(tuple(tensor.shape))
        if "scaled_dot_product" in function.__name__ and "backward" not in function.__name__:
            self.keys.add(args[1].shape[1])
        return out


def squares(shapes, least):
    """The shapes in which two axes have at least `least` entries; no other axis of the model has as many."""
    return {shape for shape in shapes if sum(size >= least for size in shape) > 1}


def test_no_tensor_has_tokens_by_tokens_when_packed():
    """The model's own axes have at most 59 entries, the rows 60 tokens and more."""
    batch, model = batch_of(("paaaaa" * 10, "paoaa" * 18, "paa" * 24)), tiny_model(vocab_size=59)
    batch = type(batch)(batch.input_ids % 59, *(getattr(batch, name) for name in batch.__slots__[1:]))
    for packed in (model, padded(model)):
        logits.logits_of(packed), packing.try_packing(logits.trunk(packed), 64)
        with Shapes() as mode:
            learn(packed, batch)
        assert bool(squares(mode.seen, 60)) is (packed is not model), squares(mode.seen, 60)
        if packed is model:
            assert mode.keys == {2}, "keys are not copied for every head"


def beginning_alike():
    """Rows of two groups: the first three share 9, 9 and 6 tokens, two are the same, the last two share 3."""
    ids = [[*range(3, 12), 40, 41], [*range(3, 12), 50], [*range(3, 9), 60, 61, 62], [*range(3, 12), 40, 41]]
    ids += [[3, 4, 5, 6], [90, 91, 92, 93], [90, 91, 92, 7, 8]]
    rows = [trajectory("ppp" + "a" * (len(row) - 3)) for row in ids]
    batch = collate(rows)
    for row, own in enumerate(ids):
        batch.input_ids[row, : len(own)] = torch.tensor(own)
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_begin_alike_have_the_log_probs_and_gradients_of_rows_on_their_own(name):
    learned_three_ways(name, beginning_alike())


def test_shared_tokens_go_through_the_model_once():
    model, batch, seen = tiny_model(), beginning_alike(), []
    assert logits.try_packing(model, 64)
    logits.trunk(model).register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].shape), with_kwargs=True
    )
    token_stats(model, batch, batch.response_mask)
    tree = {tuple(row[: end + 1]) for row, length in rows_of(batch) for end in range(length)}
    assert seen == [(1, len(tree))]
    assert len(tree) < int(batch.lengths.sum())


def rows_of(batch):
    return list(zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True))


ROWS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=12)


@given(ROWS, st.integers(1, 30))
def test_micro_batches_have_every_row_once_and_as_many_tokens_as_the_tree_of_their_rows(rows, budget):
    lengths = [len(row) for row in rows]
    ids = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows])
    real = (ids != 0).long()
    batch = Batch(ids, real, *(real.float() for _ in range(3)))
    groups = [group.tolist() for group in packing.rows_within(batch, budget)]
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))

    def tokens(group):
        return len({tuple(rows[row][: end + 1]) for row in group for end in range(len(rows[row]))})

    def cost(group):
        """Each token once, and a quarter of it in each further row."""
        return tokens(group) + (sum(len(rows[row]) for row in group) - tokens(group)) / 4

    for group, following in zip(groups, [*groups[1:], None], strict=True):
        assert cost(group) <= budget or len(group) == 1
        assert following is None or cost([*group, following[0]]) > budget, "no row fits before its own"
        layout = packing.Layout.of(batch.rows(torch.tensor(group)))
        assert len(layout.first) == tokens(group)
        flat = [(row, end) for row in group for end in range(len(rows[row]))]
        for place, (row, end) in zip(layout.places.tolist(), flat, strict=True):
            other, at = flat[int(layout.first[place])]
            assert rows[row][: end + 1] == rows[other][: at + 1], "a token before which the same tokens are"


@pytest.mark.parametrize("old", [False, True], ids=["of this torch", "of torch 2.11"])
def test_the_kernel_for_gpus_is_asked_for_causal_attention_within_rows(monkeypatch, old):
    """There is no GPU here: the call must bind to the kernel's real signature, and mean the same.

    Before torch 2.13 the kernel wants as many heads of keys and values as of queries.
    """
    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)
    if old:
        newer = {"enable_gqa", "seqused_k", "block_table", "num_splits"}
        known = [one for name, one in signature.parameters.items() if name not in newer]
        signature = signature.replace(parameters=known)
    groups = "enable_gqa" in signature.parameters

    def by_hand(*args, **kwargs):
        asked = signature.bind(*args, **kwargs).arguments
        assert asked["window_size"] == (-1, 0)
        assert (asked["query"].shape[1] != asked["key"].shape[1]) is groups
        assert asked.get("enable_gqa", False) is groups
        assert asked["max_q"] == asked["max_k"] == 5
        starts = asked["cu_seq_q"].tolist()
        out = torch.empty_like(asked["query"])
        for start, end in pairwise(starts):
            q, k, v = (asked[name][start:end].transpose(0, 1) for name in ("query", "key", "value"))
            k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
            scores = (q @ k.transpose(1, 2)) * asked["scale"]
            hidden = torch.ones(scores.shape[1:]).triu(1).bool()
            out[start:end] = (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)
        return out

    by_hand.__signature__ = signature
    monkeypatch.setattr(varlen, "varlen_attn", by_hand)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    starts = mask_of([3, 5, 1])
    expected, _ = packing.packed_attention(torch.nn.Module(), query, key, value, starts, scaling=0.3)
    found = packing._varlen(query, key, value, starts[0, 0, 0], starts.shape[2], 0.3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("exact", [False, True])
def test_a_layer_reads_nothing_from_the_device_to_take_the_mask_apart(exact):
    """A read would make a GPU wait in every layer; of a `meta` tensor nothing can be read."""
    layout = packing.Layout.of(beginning_alike())
    assert layout.shares
    found = packing._parts_of(layout.as_mask(exact).to("meta"), len(layout.first))
    assert found[0] is exact
    assert [len(part) for part in found[1:]] == [
        len(layout.lengths) + 1, len(layout.places), len(layout.first)
    ]  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
def test_exact_attention_is_not_in_blocks(exact, monkeypatch):
    asked = []
    monkeypatch.setattr(packing.block_attention, "pays_for", lambda query: asked.append(query) or True)
    mask = packing.Layout(torch.tensor([4]), torch.arange(4), torch.arange(4)).as_mask(exact)
    query = torch.randn(1, 2, 4, 8)
    packing.packed_attention(torch.nn.Module(), query, query, query, mask)
    assert bool(asked) is not exact


@pytest.mark.parametrize("option", [{"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.zeros(2)}])
def test_attention_with_more_to_it_is_refused(option):
    query = torch.randn(1, 2, 4, 8)
    starts = mask_of([4])
    with pytest.raises(ValueError, match=next(iter(option))):
        packing.packed_attention(torch.nn.Module(), query, query, query, starts, **option)
