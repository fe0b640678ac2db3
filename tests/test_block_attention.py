"""Causal attention in blocks of products: the same as PyTorch's, forward and backward."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from srl.update import block_attention
from srl.update.block_attention import BLOCK, causal_attention

HEADS, KEY_HEADS, SIZE = 6, 2, 8


def inputs(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    drawn = torch.Generator().manual_seed(length)
    shapes = [(heads, length, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return [torch.randn(shape, generator=drawn).to(dtype) for shape in shapes]


def attended(attention, tensors: list[torch.Tensor], scaling: float | None = None) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    out = attention(*leaves, scaling)
    out.backward(tensors[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def pytorchs(query, key, value, scaling):
    return scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scaling, enable_gqa=True
    )[0]


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_outputs_and_gradients_are_pytorchs(length, scaling):
    tensors = inputs(length)
    for ours, theirs in zip(
        attended(causal_attention, tensors, scaling), attended(pytorchs, tensors, scaling), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_views_of_one_projection_will_do():
    """A row of a packed batch is a slice of a transposed tensor."""
    whole = torch.randn(1, 40, HEADS, SIZE, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    query, key = whole[0, :, 10:30], whole[0, :KEY_HEADS, 10:30]
    torch.testing.assert_close(causal_attention(query, key, key), pytorchs(query, key, key, None))


def test_bfloat16_is_nearly_as_exact_as_pytorchs():
    """Against float32; the scores are rounded, which PyTorch's are not."""
    tensors = inputs(300, torch.bfloat16)
    exact = attended(pytorchs, [tensor.float() for tensor in tensors])
    for ours, theirs, true in zip(
        attended(causal_attention, tensors), attended(pytorchs, tensors), exact, strict=True
    ):
        error, usual = ((found.float() - true).norm() / true.norm() for found in (ours, theirs))
        assert error < 3 * usual < 0.03


@pytest.mark.parametrize(
    ("known", "pays"),
    [
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": True, "amx_bf16": True}, False),
        ({"avx512_bf16": False}, False),
        ({}, False),
    ],
)
def test_it_pays_where_a_cpu_multiplies_bfloat16_without_amx(monkeypatch, known, pays):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    block_attention._multiplies_bfloat16.cache_clear()
    try:
        assert block_attention.pays_for(torch.ones(1, dtype=torch.bfloat16)) is pays
        assert not block_attention.pays_for(torch.ones(1))
        assert not block_attention.pays_for(torch.ones(1, dtype=torch.bfloat16, device="meta"))
    finally:
        block_attention._multiplies_bfloat16.cache_clear()
