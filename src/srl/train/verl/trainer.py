"""verl's trainer with our advantages, log, checkpoints and checks; the rest is verl's own."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from srl.config import load_saved
from srl.files import CHECKPOINT, FORMAT, HAS_MANIFEST, checksums, read_json, write_json, write_manifest
from srl.rollout.delivery import NotDelivered
from srl.train.compute_advantages import compute_advantages, rollout_correction
from srl.train.episodes import Splits
from srl.train.load_components import load_algorithm
from srl.train.resume import resume_with, too_many_failures
from srl.train.run_directory import (
    VERL_STATE,
    checkpoint_path,
    superseded_checkpoints,
    write_latest_verl_step,
)
from srl.train.verl.balance import balanced_order, block_of
from srl.train.verl.batch import (
    returns_and_values,
    step_batch,
    token_columns,
    tokens_by_trajectory,
    update_fields,
)
from srl.train.verl.dataset import Questions
from srl.train.verl.failures import ended_by
from srl.train.verl.job import ABOUT, TORCH
from srl.train.verl.log_writer import log_actor_of
from srl.train.verl.patches import put
from srl.train.verl.schedule import actor_learns_after_the_critic
from srl.train.verl.watchdog import ActorHealth
from srl.train.verl.worker_check import check_alike, check_search
from srl.trajectory import Phase
from srl.update.kl import kl_controller

MEETING_PORTS = (20_000, 32_000)
"""Where the workers may meet: below the ports that Linux gives to outgoing connections, from 32,768 on."""
POLL_S = 0.2
"""Seconds between two checks whether a batch's episodes are done."""
FIELDS = (
    "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "entropy", "ref_log_prob", "values",
)  # fmt: skip


def _marked(method: str, stage: str) -> Callable[..., Any]:
    """verl's `method`, after telling the log actor that the stage `stage` begins."""

    def marked(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        self._mark(stage)
        return getattr(PPOTrainerSync, method)(self, batch, metrics)

    return marked


class SearchTrainer(PPOTrainerSync):
    """verl's synchronous PPO trainer over search episodes, with an override for each difference.

    Rewards, advantages and their metrics come from `srl.train.compute_advantages`. Metrics and the numbers of
    the tokens go to the log actor. An error in an episode, or a dead process, ends the wait for a batch.
    Validation and test have the metrics of the local backend.

    `config` is verl's; `run` is the run's directory.
    """

    val_dataloader: Any

    def __init__(self, config: DictConfig, run: Path, splits: Splits) -> None:
        self.run, self.splits = run, splits
        self.srl = load_saved(run)
        self.log_actor = log_actor_of(self.run)
        control = self.srl.algorithm.kl_ctrl
        self.kl = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.algorithm = load_algorithm(self.srl)
        self.step_metrics: dict[str, float] = {}
        self.tokens: dict[str, dict[str, list[float]]] = {}
        self.health = ActorHealth({})
        self.loaders: dict[Phase, StatefulDataLoader] = {}
        self.saved_step = -1
        super().__init__(config)

    # Overrides of verl's methods.

    def _setup(self) -> None:
        """verl's workers, which meet at a port that no outgoing connection takes before they listen on it."""
        theirs = trainer_base.RayWorkerGroup
        first = random.SystemRandom().randrange(*MEETING_PORTS)
        put(trainer_base, "RayWorkerGroup", partial(theirs, master_port_range=[first, MEETING_PORTS[1]]))
        try:
            super()._setup()
        finally:
            put(trainer_base, "RayWorkerGroup", theirs)

    def _init_dataloader(self) -> None:
        """verl's loaders, over the questions that the launcher has read and checked."""
        theirs = trainer_base.create_rl_dataset
        put(trainer_base, "create_rl_dataset", self._dataset)
        try:
            super()._init_dataloader()
        finally:
            put(trainer_base, "create_rl_dataset", theirs)
        actor_learns_after_the_critic(self.config)

    def _build_replay_buffer(self) -> Any:
        buffer: Any = super()._build_replay_buffer()
        buffer.poll_interval = POLL_S
        wait = buffer._wait_for_next_poll

        def watched(*args: Any) -> Any:
            self._stop_if_broken()
            return wait(*args)

        put(buffer, "_wait_for_next_poll", watched)
        return buffer

    def fit(self, agent_loop_manager: Any) -> None:
        """Check the workers, train, and measure the test split at the end."""
        self.agent_loop_manager = agent_loop_manager
        self._mark("checking the workers")
        self._check_workers()
        super().fit(agent_loop_manager)
        self.global_steps -= 1  # verl counts one step beyond the last
        if self._asks("test"):
            self._evaluate("test")

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self._mark("rollout")
        return super().step(metrics, timing_raw)

    def on_sample_end(self) -> None:
        self._stop_if_broken()
        self._stop_on_failures("train")
        self._mark("putting the rollout to sleep")
        super().on_sample_end()

    def on_step_end(self) -> None:
        self._mark("sending the weights")
        super().on_step_end()
        self._mark("logging")

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **named: Any) -> Any:
        """verl's batch, padded, in the order in which mini-batches hold the same questions as locally."""
        batch = super()._balance_batch(batch, metrics, *args, **named)
        workers = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        n, actor = self.config.actor_rollout_ref.rollout.n, self.config.actor_rollout_ref.actor
        critic = self.config.critic.ppo_mini_batch_size * n if self.use_critic else None
        block = block_of(actor.ppo_mini_batch_size * n, critic, workers)
        lengths = [int(tag["seq_len"]) for tag in batch.tags]
        batch.reorder(balanced_order(_places(batch), lengths, workers=workers, block=block))
        return batch

    _compute_old_log_prob = _marked("_compute_old_log_prob", "log-probs")
    _compute_ref_log_prob = _marked("_compute_ref_log_prob", "reference")
    _compute_values = _marked("_compute_values", "values")
    _update_critic = _marked("_update_critic", "update of the critic")
    _update_actor = _marked("_update_actor", "update of the policy")

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
        correction = rollout_correction(self.srl, same_weights=False)
        known = DataProto(batch=data.to_padded_tensor()).batch
        step = step_batch(known, extra, padding, correction)
        result = compute_advantages(step, self.srl, self.algorithm, self.kl)
        self.step_metrics = result.metrics | returns_and_values(step, result)
        entropy = known.get("entropy")
        if entropy is not None and bool(step.mask.any()):  # verl aggregates its own like the loss
            self.step_metrics["actor/entropy"] = float(masked_mean(entropy.float(), step.mask))
        columns = token_columns(step, result, entropy)
        self.tokens = tokens_by_trajectory(columns, extra, padding, mask.offsets().diff().tolist())
        fields = update_fields(step, result)
        nested = {name: response_to_nested(value, mask) for name, value in fields.items()}
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(nested, batch_size=len(batch)),
        )

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **named: Any) -> None:
        """verl's metrics, overridden by ours of the same name; then the step goes to the log.

        verl has put those of the step's validation among them, which has its own place in the log.
        """
        super()._compute_metrics(batch, metrics, *args, **named)
        metrics.update(self.step_metrics)
        numbers = _numbers(metrics)
        trained = {name: numbers[name] for name in numbers if not name.startswith(_OF_VALIDATION)}
        metrics.update(self._finish("train", trained, self.tokens))
        self.step_metrics, self.tokens = {}, {}
        self._stop_if_broken()
        if self.saved_step == self.global_steps:  # a folder may be that of an attempt which was killed
            self._settle_checkpoint()

    def _validate(self) -> dict[str, float]:
        metrics = self._evaluate("val") if self._asks("val") else {}
        if self.global_steps == 0 and self._asks("test"):
            metrics |= self._evaluate("test")
        return metrics or {"val/questions": 0.0}

    def _load_checkpoint(self) -> None:
        """Load verl's checkpoint and our state beside it. A resumed run skips the validation at the start."""
        super()._load_checkpoint()
        if not self.global_steps:
            return
        state = json.loads((self._folder(self.global_steps) / VERL_STATE).read_text(encoding="utf-8"))
        self.kl.load_state_dict(state["kl"])
        ray.get(self.log_actor.resume.remote(self.global_steps))
        with open_dict(self.config):
            self.config.trainer.val_before_train = False

    def _save_checkpoint(self) -> None:
        """Save verl's parts and ours. The checkpoint becomes the latest once its step is in the log."""
        self._mark("saving a checkpoint")
        self._save_state()
        with _keeping_the_latest(self.config):
            super()._save_checkpoint()
        self.saved_step = self.global_steps

    # Our own methods.

    def _dataset(self, *ignored: Any, is_train: bool, **named: Any) -> Questions:
        return Questions.of(self.splits, "train" if is_train else "val", self.srl)

    def _asks(self, phase: Phase) -> bool:
        return bool(getattr(self.splits, phase))

    def _evaluate(self, phase: Phase) -> dict[str, float]:
        """Run verl's validation on the questions of `phase`; the metrics of the local backend.

        Raises UserError, and logs nothing, where search failed in more episodes than is allowed.
        """
        self._mark(f"{phase} questions")
        validation = self.val_dataloader
        try:
            if phase not in self.loaders:
                self.loaders[phase] = _loader(Questions.of(self.splits, phase, self.srl))
            self.val_dataloader = self.loaders[phase]
            metrics = super()._validate()
        finally:
            self.val_dataloader = validation
        self._stop_if_broken()
        self._stop_on_failures(phase)
        return self._finish(phase, _numbers(metrics))

    def _finish(self, phase: Phase, metrics: Mapping[str, float], tokens: Any = None) -> dict[str, float]:
        return ray.get(self.log_actor.finish.remote(self.global_steps, phase, metrics, tokens))

    def _mark(self, where: str) -> None:
        self.log_actor.mark.remote(where, getattr(self, "global_steps", 0))

    def _stop_if_broken(self) -> None:
        """Raises UserError if an episode failed with an error, or a process of the run died."""
        broken = ray.get(self.log_actor.failure.remote()) or self.health.dead() or self._given_up()
        if broken:
            raise ended_by(broken, self.run)

    def _given_up(self) -> str:
        """An error message where verl dropped questions: it only logs errors outside our agent loop."""
        lost = sum(map(len, self.replay_buffer.failure_keys.values()))
        return f"verl dropped {lost} questions; the reason is in the logs of Ray's workers" if lost else ""

    def _stop_on_failures(self, phase: Phase) -> None:
        """Raises UserError when search failed in more of the step's episodes of `phase` than is allowed."""
        found = ray.get(self.log_actor.failed_episodes.remote(self.global_steps, phase))
        if error := too_many_failures(self.run, found, self.srl.search.max_failed):
            raise error

    def _stop_on_old_weights(self, extra: Sequence[Mapping[str, Any]]) -> None:
        """Raises NotDelivered where a server sampled with other weights than those of the step before."""
        bounds = ("min_global_steps", "max_global_steps")
        versions = {int(row[bound]) for row in extra if row["srl_valid"] for bound in bounds}
        if old := versions - {self.global_steps - 1}:
            raise NotDelivered(
                f"step {self.global_steps} was sampled with the weights of step {min(old)}; "
                f"{resume_with(self.run)}"
            )

    def _check_workers(self) -> None:
        """Raises UserError naming a worker that differs from this process. All are watched from here on."""
        loops: list[Any] = self.agent_loop_manager.agent_loop_workers
        named: dict[str, Any] = {f"rollout {n}": worker for n, worker in enumerate(loops)}
        named |= {f"training {n}": worker for n, worker in enumerate(self.actor_rollout_wg.workers)}
        replicas = self.llm_server_manager.get_replicas()
        servers = {f"server {n}": server for n, one in enumerate(replicas) for server in one.servers}
        self.health = ActorHealth(named | servers)
        runs_verl = self.config.actor_rollout_ref.rollout.name != TORCH
        check_alike(named | servers if runs_verl else named)
        check_search(self.run, loops)

    def _settle_checkpoint(self) -> None:
        """Make the step's checkpoint the latest, with checksums, once its step is in the log."""
        ray.get(self.log_actor.flush.remote())
        folder = self._folder(self.global_steps)
        files = checksums(folder)
        self._save_state(**HAS_MANIFEST)
        files |= checksums(folder, [VERL_STATE])
        write_manifest(folder, CHECKPOINT, {"step": self.global_steps, "files": files})
        write_latest_verl_step(self.run, self.global_steps)
        self._drop_old()

    def _save_state(self, **noted: bool) -> None:
        """Write KL controller and model card beside verl's parts of the checkpoint.

        It is written again when the checksums of the other files are known.
        """
        folder = self._folder(self.global_steps)
        folder.mkdir(parents=True, exist_ok=True)
        known = {"format": FORMAT, "step": self.global_steps, "kl": self.kl.state_dict()}
        write_json(folder / VERL_STATE, {**known, **read_json(self.run / ABOUT, dict), **noted})

    def _folder(self, step: int) -> Path:
        return checkpoint_path(self.run, step, "verl")

    def _drop_old(self) -> None:
        """Remove half-written checkpoints, and those that `trainer` does not say to keep."""
        trainer = self.srl.trainer
        known = ray.get(self.log_actor.validations.remote()) if trainer.keep_best_ckpt else None
        for folder in superseded_checkpoints(self.run, trainer.max_ckpt_to_keep, "verl", known):
            shutil.rmtree(folder, ignore_errors=True)


_OF_VALIDATION = ("val/", "val-core/", "val-aux/")
"""What the names of a validation's metrics begin with."""


@contextmanager
def _keeping_the_latest(config: DictConfig) -> Iterator[None]:
    """Inside, verl saves without naming the checkpoint the latest, as it does when it saves asynchronously.

    Only the trainer reads this part of the configuration; the workers, which save, have their own copy.
    """
    section = config.actor_rollout_ref.actor.checkpoint
    before = section.get("async_save", False)
    with open_dict(section):
        section.async_save = True
    try:
        yield
    finally:
        section.async_save = before


def _places(batch: Any) -> list[tuple[int, int]]:
    """The position of each row's question, and its sample; padding rows sort last."""
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["index", "session_id"]
    )
    asked, samples = (data.pop(name).tolist() for name in ("index", "session_id"))
    padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
    return [
        (sys.maxsize, row) if fill else (int(question), int(sample))
        for row, (question, sample, fill) in enumerate(zip(asked, samples, padding, strict=True))
    ]


def _loader(questions: Questions) -> StatefulDataLoader:
    return StatefulDataLoader(questions, batch_size=len(questions), shuffle=False, collate_fn=collate_fn)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found
