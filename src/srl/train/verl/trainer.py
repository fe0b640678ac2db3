"""How a step happens on verl: its own trainer, and an override for each difference.

verl's order of calls (`verl/trainer/ppo/v1/trainer_base.py`). Those marked * are overridden below, in this
order; what is not marked is verl's own.

    init
      _setup *                       starts the workers
        _init_dataloader *           over our questions
        _load_checkpoint *
      on_init_end                    sends the weights to the rollout servers
    fit *                            checks the workers first, measures the test questions last
      _validate *                    val and test questions before the first step
      step *                         for each training step:
        prepare_step                 hands the questions to the rollout workers: `agent_loop.SearchLoop` plays
                                     and scores an episode each, `log_writer.LogActor` keeps it
        _step_once
          sample                     of the replay buffer: waits for the episodes
          on_sample_end *            ends the run where one broke or searches failed; the servers sleep
          _balance_batch *           which worker gets which rows
          _compute_old_log_prob *
          _compute_ref_log_prob *
          _compute_values *
          _compute_advantage *       `srl.train.compute_advantages`, as on the local backend
          _update_critic *
          _update_actor *            by verl's own losses; `patches.py` has what of ours they lack
      _save_checkpoint *
      on_step_end *                  the servers wake with the new weights, and check that they hold them
      _validate *
      _compute_metrics *             the step goes to the log; its checkpoint counts from then on
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.utils.padding import response_to_nested

from srl.advantage import masked_mean
from srl.config import Config
from srl.errors import UserError
from srl.files import CHECKPOINT, FORMAT, checksums, read_json, write_json, write_manifest
from srl.rollout.delivery import NotDelivered
from srl.train.compute_advantages import compute_advantages, rollout_correction
from srl.train.load_components import load_algorithm
from srl.train.questions import Splits
from srl.train.resume import resume_with, too_many_failures
from srl.train.run_directory import (
    VERL_STATE,
    checkpoint_path,
    name_latest_verl_step,
    superseded_checkpoints,
)
from srl.train.verl.batch import (
    balanced_order,
    block_of,
    step_batch,
    tokens_by_trajectory,
    update_fields,
)
from srl.train.verl.dataset import Questions
from srl.train.verl.job import ABOUT, TORCH
from srl.train.verl.log_writer import log_actor_of
from srl.train.verl.patches import put
from srl.train.verl.workers import check_registered
from srl.trajectory import Phase
from srl.update.kl import kl_controller

MEETING_PORTS = (20_000, 32_000)
"""Where the workers may meet: below the ports that Linux gives to outgoing connections, from 32,768 on."""
POLL_S = 0.2
"""Seconds between two looks whether a batch's episodes are done; verl's are 2."""
FIELDS = (
    "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "entropy", "ref_log_prob", "values",
)  # fmt: skip
OF_VALIDATION = ("val/", "val-core/", "val-aux/")
"""What the names of a validation's metrics begin with."""


def _marked(method: str, stage: str) -> Callable[..., Any]:
    """verl's `method`, after telling the log actor that the stage `stage` begins."""

    def marked(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        self._mark(stage)
        return getattr(PPOTrainerSync, method)(self, batch, metrics)

    return marked


class SearchTrainer(PPOTrainerSync):
    """verl's synchronous PPO trainer over search episodes.

    `config` is verl's; `run` is the run's directory, `srl` our configuration, `splits` the questions that the
    launcher has read and checked.
    """

    val_dataloader: Any

    def __init__(self, config: DictConfig, run: Path, srl: Config, splits: Splits) -> None:
        self.run, self.srl, self.splits = run, srl, splits
        self.log_actor = log_actor_of(run)
        control = srl.algorithm.kl_ctrl
        self.kl = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.algorithm = load_algorithm(srl)
        self.step_metrics: dict[str, float] = {}
        self.tokens: dict[str, dict[str, list[float]]] = {}
        self.saved_step = -1
        super().__init__(config)
        self.replay_buffer.poll_interval = POLL_S

    # The start.

    def _setup(self) -> None:
        """verl's workers, which meet at a port that no outgoing connection takes before they listen on it."""
        group = trainer_base.RayWorkerGroup
        first = random.SystemRandom().randrange(*MEETING_PORTS)
        put(trainer_base, "RayWorkerGroup", partial(group, master_port_range=[first, MEETING_PORTS[1]]))
        try:
            super()._setup()
        finally:
            put(trainer_base, "RayWorkerGroup", group)
        with open_dict(self.config):  # the workers have a copy; the trainer names no latest checkpoint
            self.config.actor_rollout_ref.actor.checkpoint.async_save = True

    def _init_dataloader(self) -> None:
        """The questions of all steps in the order of the local backend, and how long the optimisers run.

        The actor's is planned for the steps from `critic_warmup` on.
        """
        config, size = self.config, self.config.data.train_batch_size
        train = Questions.of(self.splits, "train", self.srl)
        self.train_dataloader = StatefulDataLoader(train, size, drop_last=True, collate_fn=collate_fn)
        self.train_dataloader_it = None
        self.steps_per_epoch = len(train) // size
        self.total_training_steps = config.trainer.total_training_steps
        first = max(1, config.trainer.critic_warmup)
        with open_dict(config):
            actor = config.actor_rollout_ref.actor.optim
            actor.total_training_steps = max(1, self.total_training_steps - (first - 1))
            config.critic.optim.total_training_steps = self.total_training_steps

    def _load_checkpoint(self) -> None:
        """Load verl's checkpoint and our state beside it. A resumed run skips the validation at the start."""
        super()._load_checkpoint()
        if not self.global_steps:
            return
        state: dict[str, Any] = read_json(self._folder() / VERL_STATE, dict)
        self.kl.load_state_dict(state["kl"])
        with open_dict(self.config):
            self.config.trainer.val_before_train = False

    def fit(self, agent_loop_manager: Any) -> None:
        """Check that all workers have registered, train, and measure the test split at the end."""
        self.agent_loop_manager = agent_loop_manager
        self._mark("checking the workers")
        self._check_workers()
        super().fit(agent_loop_manager)
        self.global_steps -= 1  # verl counts one step beyond the last
        if self.splits.test:
            self._evaluate("test")
        ray.get(self.log_actor.flush.remote())

    def _validate(self) -> dict[str, float]:
        metrics = self._evaluate("val") if self.splits.val else {}
        if self.global_steps == 0 and self.splits.test:
            metrics |= self._evaluate("test")
        return metrics or {"val/questions": 0.0}

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self._mark("rollout")
        return super().step(metrics, timing_raw)

    def on_sample_end(self) -> None:
        """Stop where an episode broke, or search failed too often; then verl's servers sleep."""
        self._stop_on_failures("train")
        self._mark("putting the rollout to sleep")
        super().on_sample_end()

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **options: Any) -> Any:
        """verl's batch, padded, in the order in which mini-batches hold the same questions as locally."""
        batch = super()._balance_batch(batch, metrics, *args, **options)
        workers = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        n, actor = self.config.actor_rollout_ref.rollout.n, self.config.actor_rollout_ref.actor
        critic = self.config.critic.ppo_mini_batch_size * n if self.use_critic else None
        block = block_of(actor.ppo_mini_batch_size * n, critic, workers)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["index", "session_id"]
        )
        places = zip(*(data.pop(name).tolist() for name in ("index", "session_id")), strict=True)
        rows = [
            (sys.maxsize, row) if tag.get("is_padding", False) else (int(question), int(sample))
            for row, (tag, (question, sample)) in enumerate(zip(batch.tags, places, strict=True))
        ]
        lengths = [int(tag["seq_len"]) for tag in batch.tags]
        batch.reorder(balanced_order(rows, lengths, workers=workers, block=block))
        return batch

    _compute_old_log_prob = _marked("_compute_old_log_prob", "log-probs")
    _compute_ref_log_prob = _marked("_compute_ref_log_prob", "reference")
    _compute_values = _marked("_compute_values", "values")

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute the step's advantages, and write what verl's update reads to its queue."""
        self._mark("advantages")
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*FIELDS, "extra_fields"]
        )
        extra = data.pop("extra_fields").tolist()
        self._stop_on_old_weights(extra)
        mask = data["response_mask"]
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        fields = DataProto(batch=data.to_padded_tensor()).batch
        step = step_batch(fields, extra, padding)
        correction = rollout_correction(self.srl, same_weights=False)
        result = compute_advantages(step, self.srl, self.algorithm, self.kl, correction)
        self.step_metrics = dict(result.metrics)
        entropy = fields.get("entropy")
        if entropy is not None and bool(step.mask.any()):  # verl aggregates its own like the loss
            self.step_metrics["actor/entropy"] = float(masked_mean(entropy.float(), step.mask))
        lengths = mask.offsets().diff().tolist()
        self.tokens = tokens_by_trajectory(result, entropy, extra, padding, lengths)
        update = update_fields(result)
        nested = {name: response_to_nested(value, mask) for name, value in update.items()}
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(nested, batch_size=len(batch)),
        )

    _update_critic = _marked("_update_critic", "update of the critic")
    _update_actor = _marked("_update_actor", "update of the policy")

    def _save_checkpoint(self) -> None:
        """verl's parts. The checkpoint becomes the latest once its step is in the log."""
        self._mark("saving a checkpoint")
        super()._save_checkpoint()
        self.saved_step = self.global_steps

    def on_step_end(self) -> None:
        self._mark("sending the weights")
        super().on_step_end()
        self._mark("logging")

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **options: Any) -> None:
        """verl's metrics, overridden by ours of the same name, go to the log, which nobody waits for.

        verl has put those of the step's validation among them, which has its own place in the log.
        """
        super()._compute_metrics(batch, metrics, *args, **options)
        metrics.update(self.step_metrics)
        numbers = _numbers(metrics)
        trained = {name: numbers[name] for name in numbers if not name.startswith(OF_VALIDATION)}
        self.log_actor.finish.remote(self.global_steps, "train", trained, self.tokens)
        self.step_metrics, self.tokens = {}, {}
        if self.saved_step == self.global_steps:  # a folder may be that of an attempt which was killed
            self._settle_checkpoint()

    # Our own methods.

    def _check_workers(self) -> None:
        """Raises UserError naming a process that has not registered with verl as this one has."""
        replicas = self.llm_server_manager.get_replicas()
        is_ours = self.config.actor_rollout_ref.rollout.name == TORCH  # which imports no verl
        servers = [] if is_ours else [server for replica in replicas for server in replica.servers]
        loops = self.agent_loop_manager.agent_loop_workers
        check_registered([*loops, *self.actor_rollout_wg.workers, *servers])

    def _evaluate(self, phase: Phase) -> dict[str, float]:
        """Run verl's validation on the questions of `phase`; the metrics of the local backend.

        Raises UserError, and logs nothing, where search failed in more episodes than is allowed.
        """
        self._mark(f"{phase} questions")
        questions = Questions.of(self.splits, phase, self.srl)
        self.val_dataloader = StatefulDataLoader(questions, len(questions), collate_fn=collate_fn)
        metrics = super()._validate()
        self._stop_on_failures(phase)
        return ray.get(self.log_actor.finish.remote(self.global_steps, phase, _numbers(metrics)))

    def _mark(self, where: str) -> None:
        self.log_actor.mark.remote(where, getattr(self, "global_steps", 0))

    def _stop_on_failures(self, phase: Phase) -> None:
        """Raises what an episode of the run failed with, which verl only logs, and UserError where search
        failed in more of the step's episodes than is allowed."""
        if failure := ray.get(self.log_actor.failure.remote()):
            raise failure
        if count := sum(map(len, self.replay_buffer.failure_keys.values())):
            hint = f"the reason is in the logs of Ray's workers; {resume_with(self.run)}"
            raise UserError(f"verl dropped {count} questions", hint=hint)
        failed = ray.get(self.log_actor.failed_episodes.remote(self.global_steps, phase))
        if error := too_many_failures(self.run, failed, self.srl.search.max_failed):
            raise error

    def _stop_on_old_weights(self, extra: list[Mapping[str, Any]]) -> None:
        """Raises NotDelivered where a server sampled with other weights than those of the step before."""
        bounds = ("min_global_steps", "max_global_steps")
        versions = {int(row[bound]) for row in extra if row["srl_valid"] for bound in bounds}
        if stale := versions - {self.global_steps - 1}:
            raise NotDelivered(f"step {self.global_steps} was sampled with the weights of step {min(stale)}")

    def _settle_checkpoint(self) -> None:
        """Make the step's checkpoint the latest, once its step is in the log.

        KL controller and model card go beside verl's parts, with checksums of all. Then those that `trainer`
        does not keep are removed.
        """
        val_em = ray.get(self.log_actor.flush.remote())
        state = {"format": FORMAT, "step": self.global_steps, "kl": self.kl.state_dict()}
        folder = self._folder()
        write_json(folder / VERL_STATE, {**state, **read_json(self.run / ABOUT, dict)})
        write_manifest(folder, CHECKPOINT, {"step": self.global_steps, "files": checksums(folder)})
        name_latest_verl_step(self.run, self.global_steps)
        for checkpoint in superseded_checkpoints(self.run, self.srl.trainer.max_ckpt_to_keep, "verl", val_em):
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _folder(self) -> Path:
        return checkpoint_path(self.run, self.global_steps, "verl")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers
