"""What a rollout's steps cost in operations, and that they copy no keys and values and read nothing back."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import numpy as np
import pytest
import torch
from tests.tiny_models import byte_level_tokenizer, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from srl.errors import UserError
from srl.model import add_lora, new_model
from srl.rollout import choose_forward, rollout_weights, torch_engine
from srl.rollout.cached_forward import LENGTHS, CachedForward, PlainForward, arrange
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.rollout_weights import MergedLora, is_onednn_faster, onednn_linears
from srl.rollout.sampling import draw
from srl.rollout.slot_table import SlotTable
from srl.rollout.torch_engine import TorchEngine

ROWS, LAYERS, KV_HEADS, DIM = 6, 4, 2, 8
VIEWS = {
    "view",
    "reshape",
    "transpose",
    "unsqueeze",
    "slice",
    "select",
    "expand",
    "t",
    "_unsafe_view",
    "unbind",
}
VIEWS |= {"alias", "detach", "split", "permute", "squeeze", "as_strided", "split_with_sizes", "lift_fresh"}
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


def model_with(lora=False):
    model = tiny_model("llama", layers=LAYERS)
    if lora:
        add_lora(model, 2)
        shake(model)
    return model


def shake(model):
    """Give the adapter something to add, which it has not at its start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)


def decoding(model, lengths=(20, 30, 25, 12, 22, 21)):
    """A forward and a table whose rows have been fed and have drawn one token each."""
    forward, table, rows = (
        CachedForward(model, len(lengths), 1200),
        SlotTable(len(lengths)),
        np.arange(len(lengths)),
    )
    for row, length in enumerate(lengths):
        ids = np.random.default_rng(row).integers(2, 400, length).tolist()
        table.begin(row, ids, Sampling(max_tokens=9, key=(row,)), 0)
    with torch.no_grad():
        forward.feed(table, rows)
    table.append(rows, np.full(len(rows), 7), np.zeros(len(rows), dtype=np.float32))
    return forward, table, rows


def one_step(forward, table, rows) -> Operations:
    with torch.no_grad(), Operations() as operations:
        logits = forward.feed(table, rows)
        draw(logits, table.temperature[rows], table.top_p[rows], table.uniform(rows))
    return operations


def test_decode_step_has_its_budget_of_operations_and_an_adapter_costs_none():
    plain = one_step(*decoding(model_with()))
    model = model_with(lora=True)
    parts = decoding(model)
    apart = one_step(*parts).names.total()
    lora = MergedLora(model)
    lora.merge()
    merged = one_step(*decoding(model)).names.total()
    assert plain.names.total() <= 34 * LAYERS + 50
    assert merged == plain.names.total() < apart


def test_decode_step_copies_no_keys_and_values_and_reads_nothing_back():
    operations = one_step(*decoding(model_with()))
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


def test_prefill_of_prompts_makes_no_mask():
    forward, table, length = CachedForward(model_with(), 3, 300), SlotTable(3), 96
    for row in range(3):
        table.begin(row, np.random.default_rng(row).integers(2, 400, length - row).tolist(), Sampling(9), 0)
    with torch.no_grad(), Operations() as operations:
        forward.feed(table, np.arange(3))
    assert operations.names["_scaled_dot_product_flash_attention_for_cpu"] == LAYERS
    assert not [shape for _, shape in operations.made if shape[-2:] == (length, length)]


def test_rows_read_little_more_than_their_own_length():
    lengths = (1000, 30, 40, 900, 20, 60)
    forward, table, rows = decoding(model_with(), lengths)
    widths = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "scaled_dot_product" in str(function):
                widths.append((args[1].shape[0], args[1].shape[2]))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        logits = forward.feed(table, rows)
    assert widths == [(2, 1008), (4, 64)] * LAYERS
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = forward.model(torch.tensor([table.ids[row, : length + 1].tolist()])).logits[:, -1]
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_rows_are_arranged_by_length_and_those_that_can_stay_do():
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = int(rng.integers(1, 12))
        slots, lengths = rng.permutation(16)[:count], rng.integers(1, 2000, count)
        new, buckets = arrange(slots, lengths, LENGTHS)
        assert sorted(new.tolist()) == list(range(count))
        assert [first for first, _, _ in buckets] == [0, *(last for _, last, _ in buckets[:-1])]
        by_slot = lengths[np.argsort(new)]
        for first, last, width in buckets:
            group = by_slot[first:last]
            assert group.max() <= width < group.max() + 16
            assert group.min() * 1.51 >= group.max() or group.max() <= LENGTHS[0]
        again, _ = arrange(new, lengths, LENGTHS)
        assert again.tolist() == new.tolist()


def converse(engine, count=4, length=8):
    async def one(index):
        ids = [5 + index, 6, 7]
        turn = await engine.generate(f"e{index}", ids, Sampling(max_tokens=length, key=(index,)))
        engine.finish(f"e{index}")
        return ids, turn

    async def main():
        return await asyncio.gather(*(one(index) for index in range(count)))

    return asyncio.run(main())


def new_engine(model, **options):
    return TorchEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=4, max_model_len=200, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_adapter_computes_the_same_and_leaves_the_weights_as_they_were_to_the_bit(dtype):
    model = model_with(lora=True).to(dtype)
    ids = torch.arange(3, 40)[None]
    before, lora = {name: tensor.clone() for name, tensor in model.state_dict().items()}, MergedLora(model)
    with torch.no_grad():
        apart = model(ids).logits.float()
        lora.merge()
        merged = model(ids).logits.float()
        assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        lora.restore()
        again = model(ids).logits.float()
    spread = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert float((merged - apart).square().mean().sqrt()) <= spread * float(apart.std())
    assert torch.equal(again, apart)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_rollout_generates_with_the_adapter_and_returns_the_weights_after_success_and_failure():
    model = model_with(lora=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = new_engine(model)
    turns = converse(engine)
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "merged"
    engine.sleep()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for ids, turn in turns:
        whole = torch.tensor([[*ids, *turn.token_ids]])
        with torch.no_grad():
            expected = torch.log_softmax(model(whole).logits[0, len(ids) - 1 : -1], -1)
        expected = expected.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
        assert float((torch.tensor(turn.logprobs) - expected).abs().mean()) <= 1e-5

    def broken(table, rows):
        raise RuntimeError("out of luck")

    engine._forward.feed = broken
    with pytest.raises(RuntimeError, match="out of luck"):
        converse(engine)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())


@pytest.mark.parametrize(("small", "kept"), [(0, False), (2**26, True)])
def test_engine_that_sleeps_keeps_only_a_small_cache(monkeypatch, small, kept):
    monkeypatch.setattr("srl.rollout.torch_engine.SMALL_CACHE", small)
    engine = new_engine(model_with())
    before = converse(engine)
    assert engine._forward.nbytes > 0
    engine.sleep()
    assert (engine._forward.nbytes > 0) is kept
    assert [turn.token_ids for _, turn in converse(engine)] == [turn.token_ids for _, turn in before]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_sampled_logprobs_differ_from_the_trainers_by_less_than_a_hundred_thousandth(kind):
    model = tiny_model(kind)
    differences = []
    for ids, turn in converse(new_engine(model), count=12, length=40):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *turn.token_ids]])).logits[0, len(ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
        differences.append((torch.tensor(turn.logprobs) - expected).abs())
    assert float(torch.cat(differences).mean()) <= 1e-5


def wide_model():
    return new_model("qwen2", vocab_size=600, layers=1, width=512, heads=4, ffn=512, seed=2)


def test_onednn_computes_what_pytorch_does_and_is_gone_afterwards():
    model, ids = wide_model(), torch.arange(40).reshape(2, 20)
    with torch.no_grad(), Operations() as theirs:
        expected = model(ids).logits
    with torch.no_grad(), Operations() as ours, onednn_linears(model):
        logits = model(ids).logits
    assert ours.names["_linear_pointwise"] == 4 + 3 + 1  # attention, MLP, head
    assert theirs.names["_linear_pointwise"] == 0
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    model(ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_trial_chooses_the_faster_library_and_says_no_to_wrong_results(monkeypatch):
    model = wide_model()
    times = iter([3.0, 1.0, 1.1, 1.0])
    monkeypatch.setattr(rollout_weights, "_seconds", lambda compute: next(times))
    assert is_onednn_faster(model, 4)
    assert not is_onednn_faster(model, 4)
    monkeypatch.setattr(rollout_weights, "_seconds", lambda compute: pytest.fail("no trial is wanted"))
    assert not is_onednn_faster(tiny_model(), 4), "all layers are small"
    monkeypatch.setattr(rollout_weights, "_onednn_linear", lambda layer, states: layer(states) + 1)
    assert not is_onednn_faster(model, 4)


REDUCED = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def reduced_precision():
    """cuBLAS and cuDNN may round, until the test has ended."""
    holders = [(torch.backends.cuda.matmul, name) for name in REDUCED] + [
        (torch.backends.cudnn, "allow_tf32")
    ]
    before = [getattr(holder, name) for holder, name in holders]
    for holder, name in holders:
        setattr(holder, name, True)
    yield holders
    for (holder, name), value in zip(holders, before, strict=True):
        setattr(holder, name, value)


def test_deterministic_engine_on_a_gpu_sets_what_it_needs_or_says_that_it_cannot(
    monkeypatch, reduced_precision
):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *a, **k: asked.append((a, k)))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch_engine.make_cuda_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert asked == [((True,), {"warn_only": True})]
    assert not any(getattr(holder, name) for holder, name in reduced_precision)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match="unset it, or set it to :4096:8"):
        torch_engine.make_cuda_deterministic()


@pytest.mark.parametrize("own", ["sdpa", "flash_attention_2"])
def test_flash_attention_that_would_leave_no_cache_is_refused(own, monkeypatch):
    """The model's own kernel is for GPUs, so the name is set after the pass that needs it."""
    model = tiny_model()

    def no_cache(*given, **options):
        model.config._attn_implementation_internal = own
        raise ValueError("a cache that the model does not know")

    monkeypatch.setattr(choose_forward, "CachedForward", no_cache)
    if own == "sdpa":
        assert isinstance(choose_forward.choose_forward(model, 2, 100), PlainForward)
        return
    with pytest.raises(UserError):
        choose_forward.choose_forward(model, 2, 100)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_model_set_to_flash_attention_decodes_with_grouped_attention(kind):
    """The probe's reference needs the model's own kernel, which is for GPUs; it is replaced here."""
    model, ids = tiny_model(kind), torch.arange(20)[None] + 3
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    model.config._attn_implementation_internal = "flash_attention_2"
    forward, table = CachedForward(model, 2, 100), SlotTable(2)
    table.begin(0, ids[0].tolist(), Sampling(9), 0)
    with torch.no_grad():
        logits = forward.feed(table, np.array([0]))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "flash_attention_2"


def test_deterministic_engine_makes_no_trial(monkeypatch):
    monkeypatch.setattr(rollout_weights, "_seconds", lambda compute: pytest.fail("a trial by time"))
    new_engine(new_model("qwen2", vocab_size=400, layers=1, width=512, heads=4, ffn=512), deterministic=True)
