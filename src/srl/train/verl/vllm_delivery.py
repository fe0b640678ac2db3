"""What `delivery` needs of verl's vLLM: an adapter for the training worker, an extension of vLLM's worker."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from srl.rollout.delivery import Sample, check_held
from srl.train.verl.delivery import deliver


class CheckedAdapter(ServerAdapter):
    """verl's, which has vLLM's worker check its weights after each update."""

    async def update_weights(self, weights: Any, *arguments: Any, **options: Any) -> None:
        update = super().update_weights
        await deliver(
            weights, lambda part: update(part, *arguments, **options), self._check, options.get("peft_config")
        )

    async def _check(self, sample: Sample) -> None:
        await self._execute_method("check_delivery", args=(sample,))


class CheckedWorker(vLLMColocateWorkerExtension):
    """verl's, with a method that checks the weights of vLLM's worker."""

    model_runner: Any

    def check_delivery(self, sample: Sample) -> None:
        """Raises NotDelivered where it holds other weights than the `sample` of the trainer's."""
        from srl.rollout.vllm_engine import digests_of

        check_held(sample, digests_of(self.model_runner.model, sample))
