"""AdamW with float32 masters: schedules by hand, small steps, bad gradients, and going on after a stop."""

import math
import platform
from pathlib import Path

import pytest
import torch
from tests.live_tensors import Live, bytes_of
from torch import nn

from srl.models.load import return_free_memory
from srl.update import optimiser as optimisers
from srl.update.optimiser import Optimiser, schedule


def parameter(values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def steps(optimiser, weights, gradients):
    """Steps with the given gradients; their norms."""
    norms = []
    for gradient in gradients:
        for weight in weights:
            weight.grad = torch.full_like(weight, gradient)
        norms.append(optimiser.step())
    return norms


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5, 0]),
        ("cosine", 0, [1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2, 0]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, 0.5, 0]),
    ],
)
def test_schedules_by_hand(kind, warmup, expected):
    factor = schedule(kind, warmup, 4)
    assert [factor(step) for step in range(5)] == pytest.approx(expected)
    assert factor(100) == pytest.approx(expected[-1]), "after the last step it stays"


def test_the_learning_rate_follows_the_schedule():
    weight = parameter([0.0])
    optimiser = Optimiser([weight], lr=0.5, schedule=schedule("linear", 1, 3))
    seen = []
    for _ in range(3):
        seen.append(optimiser.lr)
        steps(optimiser, [weight], [1.0])
    assert seen == pytest.approx([0.25, 0.5, 0.25])


def test_a_step_is_adamws():
    """The first step is −lr·sign(g) − lr·decay·w, whatever the size of a gradient below the clip."""
    weight = parameter([2.0, -1.0])
    optimiser = Optimiser([weight], lr=0.1, weight_decay=0.01, eps=1e-12)
    weight.grad = torch.tensor([0.3, -0.001])
    optimiser.step()
    expected = [2.0 - 0.1 - 0.1 * 0.01 * 2.0, -1.0 + 0.1 + 0.1 * 0.01 * 1.0]
    assert weight.tolist() == pytest.approx(expected, abs=1e-6)
    assert weight.grad is None


def test_gradients_are_clipped_as_one_and_the_norm_is_that_before():
    one, two = parameter([3.0]), parameter([4.0])
    optimiser = Optimiser([one, two], lr=1e-3, grad_clip=1.0, weight_decay=0.0)
    one.grad, two.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert optimiser.step() == pytest.approx(5.0)
    # exp_avg = (1 − β₁)·g of the clipped gradient (0.6, 0.8)
    moments = [optimiser.adamw.state[weight]["exp_avg"].item() for weight in (one, two)]
    assert moments == pytest.approx([0.06, 0.08])


def test_steps_too_small_for_bfloat16_add_up():
    weight = parameter([1.0], torch.bfloat16)
    optimiser = Optimiser([weight], lr=1e-3, weight_decay=0.0)
    plain = parameter([1.0])
    reference = Optimiser([plain], lr=1e-3, weight_decay=0.0)
    steps(optimiser, [weight], [1.0])
    assert weight.item() == 1.0, "one step is less than bfloat16 can tell apart"
    steps(optimiser, [weight], [1.0] * 19)
    steps(reference, [plain], [1.0] * 20)
    assert weight.item() == torch.tensor(plain.item()).to(torch.bfloat16).item()
    assert weight.item() < 0.99


def test_a_second_optimiser_over_the_same_weights_gets_their_gradients():
    weight = parameter([1.0], torch.bfloat16)
    first = Optimiser([weight], lr=0.1)
    steps(first, [weight], [1.0])
    second = Optimiser([weight], lr=0.1)
    before = weight.item()
    (weight * 3).sum().backward()
    assert second.step() == pytest.approx(3.0)
    assert weight.item() < before
    assert first.masters[0].grad is None


def test_weights_of_32_bits_are_their_own_masters():
    weight = parameter([1.0])
    assert Optimiser([weight], lr=0.1).masters[0] is weight


def test_the_norm_of_many_bfloat16_gradients_is_taken_in_float32():
    """In bfloat16, 1 + 1/512 is 1: the norm of (16, 1) would be 16."""
    weights = [parameter([0.0], torch.bfloat16) for _ in range(2)]
    optimiser = Optimiser(weights, lr=0.1)
    weights[0].grad, weights[1].grad = (torch.tensor([value], dtype=torch.bfloat16) for value in (16.0, 1.0))
    assert optimiser.step() == pytest.approx(math.sqrt(257), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_no_number_takes_no_step(dtype, bad):
    weight, other = parameter([1.0], dtype), parameter([1.0], dtype)
    optimiser = Optimiser([weight, other], lr=0.1, schedule=lambda step: 1 / (step + 1))
    steps(optimiser, [weight, other], [0.5])
    kept, rate = [weight.item(), other.item()], optimiser.lr
    weight.grad, other.grad = torch.tensor([bad], dtype=dtype), torch.tensor([1.0], dtype=dtype)
    assert not math.isfinite(optimiser.step())
    assert ([weight.item(), other.item()], optimiser.lr) == (kept, rate)
    assert weight.grad is None
    steps(optimiser, [weight, other], [0.5])
    assert weight.item() == other.item() != kept[0], "the next gradient is not spoilt"


def test_frozen_weights_are_left_alone():
    frozen, weight = parameter([1.0]), parameter([1.0])
    frozen.requires_grad_(False)
    optimiser = Optimiser([frozen, weight], lr=0.1)
    assert len(optimiser.parameters) == 1
    steps(optimiser, [weight], [1.0])
    assert frozen.item() == 1.0


def test_a_weight_without_gradient_stays():
    used, unused = parameter([1.0], torch.bfloat16), parameter([1.0], torch.bfloat16)
    optimiser = Optimiser([used, unused], lr=0.1)
    steps(optimiser, [used], [1.0, 1.0])
    assert unused.item() == 1.0
    assert used.item() < 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimiser_goes_on_as_if_it_had_not_stopped(tmp_path, dtype):
    def new():
        weights = [parameter([1.0, -2.0], dtype), parameter([[0.5]], dtype)]
        return weights, Optimiser(weights, lr=3e-3, betas=(0.9, 0.98), schedule=schedule("cosine", 3, 20))

    gradients = [math.sin(step) for step in range(12)]
    weights, optimiser = new()
    steps(optimiser, weights, gradients[:5])
    torch.save(
        {"optimiser": optimiser.state_dict(), "weights": [w.detach() for w in weights]}, tmp_path / "state.pt"
    )
    expected_norms = steps(optimiser, weights, gradients[5:])
    again, resumed = new()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    with torch.no_grad():
        for weight, value in zip(again, saved["weights"], strict=True):
            weight.copy_(value)
    resumed.load_state_dict(saved["optimiser"])
    assert steps(resumed, again, gradients[5:]) == expected_norms
    assert resumed.lr == optimiser.lr
    for weight, expected in zip(again, weights, strict=True):
        assert torch.equal(weight, expected)
    for master, expected in zip(resumed.masters, optimiser.masters, strict=True):
        assert torch.equal(master, expected)


def test_the_state_of_another_model_is_refused():
    saved = Optimiser([parameter([1.0], torch.bfloat16)], lr=0.1).state_dict()
    other = Optimiser([parameter([1.0], torch.bfloat16), parameter([1.0], torch.bfloat16)], lr=0.1)
    with pytest.raises(ValueError, match=r"has 1 weights, and this run.s has 2"):
        other.load_state_dict(saved)


def test_gradients_of_bfloat16_weights_are_accumulated_in_float32():
    """In bfloat16, 256 + 1 is 256: forty more of 1 would be lost."""
    weight = parameter([0.0], torch.bfloat16)
    optimiser = Optimiser([weight], lr=0.1, grad_clip=1e9)
    for gradient in (256.0, *[1.0] * 40):
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert optimiser.step() == 296.0
    assert optimiser.step() == 0.0, "the next step starts from nothing"


def test_an_optimiser_that_is_gone_takes_no_gradients():
    weight = parameter([0.0], torch.bfloat16)
    Optimiser([weight], lr=0.1)
    optimiser = Optimiser([weight], lr=0.1)
    weight.sum().backward()
    assert optimiser.step() == 1.0
    del optimiser
    weight.sum().backward()
    assert weight.grad.item() == 1.0


def stack(dtype, layers=16, width=64):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_allocates_nothing_and_gradients_are_held_once(dtype):
    """Sixteen equal matrices: 16 float32 gradients, and no more than two in lower precision beside them."""
    model = stack(dtype)
    matrix = 64 * 64
    optimiser = Optimiser(model.parameters(), lr=1e-3)
    states = [value for state in optimiser.adamw.state.values() for value in state.values()]
    assert bytes_of(states) >= 2 * 16 * matrix * 4, "the moments are there before the first step"
    known = [*model.parameters(), *optimiser.masters, *states]
    for _ in range(2):
        with Live(known) as live:
            for _ in range(3):
                model(torch.ones(1, 64, dtype=dtype)).sum().backward()
        assert live.peak <= (16 * 4 + 2 * 4) * matrix + 10_000
        gradients = [master.grad for master in optimiser.masters]
        with Live([*known, *gradients]) as live:
            optimiser.step()
        assert live.peak < 2_000 < matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_an_older_version_is_taken_over(tmp_path, dtype):
    """It stepped all weights at once and had no state for weights without a gradient."""
    start = [torch.tensor([1.0, -2.0]), torch.tensor([[0.5]]), torch.tensor([3.0])]
    masters = [torch.nn.Parameter(value.clone()) for value in start]
    adamw = torch.optim.AdamW(masters, lr=3e-3, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0)

    def older_step(gradient):
        for master in masters[:2]:
            master.grad = torch.full_like(master, gradient)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        adamw.step()
        scheduler.step()

    for gradient in (0.3, -0.1, 0.2):
        older_step(gradient)
    kept = [] if dtype == torch.float32 else [master.detach() for master in masters]
    older = {"adamw": adamw.state_dict(), "scheduler": scheduler.state_dict(), "masters": kept}
    torch.save(older, tmp_path / "actor-optimiser.pt")
    weights = [torch.nn.Parameter(master.detach().to(dtype)) for master in masters]
    resumed = Optimiser(weights, lr=3e-3)
    resumed.load_state_dict(torch.load(tmp_path / "actor-optimiser.pt", weights_only=True, mmap=True))
    for gradient in (0.25, -0.5):
        older_step(gradient)
        steps(resumed, weights[:2], [gradient])
    for found, expected in zip(resumed.masters, masters, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_state_of_weights_of_other_shapes_is_refused():
    saved = Optimiser([parameter([1.0])], lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"expected shape \(2,\), found \(1,\)"):
        Optimiser([parameter([1.0, 2.0])], lr=0.1).load_state_dict(saved)


def test_another_learning_rate_continues_the_schedule_and_is_saved():
    weight = parameter([0.0])
    optimiser = Optimiser([weight], lr=0.4, schedule=schedule("linear", 0, 4))
    steps(optimiser, [weight], [1.0])
    optimiser.set_lr(0.1)
    assert optimiser.lr == pytest.approx(0.75 * 0.1)
    other = Optimiser([parameter([0.0])], lr=0.4, schedule=schedule("linear", 0, 4))
    other.load_state_dict(optimiser.state_dict())
    assert other.lr == pytest.approx(0.75 * 0.1)


def resident() -> int:
    """Pages of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, which has malloc_trim")
def test_pages_between_tensors_that_are_in_use_go_back_to_the_system():
    torch.zeros(1 << 22)  # glibc takes blocks of the size of one that was freed from its heap
    made = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(100)]
    kept = made[::10]
    del made
    before = resident()
    return_free_memory()
    assert before - resident() > 80 * 256
    assert all(tensor.all() for tensor in kept)


@pytest.mark.parametrize(("most", "calls"), [(2, 1), (3, 0)])
def test_only_a_large_model_returns_its_memory_after_a_step(monkeypatch, most, calls):
    called = []
    monkeypatch.setattr(optimisers, "TRIMMED", most)
    monkeypatch.setattr(optimisers, "return_free_memory", lambda: called.append(1))
    weight = parameter([1.0, 2.0, 3.0])
    steps(Optimiser([weight], lr=0.1), [weight], [1.0])
    assert len(called) == calls
