"""verl's vLLM rollout, which checks after each update that it holds the weights which the trainer sent."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from srl.rollout.delivery import NotDelivered, Sample, check_held, sampled
from srl.train.verl.failures import reason


class CheckedAdapter(ServerAdapter):
    """verl's side of the training worker: it sends the weights. Raises NotDelivered."""

    async def update_weights(self, weights: Any, *arguments: Any, **options: Any) -> None:
        adapter, sample = options.get("peft_config"), dict[str, Any]()
        scaling = adapter["lora_alpha"] / adapter["r"] if adapter else 1.0
        sent: Any = sampled(weights, sample, scaling)
        await super().update_weights(sent, *arguments, **options)
        try:
            await self._execute_method("check_delivery", args=(sample,))
        except Exception as error:  # vLLM hands on what an error says, not the error
            raise NotDelivered(reason(error)) from error


class CheckedWorker(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's worker, with a method that checks its weights."""

    model_runner: Any

    def check_delivery(self, sample: Sample) -> None:
        """Raises NotDelivered where it holds other weights than the `sample` of the trainer's."""
        from srl.rollout.vllm_engine import digests_of

        check_held(sample, digests_of(self.model_runner.model, sample))
