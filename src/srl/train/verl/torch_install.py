"""The torch engine as a rollout of verl's, under the name that a configuration asks for it by."""

from __future__ import annotations

NAME = "srl_torch"
"""verl's `actor_rollout_ref.rollout.name`."""


def install() -> None:
    """Register replica and adapter with verl, in this process; again is no harm."""
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[NAME, "async"] = "srl.train.verl.without_gpu.torch_rollout.ServerAdapter"
    replica.RolloutReplicaRegistry.register(NAME, _replica)


def _replica() -> type:
    from srl.train.verl.without_gpu.torch_rollout import TorchReplica

    return TorchReplica
