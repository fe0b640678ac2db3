"""Our sections trainer and cluster in verl's keys, and what a machine without a GPU needs."""

from __future__ import annotations

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.train.verl.job import Job
from srl.train.verl.setting import ACTOR, REF, ROLLOUT, Rows, everywhere, is_megatron, precision, rollout_name

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Megatron's names for recomputing every layer; verl's own key for it is read under FSDP only."""
ENGINES = (
    (ACTOR, "fsdp_config", "megatron"),
    (REF, "fsdp_config", "megatron"),
    ("critic", "fsdp", "megatron"),
)
"""Where each network's engine is configured: under FSDP, and under Megatron."""


def machines(config: Config, job: Job) -> Rows:
    yield from _trainer(config, job)
    yield from _cluster(config, job)
    for who, fsdp, megatron in engines(config):
        yield from _training_engine(config, job, who, f"{who}.{megatron if is_megatron(config) else fsdp}")
    yield from _ray(config, job)
    if job.cpu:
        yield from _without_gpu(config, job)


def engines(config: Config) -> tuple[tuple[str, str, str], ...]:
    """The networks of the run, with where each engine is configured."""
    critic = algorithm_plugin(config.algorithm.name).needs_critic
    return ENGINES if critic else ENGINES[:2]


def _trainer(config: Config, job: Job) -> Rows:
    """verl's actor learns from step `critic_warmup` on, ours from the step after it."""
    trainer, total = config.trainer, config.trainer.total_training_steps
    yield "trainer.total_training_steps", total, "trainer.total_training_steps"
    yield "trainer.total_epochs", max(1, total), "trainer.total_training_steps"
    yield "trainer.save_freq", trainer.save_freq or max(1, total), "trainer.save_freq"
    yield "trainer.test_freq", trainer.test_freq, "trainer.test_freq"
    yield "trainer.val_before_train", trainer.val_before_train, "trainer.val_before_train"
    yield "trainer.critic_warmup", trainer.critic_warmup + 1, "trainer.critic_warmup"
    kept = trainer.max_ckpt_to_keep and max(2, trainer.max_ckpt_to_keep)  # ours goes later
    yield "trainer.max_actor_ckpt_to_keep", kept, "trainer.max_ckpt_to_keep"
    yield "trainer.max_critic_ckpt_to_keep", kept, "trainer.max_ckpt_to_keep"
    yield "trainer.logger", [], ""
    yield "trainer.project_name", trainer.project_name, "trainer.project_name"
    yield "trainer.experiment_name", trainer.experiment_name or job.run.name, "trainer.experiment_name"
    yield "trainer.default_local_dir", everywhere(job.checkpoints), ""
    yield "trainer.resume_mode", "auto" if job.resume else "disable", ""
    yield "trainer.v1.trainer_mode", "sync", ""
    yield "reward.num_workers", 0, ""


def _cluster(config: Config, job: Job) -> Rows:
    cluster = config.cluster
    yield "trainer.nnodes", cluster.nnodes, "cluster.nnodes"
    yield "trainer.n_gpus_per_node", job.gpus_per_node, "cluster.n_gpus_per_node"
    yield "trainer.device", "cpu" if job.cpu else "cuda", "model.device"
    if not is_megatron(config):
        yield f"{ACTOR}.strategy", cluster.strategy, "cluster.strategy"
        if algorithm_plugin(config.algorithm.name).needs_critic:
            yield "critic.strategy", cluster.strategy, "cluster.strategy"
    workers = min(cluster.agent_workers, job.gpus_per_node) if job.cpu else cluster.agent_workers
    yield f"{ROLLOUT}.agent.num_workers", workers, "cluster.agent_workers"


def _training_engine(config: Config, job: Job, who: str, verl: str) -> Rows:
    """Sharding, offload, precision and seed of one network."""
    seed, number = config.trainer.seed, precision(config, job)
    yield f"{verl}.seed", seed, "trainer.seed"
    yield f"{verl}.param_offload", config.cluster.param_offload, "cluster.param_offload"
    if who != REF:
        yield f"{verl}.optimizer_offload", config.cluster.optimizer_offload, "cluster.optimizer_offload"
    yield f"{verl}.dtype", number, "model.dtype"
    if is_megatron(config):
        if config.model.gradient_checkpointing and who != REF:
            for name, value in RECOMPUTE.items():
                yield f"{verl}.override_transformer_config.{name}", value, "model.gradient_checkpointing"
        return
    short = SHORT[number]
    reduced = {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    yield f"{verl}.mixed_precision", reduced, "model.dtype"


def _ray(config: Config, job: Job) -> Rows:
    """A cluster that is there says itself what it has; of one of our own Ray counts the GPUs."""
    verl = "ray_kwargs.ray_init"
    if config.cluster.address is not None:
        yield f"{verl}.address", config.cluster.address, "cluster.address"
    else:
        yield f"{verl}.include_dashboard", False, ""
    threads = config.trainer.threads
    if threads is not None:
        yield f"{verl}.runtime_env.env_vars", {"OMP_NUM_THREADS": str(threads)}, "trainer.threads"
        if rollout_name(config, job) == "srl_torch":
            yield f"{ROLLOUT}.engine_kwargs.srl_torch", {"threads": threads}, "trainer.threads"


def _without_gpu(config: Config, job: Job) -> Rows:
    """Workers stand for GPUs, whose number and whose processes Ray counts without looking for them."""
    workers = job.gpus_per_node
    if config.cluster.address is None:
        yield "ray_kwargs.ray_init.num_cpus", 16 + 8 * workers, ""
        yield "ray_kwargs.ray_init.num_gpus", workers, ""
    yield "transfer_queue.backend.SimpleStorage.num_data_storage_units", 1, ""
    yield f"{ACTOR}.use_torch_compile", False, ""
    for who, fsdp, _ in engines(config):
        yield f"{who}.{fsdp}.use_torch_compile", False, ""
    yield f"{ROLLOUT}.load_format", "auto", ""
    yield f"{ROLLOUT}.free_cache_engine", False, ""
    yield f"{ROLLOUT}.enforce_eager", True, ""
    yield f"{ROLLOUT}.enable_sleep_mode", False, ""
    yield f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 64, ""
