"""Trajectories written one letter a token: `p` prompt, `a` policy, `o` observation, `f` feedback."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from tests.tiny_models import new_model
from torch import Tensor
from transformers import PreTrainedModel

from srl.trajectory import Question, Segment, SegmentKind, Trajectory
from srl.update.actor import Experience
from srl.update.batch import Batch, collate

SPECS = ("ppaaoaa", "paaa", "ppppafffa", "ppaaaoooaaaaa")
"""Rows of different lengths, some with something that the policy only read."""
KINDS: dict[str, SegmentKind] = {"p": "prompt", "a": "policy", "o": "observation", "f": "feedback"}


def policy(seed: int = 0) -> PreTrainedModel:
    """A small model that has the ids of these trajectories."""
    return new_model("qwen2", vocab_size=40, layers=1, width=16, heads=2, ffn=16, max_length=64, seed=seed)


def trajectory(
    spec: str,
    *,
    seed: int = 0,
    question: str = "q",
    sample: int = 0,
    vocabulary: int = 40,
    failed: bool = False,
) -> Trajectory:
    """A trajectory of random ids from 2 up, its policy tokens with random log-probs."""
    rng, segments = random.Random(f"{spec} {seed}"), []
    for turn, (letter, letters) in enumerate(groupby(spec)):
        ids = tuple(rng.randrange(2, vocabulary) for _ in letters)
        logprobs = tuple(-rng.random() for _ in ids) if letter == "a" else ()
        segments.append(Segment(KINDS[letter], ids, "", turn, logprobs))
    end = "failed" if failed else "answered"
    return Trajectory(Question(question, "", ("x",)), segments, end=end, sample=sample)


def experience(
    trajectories: Sequence[Trajectory],
    *,
    seed: int = 0,
    mask_observations: bool = True,
    dtype: torch.dtype = torch.float32,
    pad_id: int = 0,
) -> Experience:
    """Random numbers for everything that an update reads; rows that failed are out of both masks."""
    batch = collate(trajectories, pad_id)
    valid = torch.tensor([item.valid for item in trajectories], dtype=dtype)[:, None]
    mask = batch.response_mask.to(dtype) * valid
    loss_mask = mask if mask_observations else batch.after_prompt.to(dtype) * valid
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator, dtype=dtype) * loss_mask

    old, reference = (noise(0.1) - 3.5 * loss_mask for _ in range(2))
    plain = on_policy(batch, mask, noise(1), old)
    return replace(plain, loss_mask=loss_mask, returns=noise(1), ref_logprobs=reference, values=noise(0.5))


def on_policy(batch: Batch, mask: Tensor, advantages: Tensor, old: Tensor) -> Experience:
    """What an update reads, without more than it needs."""
    return Experience(
        tokens=batch, valid=mask.any(dim=1), group_ids=torch.arange(len(batch)), mask=mask, loss_mask=mask,
        rewards=advantages, advantages=advantages, returns=advantages, old_logprobs=old,
        sampler_logprobs=batch.sampler_logprobs,
    )  # fmt: skip


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients by parameter name, taken away from the model; zeros if a parameter has none."""
    found = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return found
