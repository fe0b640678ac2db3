"""The process in which verl's trainer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Runner:
    """A plain class that becomes a Ray actor: it sets up verl's parts in verl's order, and trains."""

    def run(self, config: DictConfig) -> None:
        """Train to the end of the run, or raise what ended it."""
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        from srl.train.verl.register import register
        from srl.train.verl.trainer import SearchTrainer

        register()
        _alone()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        try:
            trainer = SearchTrainer(config=config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        finally:
            tq.close()


def _alone() -> None:
    """Raises UserError where another run uses this Ray cluster: TransferQueue keeps one queue in each."""
    import ray

    from srl.errors import UserError

    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return
    raise UserError(
        "another run of verl is at work on this Ray cluster, whose queue holds the episodes of one run: "
        "wait for it, or give this run a cluster of its own"
    )
