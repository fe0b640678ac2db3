"""What a run on verl cannot keep, found before any process is started.

`compose` refuses what our keys say. `validated` adds what verl would only find out in its workers, and verl's
own validation.
"""

from __future__ import annotations

import contextlib
import io
from copy import deepcopy
from importlib.util import find_spec
from typing import TYPE_CHECKING

from srl.config import Config
from srl.config.cross_checks import check_context, check_truncation
from srl.config.keys import keys, plain, value_of
from srl.config.sections import ACTOR
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


def check_supported(config: Config, job: Job) -> None:
    """Raises UserError for the first setting that this backend cannot keep."""
    for key in keys():  # refused ones, where they have an effect and not their default
        void = missing(config, key.name) or (key.name == "ref.path" and not config.needs_reference)
        if key.facts.refused and value_of(config, key.name) != key.default and not void:
            hint = f"leave it at {plain(key.default)}, or leave out --backend verl"
            raise _problem(config, key.name, f"not supported with --backend verl: {key.facts.refused}", hint)
    cluster, device, is_torch = config.cluster, config.model.device, rollout_name(config, job) == TORCH
    mode, _ = config.search.cassette_use or ("", "")
    devices = {name: str(config.reward.options(name).get("device", "")) for name in config.reward.weights}
    rows = [
        (is_torch and not job.cpu, "cluster.rollout",
         "torch is for machines without a GPU", "set vllm or sglang"),
        (is_torch and cluster.tensor_model_parallel_size > 1, "cluster.tensor_model_parallel_size",
         "the torch rollout keeps a whole copy of the model in each worker", "set 1"),
        (":" in device, "model.device",
         "the workers use all visible GPUs", "set auto, and CUDA_VISIBLE_DEVICES to choose some"),
        (device == "cuda" and job.cpu, "model.device", "this machine has no GPU", "set auto"),
        (config.trainer.total_training_steps == 0, "trainer.total_training_steps",
         "verl takes at least one step", "`srl eval run` evaluates without training"),
        (mode == "record" and config.rollout.search, "search.cassette",
         "the episodes run in several processes, which cannot record one",
         "record with --backend local, and replay it here"),
        *((place.startswith("cuda"), f"reward.{name}.device",
           "--backend verl scores in processes without a GPU", "set cpu") for name, place in devices.items()),
    ]  # fmt: skip
    for is_so, name, why, hint in rows:
        if is_so:
            raise _problem(config, name, why, hint)
    check_truncation(config, rollout_name(config, job))


def _problem(config: Config, key: str, why: str, hint: str = "") -> UserError:
    return UserError(f"{key} = {plain(value_of(config, key))}: {why}", key=key, hint=hint)


def validated(config: Config, job: Job) -> DictConfig:
    """`compose`, where no worker of verl's would fail on it later. Raises UserError with the key to change.

    Without an address a run starts a Ray cluster of its own, with the GPUs that are here.
    """
    verl_config = compose(config, job)
    if verl_config.trainer.nnodes > 1 and config.cluster.address is None:
        hint = "run `ray start` on each, and set cluster.address=auto"
        raise _problem(config, "cluster.nnodes", "several machines need a Ray cluster that is there", hint)
    strategy = verl_config.actor_rollout_ref.actor.strategy
    if strategy not in ("fsdp", "fsdp2"):
        key = f"verl.{ACTOR}.strategy"
        raise UserError(f"{key} = {strategy}: workers train with fsdp2, or fsdp", key=key)
    workers = verl_config.trainer.nnodes * verl_config.trainer.n_gpus_per_node
    rollout = verl_config.actor_rollout_ref.rollout
    if workers % rollout.tensor_model_parallel_size:
        raise _problem(config, "cluster.tensor_model_parallel_size", f"does not divide the {workers} GPUs")
    context = model_config(verl_config.actor_rollout_ref.model.path).get("max_position_embeddings")
    check_context(config, context)
    for who, section in (("actor", verl_config.actor_rollout_ref.actor), ("critic", verl_config.critic)):
        size, shared = section.ppo_mini_batch_size, int(section.get("ulysses_sequence_parallel_size", 1))
        copies = workers // shared  # that take different rows
        if (who == "actor" or verl_config.critic.enable) and (copies == 0 or size * rollout.n % copies):
            key = f"{who}.ppo_mini_batch_size"
            what = f"{key} = {size} questions × rollout.n = {rollout.n} do not divide by {copies} copies"
            raise UserError(what, key=key, hint="data.train_batch_size bounds it too")
    _check_with_verl(verl_config)
    return verl_config


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
