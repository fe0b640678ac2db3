"""What a rollout's steps cost in operations, and that they copy no keys and values and read nothing back."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from tests import model_families as families
from tests.tiny_models import byte_level_tokenizer, new_model, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from srl.errors import UserError
from srl.rollout.attention import slot_attention
from srl.rollout.cached_forward import CachedForward
from srl.rollout.codec import Codec
from srl.rollout.decode_graphs import DecodeGraphs
from srl.rollout.engine import Sampling
from srl.rollout.rollout_weights import onednn_linears
from srl.rollout.sampling import Draws
from srl.rollout.slot_table import SlotTable
from srl.rollout.torch_engine import TorchEngine

ROWS, LAYERS, KV_HEADS, DIM = 6, 4, 2, 8
VIEWS = {
    "view", "reshape", "transpose", "unsqueeze", "slice", "select", "expand", "t", "_unsafe_view", "unbind",
    "alias", "detach", "split", "permute", "squeeze", "as_strided", "split_with_sizes", "lift_fresh",
    "device",
}  # fmt: skip
READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}


class Operations(TorchDispatchMode):
    """Counts operations that are no views, and keeps the shapes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.names[name] += 1
            outputs = result if isinstance(result, (tuple, list)) else [result]
            self.made += [(name, tuple(each.shape)) for each in outputs if isinstance(each, torch.Tensor)]
        return result


def decoding(model, lengths=(20, 30, 25, 12, 22, 21), **options):
    """A forward and a table whose rows have been fed and have drawn one token each."""
    forward = CachedForward(model, len(lengths), 1200, **options)
    table, rows = SlotTable(len(lengths)), np.arange(len(lengths))
    for row, length in enumerate(lengths):
        ids = np.random.default_rng(row).integers(2, 400, length).tolist()
        table.begin(row, ids, Sampling(max_tokens=9, key=(row,)), 0)
    with torch.no_grad():
        forward.feed(table, rows)
    table.append(rows, np.full(len(rows), 7), np.zeros(len(rows), dtype=np.float32))
    return forward, table, rows


def one_step(forward, table, rows) -> Operations:
    with torch.no_grad(), Operations() as operations:
        forward.sample(table, rows)
    return operations


def test_decode_step_copies_no_keys_and_values_and_reads_nothing_back():
    operations = one_step(*decoding(tiny_model("llama", layers=LAYERS)))
    per_row = KV_HEADS * 16 * DIM  # keys of the shortest width that is read
    moved = [
        (name, shape)
        for name, shape in operations.made
        if np.prod(shape) > ROWS * per_row and name != "index_copy_"
    ]
    assert not [each for each in moved if 400 not in each[1]], "only logits are larger"
    assert not READS & set(operations.names)
    assert operations.names["_scaled_dot_product_flash_attention_for_cpu"] == LAYERS
    assert not {"clone", "repeat_interleave", "index_select"} & {n for n, s in operations.made if len(s) >= 4}


def test_body_of_a_graph_has_its_budget_of_operations_and_reads_nothing():
    """The body is run on tensors without values: what asks for one raises."""
    with FakeTensorMode(), torch.no_grad():
        model = families.of_sizes("llama", num_hidden_layers=LAYERS)
        forward = CachedForward(model, ROWS, 256, graphs=True, in_place=False)
        inputs = torch.zeros(6, ROWS, dtype=torch.float64)
        with slot_attention(forward.model, forward.cache.access), Operations() as operations:
            out = forward._step(inputs, 128, Draws(True, True, True, True))
    assert out.shape == (2, ROWS)
    assert operations.names.total() <= 36 * LAYERS + 80
    assert not READS & set(operations.names)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_steps_with_static_shapes_draw_the_same_tokens(kind, caplog):
    """Rows leave, come back with new ids and change their kind of draw; buckets are filled up."""
    model = tiny_model(kind, dtype=torch.float64)
    engines = [TorchEngine(model, CODEC, max_num_seqs=11, max_model_len=300, graphs=static)
               for static in (False, True)]  # fmt: skip
    first, second = ([turn for _, turn in talk(engine)] for engine in engines)
    assert [turn.token_ids for turn in first] == [turn.token_ids for turn in second]
    for ours, theirs in zip(first, second, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-9)
    engines[1].reset()
    assert [turn.token_ids for _, turn in talk(engines[1])] == [turn.token_ids for turn in first]
    assert not caplog.records, "no step fell back to an eager one"


@pytest.mark.parametrize("error", [RuntimeError, UserError])
def test_a_graph_that_cannot_be_captured_is_one_line_and_decoding_goes_on(caplog, monkeypatch, error):
    model = tiny_model(dtype=torch.float64)

    def refused(*given):
        raise error("operation not permitted when stream is capturing\nmore about it")

    monkeypatch.setattr(DecodeGraphs, "_captured", refused)
    engine = TorchEngine(model, CODEC, max_num_seqs=11, max_model_len=300, graphs=True)
    with caplog.at_level("WARNING"):
        turns = talk(engine)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    plain = TorchEngine(model, CODEC, max_num_seqs=11, max_model_len=300, graphs=False)
    assert [turn.token_ids for _, turn in turns] == [turn.token_ids for _, turn in talk(plain)]


def talk(engine):
    """Three turns of 23 episodes of all lengths, some greedy and some with top-p."""

    async def one(index):
        rng, ids, turns = np.random.default_rng(index), [], []
        for turn in range(3):
            ids += rng.integers(2, 400, 250 if index == turn == 0 else 2 + 5 * (index % 4)).tolist()
            sampling = Sampling(
                3 + index % 9, temperature=(0.0, 1.0, 0.7)[index % 3], top_p=(1.0, 0.8)[index % 2],
                key=(index, turn),
            )  # fmt: skip
            turns.append((len(ids), await engine.generate(f"e{index}", list(ids), sampling)))
            ids += turns[-1][1].token_ids
        engine.finish(f"e{index}")
        return turns

    async def main():
        return [turn for turns in await asyncio.gather(*map(one, range(23))) for turn in turns]

    return asyncio.run(main())


CODEC = Codec(byte_level_tokenizer())


def test_onednn_computes_what_pytorch_does_and_is_gone_afterwards():
    model = new_model("qwen2", vocab_size=600, layers=1, width=512, heads=4, ffn=512, seed=2)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad(), Operations() as theirs:
        expected = model(ids).logits
    with torch.no_grad(), Operations() as ours, onednn_linears(model):
        logits = model(ids).logits
    assert ours.names["_linear_pointwise"] == 4 + 3 + 1  # attention, MLP, head
    assert theirs.names["_linear_pointwise"] == 0
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    model(ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
