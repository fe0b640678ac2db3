"""The bias of estimators of turn-level credit, exact, on a decision process that can be enumerated.

A question is answered in up to three turns. Each of the first two is a good search (reward .3 for the turn),
a bad one (0), or an answer, which ends the episode; the third answers. An answer is right (reward 1) with a
probability that grows with the good searches before it. The policy is a softmax for each turn. Every group
of `SIZE` episodes is enumerated with its probability, so expectations have no sampling error.

`turn_rloo` and `rloo` are the plugins themselves.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from srl.advantage import Advantages
from srl_grpo.rloo import estimate as rloo
from srl_grpo.turns import estimate as turn_rloo

SIZE = 3
"""Episodes of a group."""
SEARCH_REWARD = 0.3
RIGHT = (0.1, 0.5, 0.9)
"""The probability that an answer is right, by the number of good searches."""
POLICIES = {"searches often": (1.2, 0.8, 0.0), "even": (0.0, 0.0, 0.0), "answers at once": (-0.5, -0.5, 1.0)}
"""Logits of a good search, a bad one, and an answer, the same for both turns."""
GOOD, BAD, ANSWER = range(3)
Estimator = Callable[[Tensor, Tensor], Tensor]
"""Advantages (groups, rows, 3) of each turn, by rewards and mask (groups, rows, 6)."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One way that an episode can go."""

    actions: tuple[int, ...]
    """What the policy chose; the answer of a third turn is no choice."""
    right: bool

    @property
    def good(self) -> int:
        return self.actions.count(GOOD)

    @property
    def turns(self) -> int:
        return len(self.actions) + (ANSWER not in self.actions)

    @property
    def rewards(self) -> list[float]:
        found = [SEARCH_REWARD * (action == GOOD) for action in self.actions[: self.turns - 1]]
        return [*found, float(self.right)]


def episodes() -> list[Episode]:
    """All of them."""
    searches = (GOOD, BAD)
    chosen = [(ANSWER,), *((one, ANSWER) for one in searches), *itertools.product(searches, repeat=2)]
    return [Episode(actions, right) for actions in chosen for right in (True, False)]


def log_probability(episode: Episode, logits: Tensor) -> Tensor:
    """log P of an episode under the policy's logits (2, 3), the answer's luck included."""
    chance = RIGHT[episode.good] if episode.right else 1 - RIGHT[episode.good]
    turns = [logits[turn].log_softmax(0)[action] for turn, action in enumerate(episode.actions)]
    return torch.stack([*turns, torch.tensor(chance, dtype=logits.dtype).log()]).sum()


def tensors(group: list[Episode]) -> tuple[Tensor, Tensor]:
    """Rewards and mask (rows, 6): a turn is a token, and what is read after it another."""
    rewards, mask = torch.zeros(len(group), 6, dtype=torch.float64), torch.zeros(len(group), 6)
    for row, episode in enumerate(group):
        for turn, reward in enumerate(episode.rewards):
            rewards[row, 2 * turn], mask[row, 2 * turn] = reward, 1
    return rewards, mask


def plugin(estimate: Callable[..., Advantages]) -> Estimator:
    """A plugin's advantage of each turn."""

    def turns(rewards: Tensor, mask: Tensor) -> Tensor:
        groups, rows, _ = rewards.shape
        found = estimate(
            token_level_rewards=rewards.flatten(0, 1), response_mask=mask.flatten(0, 1),
            group_ids=torch.arange(groups).repeat_interleave(rows), valid=torch.ones(groups * rows),
            group_size=rows,
        )  # fmt: skip
        return found.advantages.reshape(rewards.shape)[..., ::2]

    return turns


class Process:
    """The decision process under one policy, enumerated."""

    def __init__(self, logits: tuple[float, float, float]) -> None:
        self.logits = torch.tensor([logits, logits], dtype=torch.float64, requires_grad=True)
        self.episodes = episodes()
        self.rewards, self.mask = tensors(self.episodes)
        self.log_p = torch.stack([log_probability(each, self.logits) for each in self.episodes])
        self.p = self.log_p.detach().exp()
        self.scores = torch.stack([self._scores(each) for each in self.episodes])  # (E, 3, 6)
        self.index = torch.cartesian_prod(*[torch.arange(len(self.episodes))] * SIZE)  # (groups, rows)
        self.weights = self.p[self.index].prod(1)

    def _scores(self, episode: Episode) -> Tensor:
        """∇ log π of each turn's action (3, 6); 0 for the answer of a third turn."""
        found = torch.zeros(3, 6, dtype=torch.float64)
        for turn, action in enumerate(episode.actions):
            found[turn] = self._gradient(self.logits[turn].log_softmax(0)[action])
        return found

    def _gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0].flatten()

    def gradient(self) -> Tensor:
        """∇E[return] (6,)."""
        return self._gradient((self.log_p.exp() * self.rewards.sum(1)).sum())

    def estimates(self, estimator: Estimator) -> Tensor:
        """The gradient (groups, 6) that each group gives."""
        advantages = estimator(self.rewards[self.index], self.mask[self.index])  # (groups, rows, 3)
        return torch.einsum("grt,grtp->gp", advantages, self.scores[self.index]) / SIZE

    def mean(self, estimator: Estimator) -> Tensor:
        """The expectation (6,) of an estimator's gradient."""
        return self.weights @ self.estimates(estimator)


@pytest.fixture(scope="module", params=POLICIES)
def process(request):
    return Process(POLICIES[request.param])


@pytest.mark.parametrize("estimate", [rloo, turn_rloo], ids=["rloo", "turn_rloo"])
def test_without_bias_the_mean_over_all_groups_is_the_gradient_of_the_return(process, estimate):
    assert_close(process.mean(plugin(estimate)), process.gradient(), rtol=0, atol=1e-12)
