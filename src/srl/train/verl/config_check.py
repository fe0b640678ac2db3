"""What a run on verl cannot keep, found before any process is started.

`compose` refuses what our keys say. `validated` adds what verl would only find out in its workers, and verl's
own validation.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from typing import TYPE_CHECKING

from srl.config import Config
from srl.config.cross_checks import context_errors, truncation_errors
from srl.config.keys import keys, plain, value_of
from srl.config.unread import missing
from srl.errors import UserError, first_line
from srl.train.verl.job import TORCH, Job, model_config, rollout_name
from srl.train.verl.translate import MODEL, composed, settings

if TYPE_CHECKING:
    from omegaconf import DictConfig


def compose(config: Config, job: Job) -> DictConfig:
    """verl's configuration of a run: its defaults, then our settings, then the section `verl`.

    Raises UserError for a setting that verl cannot keep, and for a key that verl does not have.
    """
    check_supported(config, job)
    return composed(config, settings(config, job))


def validated(config: Config, job: Job) -> DictConfig:
    """`compose`, with all checks passed. Raises UserError."""
    verl_config = compose(config, job)
    for problem in problems(verl_config, config):
        raise problem
    _check_with_verl(verl_config)
    return verl_config


def check_supported(config: Config, job: Job) -> None:
    """Raises UserError for the first setting that this backend cannot keep."""
    for problem in (
        *_refused(config), *_not_on_these_machines(config, job), *_not_in_training(config, job)
    ):  # fmt: skip
        raise problem


def _problem(config: Config, key: str, why: str, hint: str = "") -> UserError:
    return UserError(f"{key} = {plain(value_of(config, key))}: {why}", key=key, hint=hint)


def _refused(config: Config) -> Iterator[UserError]:
    """Keys that verl cannot keep, where they have an effect and not their default."""
    for key in keys():
        if not key.facts.refused:
            continue
        void = missing(config, key.name) or (key.name == "ref.path" and not config.needs_reference)
        if value_of(config, key.name) != key.default and not void:
            hint = f"leave it at {plain(key.default)}, or leave out --backend verl"
            yield _problem(config, key.name, f"not supported with --backend verl: {key.facts.refused}", hint)


def _not_on_these_machines(config: Config, job: Job) -> Iterator[UserError]:
    """Which rollout engine runs on which kind of machine."""
    cluster, device = config.cluster, config.model.device
    if rollout_name(config, job) == TORCH and not job.cpu:
        yield _problem(config, "cluster.rollout", "torch is for machines without a GPU", "set vllm or sglang")
    if rollout_name(config, job) == TORCH and cluster.tensor_model_parallel_size > 1:
        why = "the torch rollout keeps a whole copy of the model in each worker"
        yield _problem(config, "cluster.tensor_model_parallel_size", why, "set 1")
    if ":" in device:
        hint = "set auto, and CUDA_VISIBLE_DEVICES to choose some"
        yield _problem(config, "model.device", "the workers use all visible GPUs", hint)
    if device == "cuda" and job.cpu:
        yield _problem(config, "model.device", "this machine has no GPU", "set auto")


def _not_in_training(config: Config, job: Job) -> Iterator[UserError]:
    if config.trainer.total_training_steps == 0:
        hint = "`srl eval run` evaluates without training"
        yield _problem(config, "trainer.total_training_steps", "verl takes at least one step", hint)
    yield from map(UserError, truncation_errors(config, rollout_name(config, job)))
    mode, _ = config.search.cassette_use or ("", "")
    if mode == "record" and config.rollout.search:
        why = "--backend verl runs episodes in several processes and cannot record a cassette"
        yield _problem(config, "search.cassette", why, "record with --backend local, and replay it here")
    for name in config.reward.weights:
        if str(config.reward.options(name).get("device", "")).startswith("cuda"):
            why = "--backend verl scores in processes without a GPU"
            yield _problem(config, f"reward.{name}.device", why, "set cpu")


def problems(verl_config: DictConfig, config: Config) -> Iterator[UserError]:
    """What one of verl's workers would fail on, with the keys of ours to change."""
    yield from _machines(verl_config, config)
    workers, n = _workers(verl_config), verl_config.actor_rollout_ref.rollout.n
    for who, section in (("actor", verl_config.actor_rollout_ref.actor), ("critic", verl_config.critic)):
        size, shared = section.ppo_mini_batch_size, int(section.get("ulysses_sequence_parallel_size", 1))
        copies = workers // shared  # that take different rows
        if (who == "actor" or verl_config.critic.enable) and (copies == 0 or size * n % copies):
            key = f"{who}.ppo_mini_batch_size"
            what = f"{key} = {size} questions × rollout.n = {n} do not divide by {copies} copies of the model"
            yield UserError(what, key=key, hint="data.train_batch_size bounds it too")


def _workers(verl_config: DictConfig) -> int:
    """How many GPUs the run uses, or workers in their place."""
    return int(verl_config.trainer.nnodes * verl_config.trainer.n_gpus_per_node)


def _machines(verl_config: DictConfig, config: Config) -> Iterator[UserError]:
    """What machines and model do not allow. Without an address a run starts a Ray cluster of its own, with
    the GPUs that are here."""
    if verl_config.trainer.nnodes > 1 and config.cluster.address is None:
        hint = "run `ray start` on each, and set cluster.address=auto"
        yield _problem(config, "cluster.nnodes", "several machines need a Ray cluster that is there", hint)
    workers = _workers(verl_config)
    if workers % verl_config.actor_rollout_ref.rollout.tensor_model_parallel_size:
        yield _problem(config, "cluster.tensor_model_parallel_size", f"does not divide the {workers} GPUs")
    context = model_config(verl_config.actor_rollout_ref.model.path).get("max_position_embeddings")
    yield from map(UserError, context_errors(config, context))


def _check_with_verl(verl_config: DictConfig) -> None:
    """verl's own validation, whose output is dropped, of a copy for which it loads nothing: it would read
    the critic's model, and import vLLM for LoRA."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    copy = deepcopy(verl_config)
    OmegaConf.update(copy, "critic.model", None, merge=False)
    if find_spec("vllm") is None:
        for rank in ("lora_rank", "lora.rank"):
            OmegaConf.update(copy, f"{MODEL}.{rank}", 0, merge=False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(copy, need_reference_policy(copy), need_critic(copy))
    except Exception as error:
        raise UserError(f"verl refuses the configuration: {first_line(error.__cause__ or error)}") from error
