"""What has no effect: which kind of run reads which key is at the key; what else a key depends on is here.

Whatever is typed and not read is named in a warning with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from typing import Literal

from srl.config.cross_checks import Algorithm, algorithm_plugin
from srl.config.keys import Config, facts, flat, plain, value_of

Kind = Literal["rl", "sft", "rft", "eval"]
Backend = Literal["local", "verl"]

KINDS: dict[Kind, str] = {
    "rl": "reinforcement learning",
    "sft": "--algo sft",
    "rft": "--algo rft",
    "eval": "what does not train",
}
"""The kinds of runs, in words."""


def kind_of(algo: str | None) -> Kind:
    """The kind of a training run by what its `--algo` is."""
    return "sft" if algo == "sft" else "rft" if algo == "rft" else "rl"


def unread(config: Config, typed: Iterable[str], kind: Kind, backend: Backend) -> dict[str, str]:
    """The keys that were `typed` and that such a run does not read, each with the reason."""
    void = list(_conditions(config, kind, algorithm_plugin(config.algorithm.name)))
    every = [".".join(path) for path, _ in flat(config.model_dump())]
    reasons = dict[str, str]()
    for start in dict.fromkeys(typed):
        for key in [key for key in every if _holds(start, key)] or [start]:
            of_others = next((why for name, why in void if _holds(name, key)), "")
            if why := _of_kind(key, kind, backend) or missing(config, key, kind) or of_others:
                reasons[key] = why
    return reasons


def unread_lines(config: Config, typed: Iterable[str], kind: Kind, backend: Backend) -> list[str]:
    """A line for each reason of `unread`, with its keys."""
    by_reason = dict[str, list[str]]()
    for key, why in unread(config, typed, kind, backend).items():
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


Row = tuple[object, Sequence[str], str]
"""Whether it is so, the keys that are void then, and the reason."""


def _conditions(config: Config, kind: Kind, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """The keys that the algorithm, the model, the index or several keys make void, and the reason; of those
    that hold a key the first counts."""
    actor, search, path = config.actor, config.search, config.model.path
    no_search = kind in ("rl", "sft", "rft") and not config.rollout.search
    here = search.url is None and not search.retrievers
    start = f"training starts from {path} as it is; fine-tune it first with --algo sft"
    served = "the server at search.url has its own"
    rows: list[Row] = [
        (None not in (actor.clip_ratio_low, actor.clip_ratio_high), ["actor.clip_ratio"],
         "actor.clip_ratio_low and actor.clip_ratio_high take its place"),
        *((not _takes(algorithm.estimator, key), [f"algorithm.{key}"], f"{algorithm.name} does not use it")
          for key in ("gamma", "lam")),
        (not algorithm.needs_critic, ["critic"], f"{algorithm.name} has no critic"),
        (not config.needs_reference, ["ref"], "there is no KL to a reference policy"),
        (config.model.lora_rank == config.critic.lora_rank == 0,
         ["model.lora_alpha", "model.lora_target_modules"], "model.lora_rank is 0"),
        (kind == "rl" and path, ["sft"], start),
        (kind not in ("rl", "sft") and path, ["sft.train_files"], start),
        (no_search, ["search.max_failed"], ""),  # rewards and engines fail too
        (no_search, ["search", "retriever", "data.corpus", "rollout.max_obs_length", "rollout.tools"],
         "rollout.search is false"),
        (here and not config.rollout.tool_plugins, ["search.timeout_s"], "the search is in this process"),
        (here, ["search.retries"], "the search is in this process"),
        (search.url, ["retriever", "data.corpus"], served),
        (search.index, _built(config), "an index keeps what it was built with"),
        *((True, [f"{section}.{name}"], f"the {section} {name} is not used")
          for section, names in _in_use(config).items()
          for name in set(value_of(config, section).model_extra) - set(names)),
    ]  # fmt: skip
    yield from ((key, why) for is_so, keys, why in rows if is_so for key in keys)


def _in_use(config: Config) -> dict[str, Iterable[str]]:
    """The plugins that may be used, by their section; any retriever may have built `search.index`."""
    uses: dict[str, Iterable[str]] = {
        "algorithm": [config.algorithm.name],
        "reward": config.reward.weights,
        "tool": config.rollout.tool_plugins,
    }
    return uses if config.search.index else uses | {"retriever": [config.retriever.name]}


def _built(config: Config) -> list[str]:
    """The keys of the retriever that were settled when an index was built."""
    from srl.plugins import manager
    from srl.plugins.options import runtime_options

    name = config.retriever.name
    options = config.retriever.options(name)
    model = manager.options_model("retriever", name) if options else None
    settled = options.keys() - runtime_options(model) if model else ()
    named = [] if manager.is_import_path(name) else ["retriever.name"]  # typed, its code is trusted
    return [*(f"retriever.{name}.{option}" for option in settled), *named]


def _takes(estimator: Callable[..., object], name: str) -> bool:
    """Whether an estimator has an argument `name`, or others that it may look at (`**_` are not)."""
    parameters = signature(estimator).parameters.values()
    return any(
        each.name == name or (each.kind is each.VAR_KEYWORD and each.name != "_") for each in parameters
    )
