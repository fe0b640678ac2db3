"""Draws follow the exact probabilities and depend on the key and the row's own logits alone."""

import numpy as np
import pytest
import torch

from srl.rollout import sampling
from srl.rollout.sampling import Draws, turn_uniforms

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 0.7])
ALL = Draws(greedy=True, sampled=True, scaled=True, truncated=True)


def draw(logits, temperature, top_p, uniforms, kinds=ALL):
    """A token for each row, and its log-prob."""
    tokens, logprobs = sampling.draw(
        logits, torch.from_numpy(np.stack([uniforms, temperature, top_p]).astype(float)), kinds
    )
    return tokens.long(), logprobs.float()


def draws(logits, count, temperature=1.0, top_p=1.0):
    """`count` tokens drawn from one row of logits, with the uniforms of one key."""
    tokens, _ = draw(
        logits.expand(count, -1), np.full(count, temperature), np.full(count, top_p),
        turn_uniforms(("seed", 7), count),
    )  # fmt: skip
    return tokens.numpy()


def chi_square(tokens, probabilities):
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities))
    kept = expected > 0
    assert (observed[~kept] == 0).all()
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    tokens = draws(LOGITS, 40_000, temperature)
    exact = torch.softmax(LOGITS.double() / temperature, -1).numpy()
    assert chi_square(tokens, exact) < 22.46  # 6 degrees of freedom, p = .001
    assert chi_square(tokens, np.roll(exact, 1)) > 1000


def test_top_p_draws_from_the_smallest_set_that_holds_the_mass():
    exact = torch.softmax(LOGITS.double(), -1).numpy()
    order = np.argsort(-exact)
    kept = order[: int(np.searchsorted(np.cumsum(exact[order]), 0.8)) + 1]
    nucleus = np.where(np.isin(np.arange(7), kept), exact, 0)
    tokens = draws(LOGITS, 40_000, top_p=0.8)
    assert set(tokens) == set(kept.tolist())
    assert chi_square(tokens, nucleus / nucleus.sum()) < 22.46


def test_top_p_of_almost_nothing_is_greedy():
    assert set(draws(LOGITS, 100, top_p=1e-9)) == {0}


def test_logprob_is_that_of_the_whole_distribution_whatever_top_p():
    uniforms = turn_uniforms((1,), 3)
    tokens, logprobs = draw(LOGITS.expand(3, -1), np.array([0.0, 0.5, 0.5]), np.array([1, 1, 0.3]), uniforms)
    scale = torch.tensor([1.0, 0.5, 0.5])[:, None]
    expected = torch.log_softmax(LOGITS / scale, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    assert tokens[0] == 0


def test_rows_with_their_own_settings_draw_as_they_would_alone():
    torch.manual_seed(0)
    logits, uniforms = torch.randn(40, 50) * 3, turn_uniforms(("crowd",), 40)
    temperature = np.tile([0.0, 0.3, 1.0, 1.7], 10)
    top_p = np.repeat([1.0, 0.9, 0.5, 0.99], 10)
    together, _ = draw(logits, temperature, top_p, uniforms)
    for row in range(40):
        alone = slice(row, row + 1)
        token, _ = draw(logits[alone], temperature[alone], top_p[alone], uniforms[alone])
        assert token.item() == together[row].item()


@pytest.mark.parametrize(
    ("temperature", "top_p", "least"),
    [
        (0.0, 1.0, Draws(True, False, False, False)),
        (1.0, 1.0, Draws(False, True, False, False)),
        (0.7, 1.0, Draws(False, True, True, False)),
        (1.0, 0.8, Draws(False, True, False, True)),
    ],
)
def test_steps_that_a_batch_does_not_need_change_nothing_to_the_bit(temperature, top_p, least):
    logits, uniforms = (
        torch.randn(40, 50, generator=torch.Generator().manual_seed(0)),
        turn_uniforms((1,), 40),
    )
    given = np.full(40, temperature), np.full(40, top_p), uniforms
    for ours, theirs in zip(draw(logits, *given, least), draw(logits, *given), strict=True):
        assert torch.equal(ours, theirs)


def test_token_without_probability_is_never_drawn():
    logits = torch.full((4, 8), -torch.inf)
    logits[:, 3] = 1.0
    edges = np.array([0.0, 0.5, 1 - 2**-53, 2**-53])
    tokens, logprobs = draw(logits, np.ones(4), np.ones(4), edges)
    assert tokens.tolist() == [3] * 4
    assert logprobs.tolist() == [0.0] * 4


@pytest.mark.parametrize("vocabulary", [5_000, 49_152])
def test_large_vocabulary_is_searched_in_blocks_with_the_draws_of_one_long_sum(vocabulary):
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, ::7] = -torch.inf
    uniforms = turn_uniforms(("large",), 64)
    uniforms[:3] = 0.0, 1 - 2**-53, 2**-53
    tokens, logprobs = draw(logits, np.ones(64), np.ones(64), uniforms)
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1).numpy()
    expected = [
        np.searchsorted(row, u * row[-1], side="right") for row, u in zip(cumulative, uniforms, strict=True)
    ]
    assert tokens.tolist() == expected
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("spread", [0.1, 8.0], ids=["the mass is everywhere", "the mass is in a few tokens"])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_all_of_it_keeps(spread):
    probs = torch.softmax(torch.randn(6, 9_000, generator=torch.Generator().manual_seed(1)) * spread, -1)
    limit = torch.tensor([0.1, 0.5, 0.9, 0.95, 0.99, 1.0], dtype=torch.float64)[:, None]
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, (before < limit) | (limit >= 1))
    assert torch.equal(sampling._truncate(probs, limit), torch.where(kept, probs, 0.0))


def test_tokens_as_likely_as_the_last_that_top_p_keeps_stay_too():
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    kept = sampling._truncate(probs, torch.tensor([[0.5]], dtype=torch.float64))
    assert kept.tolist() == probs.tolist()


def test_half_precision_logits_give_float32_logprobs():
    _, logprobs = draw(LOGITS[None].bfloat16(), np.ones(1), np.ones(1), np.array([0.1]))
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS.bfloat16().float(), -1)[:1])


def test_uniforms_are_the_keys_alone_and_the_same_forever():
    key = (7, "train", 3, "nq/12", 0, 1)
    np.testing.assert_array_equal(turn_uniforms(key, 3), turn_uniforms(key, 50)[:3])
    assert turn_uniforms(key, 3).tolist() == pytest.approx(
        [0.03333551807095503, 0.06639721556961986, 0.07333702021965882], abs=0
    )


def test_keys_that_read_alike_differ():
    keys = [(1, 2), (12,), ("1", 2), ("1", "2"), (1, "2"), ("1', '2",), ()]
    assert len({turn_uniforms(key, 1)[0] for key in keys}) == len(keys)


def test_uniforms_are_uniform():
    values = np.concatenate([turn_uniforms(("turn", index), 50) for index in range(400)])
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 19 degrees of freedom, p = .001
