"""Which kind of run reads which key of the configuration, and what else a key depends on.

This is the only place that knows. Whatever is typed and not read is named in a warning with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from srl.config.algorithm import Algorithm
from srl.config.key_errors import split_key
from srl.config.keys import Config, flat
from srl.errors import UserError
from srl.files import read_manifest
from srl.protocol import TEMPLATES

Kind = Literal["rl", "sft", "rft", "eval", "ask", "teacher", "made"]
Backend = Literal["local", "verl"]

KINDS: dict[Kind, str] = {
    "rl": "reinforcement learning",
    "sft": "--algo sft",
    "rft": "--algo rft",
    "eval": "an evaluation",
    "ask": "`srl ask`",
    "teacher": "a teacher of demonstrations",
    "made": "what makes demonstrations without a model",
}
"""The kinds of runs, in words."""

_TRAINING = "rl sft rft"
_SAMPLING = "rl rft"
_OTHERS = "eval ask teacher"
_GENERATING = f"{_TRAINING} {_OTHERS}"
_ALL = f"{_GENERATING} made"

READ_BY: dict[str, str] = {
    "model.": _GENERATING,
    "model.path": _ALL,
    "model.tokenizer": _ALL,
    "model.trust_remote_code": _ALL,
    "model.gradient_checkpointing": _TRAINING,
    "model.lora_rank": _TRAINING,
    "model.lora_alpha": _TRAINING,
    "model.lora_target_modules": _TRAINING,
    "data.": _TRAINING,
    "data.corpus": _ALL,
    "data.template": _ALL,
    "data.examples": _ALL,
    "data.max_prompt_length": _ALL,
    "data.max_response_length": _ALL,
    "data.filter_overlong_prompts": f"{_TRAINING} eval teacher made",
    "data.train_batch_size": _SAMPLING,
    "data.shuffle": _SAMPLING,
    "data.mix": _SAMPLING,
    "search.": _ALL,
    "search.max_failed": _TRAINING,
    "retriever.": _ALL,
    "rollout.": _ALL,
    "rollout.n": _SAMPLING,
    "rollout.temperature": _SAMPLING,
    "rollout.top_p": _SAMPLING,
    "rollout.deterministic": _GENERATING,
    "rollout.engine": _GENERATING,
    "rollout.openai.": _GENERATING,
    "rollout.max_num_seqs": f"{_TRAINING} eval teacher",
    "rollout.gpu_memory_utilization": _GENERATING,
    "reward.": f"{_TRAINING} teacher",
    "algorithm.": "rl",
    "algorithm.name": _SAMPLING,
    "actor.": "rl",
    "actor.ppo_max_token_len": _TRAINING,
    "actor.use_torch_compile": _TRAINING,
    "critic.": "rl",
    "ref.": "rl",
    "sft.": _TRAINING,
    "sft.log": "sft",
    "sft.filter": "sft rft",
    "sft.max_per_question": "sft rft",
    "sft.patience": "sft",
    "rft.": "rft",
    "trainer.": _TRAINING,
    "trainer.total_training_steps": _SAMPLING,
    "trainer.save_freq": "rl sft",
    "trainer.test_freq": "rl sft",
    "trainer.critic_warmup": "rl",
    "trainer.sample_freq": "rl",
    "trainer.sample_count": "rl",
    "trainer.seed": _ALL,
    "trainer.threads": _GENERATING,
    "trainer.plugin_path": _ALL,
    "watch.": "rl",
    "eval.": _TRAINING,
    "eval.batch_size": "eval",
    "eval.temperature": _GENERATING,
    "eval.max_failed": "eval teacher made",
    "cluster.": "rl eval",
    "verl": "rl eval",
}
"""The kinds of runs that read a key. A name that ends in a dot is a section; the longest that fits counts."""

INSTEAD: dict[Kind, dict[str, str]] = {
    "sft": {
        "trainer.total_training_steps": "sft.steps counts the steps of --algo sft",
        "actor.optim.": "--algo sft has its own optimiser, sft.optim",
        "rollout.n": "--algo sft samples nothing",
    },
    "rft": {
        "trainer.save_freq": "--algo rft saves after each round",
        "trainer.test_freq": "--algo rft validates after each round",
        "actor.optim.": "--algo rft has its own optimiser, sft.optim",
    },
    "eval": {"rollout.temperature": "an evaluation samples at eval.temperature"},
}
"""What a kind of run does, where it has something else in the place of a key."""

NO_EXAMPLES = "the prompt has no worked examples (data.template=few-shot has, with rollout.search=true)"
_NO_FILTER = "algorithm.filter_groups.enable is refused"

UNREAD_BY_VERL: dict[str, str] = {
    "actor.use_torch_compile": "verl decides by its own keys, verl.actor_rollout_ref.actor.use_torch_compile",
    "ref.param_offload": "FSDP keeps the reference in CPU memory, and Megatron follows cluster.param_offload",
    "rollout.openai.": "rollout.engine=openai is refused",
    "algorithm.filter_groups.metric": _NO_FILTER,
    "algorithm.filter_groups.max_num_gen_batches": _NO_FILTER,
    "eval.batch_size": "verl sends all questions of a validation to its servers, which queue them",
}
"""The keys that `--backend verl` does not read, with the reason."""

SWITCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "actor.use_kl_loss": (False, ("actor.kl_loss_type", "actor.kl_loss_coef")),
    "algorithm.use_kl_in_reward": (False, ("algorithm.kl_penalty", "algorithm.kl_ctrl.")),
    "algorithm.kl_ctrl.type": ("fixed", ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")),
    "algorithm.rollout_correction.rollout_is": (
        "off",
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
        ),
    ),
    "algorithm.filter_groups.enable": (False, ("algorithm.filter_groups.",)),
    "reward.overlong_buffer.enable": (False, ("reward.overlong_buffer.",)),
    "sft.steps": (0, ("sft.",)),
    "trainer.sample_count": (0, ("trainer.sample_freq",)),
    "trainer.sample_freq": (0, ("trainer.sample_count",)),
    "trainer.test_freq": (0, ("trainer.keep_best_ckpt",)),
}
"""The keys that switch others: the value that is off, and the keys and sections that are then void.

A switch that such a run does not read switches nothing.
"""

_OF_VERL = dict.fromkeys(("cluster.", "verl"), "verl")


def kind_of(algo: str | None) -> Kind:
    """The kind of a training run by what its `--algo` is."""
    return "sft" if algo == "sft" else "rft" if algo == "rft" else "rl"


def value_of(config: Config, key: str) -> Any:
    """The value of a key; options of plugins are in mappings, and `module:Class` is one part of a key."""
    found: Any = config
    for name in split_key(key):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    return found


def unread(
    config: Config, typed: Iterable[str], kind: Kind, backend: Backend, algorithm: Algorithm
) -> dict[str, str]:
    """The keys that were `typed` and that such a run does not read, each with the reason."""
    depends = dict(_conditions(config, kind, algorithm))
    every = [".".join(path) for path, _ in flat(config.model_dump())]
    found = dict[str, str]()
    for start in dict.fromkeys(typed):
        for key in [key for key in every if _holds(start, key)] or [start]:
            if why := _of_kind(key, kind, backend) or _of_longest(depends, key):
                found[key] = why
    return found


def _of_kind(key: str, kind: Kind, backend: Backend) -> str:
    """Why such a run never reads the key; empty where it may."""
    if kind not in _of_longest(READ_BY, key).split():
        return _of_longest(INSTEAD.get(kind, {}), key) or f"{KINDS[kind]} does not read it"
    if backend == "verl":
        why = _of_longest(UNREAD_BY_VERL, key)
        return why and f"with --backend verl, {why}"
    return "it is for --backend verl" if _of_longest(_OF_VERL, key) else ""


def unread_lines(found: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the keys that are not `read` for it."""
    by_reason = dict[str, list[str]]()
    for key, why in found.items():
        by_reason.setdefault(why, []).append(key)
    return [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}"
        for why, keys in by_reason.items()
    ]


def _holds(start: str, key: str) -> bool:
    """Whether `key` is `start`, or a key below it."""
    return key == start or key.startswith(start if start.endswith(".") else f"{start}.")


def _of_longest(reasons: Mapping[str, str], key: str) -> str:
    """The entry of the longest name that holds `key`; empty where there is none."""
    names = [name for name in reasons if _holds(name, key)]
    return reasons[max(names, key=len)] if names else ""


def _conditions(config: Config, kind: Kind, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """The keys that another key, the algorithm or the index makes void, and the reason."""
    yield from _of_switches(config, kind)
    actor = config.actor
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        yield "actor.clip_ratio", "actor.clip_ratio_low and actor.clip_ratio_high take its place"
    if actor.policy_loss.loss_mode != "vanilla":
        yield "actor.clip_ratio_c", f"actor.policy_loss.loss_mode is {actor.policy_loss.loss_mode}"
    if actor.loss_agg_mode != "constant":
        yield "actor.loss_agg_constant", f"actor.loss_agg_mode is {actor.loss_agg_mode}"
    for name in ("actor", "critic", "sft"):
        if value_of(config, f"{name}.optim.lr_warmup_steps"):
            yield f"{name}.optim.lr_warmup_steps_ratio", f"{name}.optim.lr_warmup_steps takes its place"
    for key in ("gamma", "lam"):
        if not _takes(algorithm.estimator, key):
            yield f"algorithm.{key}", f"{algorithm.name} does not use it"
    if not algorithm.needs_critic:
        yield "critic.", f"{algorithm.name} has no critic"
    if not config.needs_reference:
        yield "ref.", "there is no KL to a reference policy"
    if config.model.lora_rank == config.critic.lora_rank == 0:
        yield "model.lora_alpha", "model.lora_rank is 0"
        yield "model.lora_target_modules", "model.lora_rank is 0"
    if config.rollout.engine != "openai":
        yield "rollout.openai.", f"rollout.engine is {config.rollout.engine}"
    if config.rollout.engine in ("torch", "openai"):
        yield "rollout.gpu_memory_utilization", f"rollout.engine is {config.rollout.engine}"
    if "wandb" not in config.trainer.logger:
        yield "trainer.project_name", "trainer.logger has no wandb"
        yield "trainer.experiment_name", "trainer.logger has no wandb"
    yield from _of_examples(config, kind)
    yield from _of_fine_tuning(config, kind)
    yield from _of_plugins(config)
    yield from _of_search(config, kind)


def _of_switches(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """What a switch that is off makes void, in `SWITCHES`."""
    for switch, (off, governed) in SWITCHES.items():
        if kind in _of_longest(READ_BY, switch).split() and value_of(config, switch) == off:
            yield from ((key, f"{switch} is {str(off).lower()}") for key in governed)
            yield switch, ""


def _of_examples(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """Worked examples for a prompt that has none; an evaluation may have a baseline with them."""
    if kind != "eval" and not takes_examples(config):
        yield "data.examples", NO_EXAMPLES


def takes_examples(config: Config) -> bool:
    """Whether the prompt has worked examples, those of `data.examples` if it is set."""
    prompt = TEMPLATES.get(config.data.template or "")
    return prompt is not None and prompt.takes_examples and config.rollout.search


def _of_plugins(config: Config) -> Iterator[tuple[str, str]]:
    """The options of plugins that are not in use."""
    in_use = {
        "algorithm": [config.algorithm.name],
        "reward": config.reward.weights,
        "retriever": [_retriever(config)],
    }
    for kind, names in in_use.items():
        for name in set(value_of(config, kind).model_extra) - set(names):
            yield f"{kind}.{name}.", f"the {kind} {name} is not used"


def _retriever(config: Config) -> str:
    """The retriever that searches: the one that built `search.index`, where that can be read."""
    if config.search.index is not None:
        with suppress(UserError, OSError):
            return str(read_manifest(config.search.index, "index").get("retriever"))
    return config.retriever.name


def _of_fine_tuning(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """The demonstrations of a cold start, which a run from a model of the user's own does not make."""
    if kind == "sft":
        key, why = ("sft.filter", "sft.log is null") if config.sft.log is None else ("sft.train_files", "")
        yield key, why or "sft.log takes its place"
        if config.sft.log is None:
            yield "sft.max_per_question", why
    elif config.model.path is not None:
        start = f"training starts from {config.model.path} as it is; fine-tune it first with --algo sft"
        yield "sft." if kind == "rl" else "sft.train_files", start


def _of_search(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """The keys of the retriever that were settled when an index was built, or that a server has."""
    search = config.search
    if kind in _TRAINING.split() and not config.rollout.search:
        for key in ("search.", "retriever.", "data.corpus", "rollout.max_obs_length"):
            yield key, "rollout.search is false"
        yield "search.max_failed", ""  # rewards and engines fail too
    if search.url is None and not search.retrievers:
        for key in ("timeout_s", "retries"):
            yield f"search.{key}", "the search is in this process"
    if search.url is not None:
        for key in ("retriever.", "data.corpus"):
            yield key, "the server at search.url has its own"
    if search.url is not None or search.index is None:
        return
    from srl.plugins import manager
    from srl.plugins.options import runtime_options

    name = _retriever(config)
    given = config.retriever.options(name)  # an index does not choose what is imported
    model = manager.options_model("retriever", name) if given else None
    shaping = given.keys() - runtime_options(model) if model else set()
    is_trust = manager.is_import_path(
        config.retriever.name
    )  # typed, it says that the index's code is trusted
    keys = [] if is_trust else ["name"]
    for key in (*keys, *(f"{name}.{option}" for option in shaping)):
        yield (
            f"retriever.{key}",
            "an index keeps what it was built with; build another with `srl index build`",
        )


def _takes(estimator: Callable[..., object], name: str) -> bool:
    """Whether an estimator has an argument `name`, or others that it may look at (`**_` are not)."""
    from inspect import signature

    taken = signature(estimator).parameters.values()
    return any(each.name == name or (each.kind is each.VAR_KEYWORD and each.name != "_") for each in taken)
