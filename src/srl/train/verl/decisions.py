"""What becomes of every key of ours under verl: those not in `translate.settings` are listed here.

A key is translated, read by our own code in verl's processes, not read for a reason, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from srl.config import Config
from srl.errors import UserError
from srl.train.verl.job import Job
from srl.train.verl.setting import is_megatron, precision, rollout_name

READ_BY_US: dict[str, str] = {
    "data.train_files": "our data set reads the questions",
    "data.val_files": "our data set reads the questions",
    "data.test_files": "our data set reads the questions",
    "data.corpus": "what is searched, as with the local backend",
    "data.template": "our data set makes the prompts, and the episode its feedback",
    "data.filter_overlong_prompts": "our data set leaves questions out",
    "data.shuffle": "our data set has the order of the local backend",
    "search.": "the episode searches",
    "retriever.": "the episode searches",
    "rollout.max_turns": "the episode counts turns",
    "rollout.max_turn_tokens": "the episode asks for so many tokens",
    "rollout.max_obs_length": "the episode cuts observations",
    "rollout.min_answer_tokens": "the episode keeps room for an answer",
    "rollout.search": "the episode searches or not",
    "rollout.stop_at_answer": "the episode ends or goes on",
    "rollout.logprobs": "our trainer weighs the tokens",
    "rollout.sampler_is_cap": "our trainer weighs the tokens",
    "reward.": "an episode is scored in the process that ran it",
    "sft.": "the fine-tuning before RL runs on the machine that starts the run",
    "trainer.logger": "metrics go through our own writer",
    "trainer.sample_freq": "our own writer shows episodes",
    "trainer.sample_count": "our own writer shows episodes",
    "eval.val_questions": "our data set takes so many",
    "eval.test_questions": "our data set takes so many",
    "eval.max_failed": "our own check at the end",
    "cluster.watchdog_s": "the launcher watches the run",
    "verl": "laid on top of what is translated",
}
"""Keys that our code reads inside verl's processes or around them; those that end in a dot are sections."""

NOT_READ: dict[str, str] = {
    "eval.batch_size": "verl hands all questions of a validation to its servers, which queue them",
}
"""Keys without an effect, with the reason."""

REFUSED: dict[str, str] = {
    "rollout.deterministic": "episodes of several processes come in no fixed order",
    "actor.mask_observations": "verl has one mask for the loss and for every mean",
    "ref.path": "verl loads the reference from the policy's own directory",
}
"""Keys that may only stay at their default, with the reason."""


def check_supported(config: Config, job: Job) -> None:
    """Raises UserError for the first setting that this backend cannot keep, with what to set instead."""
    problem = next(_problems(config, job), None)
    if problem is not None:
        raise UserError(problem)


def _problems(config: Config, job: Job) -> Iterator[str]:
    yield from _refused(config)
    yield from _learning(config)
    yield from _rollout(config, job)
    yield from _device(config, job)


def _refused(config: Config) -> Iterator[str]:
    local = "or train with --backend local"
    if config.rollout.deterministic:
        yield (
            "rollout.deterministic = true cannot be kept with --backend verl: "
            f"{REFUSED['rollout.deterministic']}; set it to false, {local}"
        )
    if not config.actor.mask_observations:
        yield (
            "actor.mask_observations = false cannot be kept with --backend verl: "
            f"{REFUSED['actor.mask_observations']}; set it to true, {local}"
        )
    needs_reference = config.algorithm.use_kl_in_reward or config.actor.use_kl_loss
    if needs_reference and config.ref.path not in (None, config.model.path):
        yield (
            f"ref.path = {config.ref.path} cannot be kept with --backend verl: {REFUSED['ref.path']} "
            f"({config.model.path}); leave it out, {local}"
        )


def _learning(config: Config) -> Iterator[str]:
    """What verl's optimisers and loop do not know."""
    if config.trainer.total_training_steps == 0:
        yield "trainer.total_training_steps = 0: with --backend verl there is at least one step"
    adapters = config.model.lora_rank > 0 and config.model.lora_target_modules != "all-linear"
    if adapters and is_megatron(config):
        yield (
            "model.lora_target_modules: Megatron has other names for modules; set all-linear here and verl's "
            "own key verl.actor_rollout_ref.model.lora.target_modules"
        )


def _rollout(config: Config, job: Job) -> Iterator[str]:
    """Which of the engines that generate go with which machine."""
    chosen, cluster = rollout_name(config, job), config.cluster
    if chosen == "srl_torch" and not job.cpu:
        yield "cluster.rollout = torch is for machines without a GPU; set vllm or sglang"
    if chosen == "sglang" and job.cpu:
        yield "cluster.rollout = sglang needs a GPU, and there is none; set torch or vllm"
    if chosen == "srl_torch" and cluster.tensor_model_parallel_size > 1:
        yield (
            f"cluster.tensor_model_parallel_size = {cluster.tensor_model_parallel_size}: the torch rollout "
            "keeps a whole copy of the model in each worker; set 1"
        )
    if chosen == "srl_torch" and precision(config, job) == "float16":
        yield "model.dtype = float16: the torch rollout has float32 and bfloat16"


def _device(config: Config, job: Job) -> Iterator[str]:
    """Where the run may be: the workers take every GPU that they see, or none."""
    device = config.model.device
    if device == "mps" or ":" in device:
        yield (
            f"model.device = {device}: with --backend verl the workers take the GPUs that they see; set "
            "auto, and CUDA_VISIBLE_DEVICES to choose"
        )
    if device == "cuda" and job.cpu:
        yield "model.device = cuda, and this machine has no GPU; set auto"
    if is_megatron(config) and job.cpu:
        yield "cluster.strategy = megatron needs GPUs, and there are none; set fsdp2"
    if is_megatron(config) and precision(config, job) == "float32":
        yield "model.dtype = float32: Megatron trains in bfloat16 or float16; set one of them"
