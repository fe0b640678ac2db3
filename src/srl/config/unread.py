"""What has no effect: which kind of run reads which key is at the key; what else a key depends on is here.

Whatever is typed and not read is named in a warning with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import signature
from typing import Literal

from srl.config.algorithm import Algorithm
from srl.config.keys import Config, facts, flat, plain, value_of
from srl.errors import UserError
from srl.files import read_manifest

Kind = Literal["rl", "sft", "rft", "eval", "ask", "made"]
Backend = Literal["local", "verl"]

KINDS: dict[Kind, str] = {
    "rl": "reinforcement learning",
    "sft": "--algo sft",
    "rft": "--algo rft",
    "eval": "an evaluation",
    "ask": "`srl ask`",
    "made": "what makes demonstrations without a model",
}
"""The kinds of runs, in words."""

_AN_INDEX = "an index keeps what it was built with; build another with `srl index build`"


def kind_of(algo: str | None) -> Kind:
    """The kind of a training run by what its `--algo` is."""
    return "sft" if algo == "sft" else "rft" if algo == "rft" else "rl"


def unread(
    config: Config, typed: Iterable[str], kind: Kind, backend: Backend, algorithm: Algorithm
) -> dict[str, str]:
    """The keys that were `typed` and that such a run does not read, each with the reason."""
    void = dict(_conditions(config, kind, algorithm))
    every = [".".join(path) for path, _ in flat(config.model_dump())]
    reasons = dict[str, str]()
    for start in dict.fromkeys(typed):
        for key in [key for key in every if _holds(start, key)] or [start]:
            why = _of_kind(key, kind, backend) or missing(config, key, kind) or _of_longest(void, key)
            if why:
                reasons[key] = why
    return reasons


def unread_lines(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the keys that are not read for it."""
    by_reason = dict[str, list[str]]()
    for key, why in reasons.items():
        by_reason.setdefault(why, []).append(key)
    return [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}"
        for why, keys in by_reason.items()
    ]


def _of_kind(key: str, kind: Kind, backend: Backend) -> str:
    """Why such a run never reads the key; empty where it may."""
    if kind not in facts(key).read_by.split():
        return f"{KINDS[kind]} does not read it"
    only_verl = _holds("cluster", key) or _holds("verl", key)
    return "it is for --backend verl" if only_verl and backend == "local" else ""


def missing(config: Config, key: str, kind: Kind = "rl") -> str:
    """The key that `key` needs and that is off, with its value; empty where none is.

    One that such a run does not read switches nothing.
    """
    for need in facts(key).needs.split():
        switch, _, values = need.partition("=")
        value = value_of(config, switch)
        elements = [str(each) for each in (value if isinstance(value, tuple) else [value])]
        is_on = set(elements) & set(values.split("|")) if values else value not in (False, 0, None, "off")
        if not is_on and switch != key and kind in facts(switch).read_by.split():
            return f"{switch} is {str(plain(value)).lower()}"
    return ""


def _holds(start: str, key: str) -> bool:
    """Whether `key` is `start`, or a key below it."""
    return key == start or key.startswith(f"{start}.")


def _of_longest(reasons: Mapping[str, str], key: str) -> str:
    """The entry of the longest name that holds `key`; empty where there is none."""
    names = [name for name in reasons if _holds(name, key)]
    return reasons[max(names, key=len)] if names else ""


def _conditions(config: Config, kind: Kind, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """The keys that the algorithm, the model, the index or several keys make void, and the reason."""
    if config.actor.clip_ratio_low is not None and config.actor.clip_ratio_high is not None:
        yield "actor.clip_ratio", "actor.clip_ratio_low and actor.clip_ratio_high take its place"
    for key in ("gamma", "lam"):
        if not _takes(algorithm.estimator, key):
            yield f"algorithm.{key}", f"{algorithm.name} does not use it"
    if not algorithm.needs_critic:
        yield "critic", f"{algorithm.name} has no critic"
    if not config.needs_reference:
        yield "ref", "there is no KL to a reference policy"
    if config.model.lora_rank == config.critic.lora_rank == 0:
        yield "model.lora_alpha", "model.lora_rank is 0"
        yield "model.lora_target_modules", "model.lora_rank is 0"
    if kind != "eval" and config.data.template != "few-shot":  # an evaluation may have a baseline with it
        yield "data.examples", "they are for data.template=few-shot"
    in_use = {
        "algorithm": [config.algorithm.name],
        "reward": config.reward.weights,
        "retriever": [_retriever(config)],
        "tool": config.rollout.tool_plugins,
    }
    for section, names in in_use.items():
        for name in set(value_of(config, section).model_extra) - set(names):
            yield f"{section}.{name}", f"the {section} {name} is not used"
    yield from _of_fine_tuning(config, kind)
    yield from _of_search(config, kind)


def _retriever(config: Config) -> str:
    """The retriever that searches: the one that built `search.index`, where that can be read."""
    if config.search.index is not None:
        with suppress(UserError, OSError):
            return str(read_manifest(config.search.index, "index").get("retriever"))
    return config.retriever.name


def _of_fine_tuning(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """The demonstrations of a cold start, which a run from a model of the user's own does not make."""
    if kind == "sft" and config.sft.log is not None:
        yield "sft.train_files", "sft.log takes its place"
    elif kind == "sft":
        yield "sft.filter", "sft.log is null"
        yield "sft.max_per_question", "sft.log is null"
    elif config.model.path is not None:
        start = f"training starts from {config.model.path} as it is; fine-tune it first with --algo sft"
        yield "sft" if kind == "rl" else "sft.train_files", start


def _of_search(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """The keys of the retriever that were settled when an index was built, or that a server has."""
    search = config.search
    if kind in ("rl", "sft", "rft") and not config.rollout.search:
        for key in ("search", "retriever", "data.corpus", "rollout.max_obs_length", "rollout.tools"):
            yield key, "rollout.search is false"
        yield "search.max_failed", ""  # rewards and engines fail too
    if search.url is None and not search.retrievers:
        if not config.rollout.tool_plugins:
            yield "search.timeout_s", "the search is in this process"
        yield "search.retries", "the search is in this process"
    if search.url is not None:
        yield "retriever", "the server at search.url has its own"
        yield "data.corpus", "the server at search.url has its own"
    elif search.index is not None:
        from srl.plugins import manager
        from srl.plugins.options import runtime_options

        name = _retriever(config)
        options = config.retriever.options(name)  # an index does not choose what is imported
        model = manager.options_model("retriever", name) if options else None
        for option in options.keys() - runtime_options(model) if model else ():
            yield f"retriever.{name}.{option}", _AN_INDEX
        if not manager.is_import_path(config.retriever.name):  # typed, it says that its code is trusted
            yield "retriever.name", _AN_INDEX


def _takes(estimator: Callable[..., object], name: str) -> bool:
    """Whether an estimator has an argument `name`, or others that it may look at (`**_` are not)."""
    parameters = signature(estimator).parameters.values()
    return any(
        each.name == name or (each.kind is each.VAR_KEYWORD and each.name != "_") for each in parameters
    )
