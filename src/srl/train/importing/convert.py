"""The settings of a source as a configuration of ours, with a report of what changes its meaning."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from typing import Any, get_args

from srl.config import load_config
from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import flat, plain
from srl.config.sections import Rollout, Trainer
from srl.config.yaml12 import dump, parse
from srl.errors import UserError
from srl.files import FORMAT
from srl.safe import quoted
from srl.train.importing.key_table import (
    ESTIMATORS,
    NO_DEFAULT,
    SEARCH_R1,
    SEARCH_R1_ONLY,
    KeyMapping,
    defaults_of,
    mappings_of,
    why_replaced,
)
from srl.train.importing.script import UNREAD
from srl.train.importing.source import Source, read_source, resolved

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_PATHS = ("model.path", "model.tokenizer", "data.train_files", "data.val_files")
_SECTIONS = (
    "actor_rollout_ref.", "critic.", "trainer.", "data.", "algorithm.", "ray_kwargs.", "global_profiler.",
)  # fmt: skip
_FORMAT_SCORES = {
    "structure_format_score": "structure_score",
    "final_format_score": "final_format_score",
    "retrieval_score": "retrieval_score",
}
"""Keys of Search-R1's `reward_model`, and the options of our reward `format`."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The configuration as YAML (`text`), and the report, one sentence a line."""

    text: str
    report: tuple[str, ...]


@dataclass
class Conversion:
    """A source, our keys so far (`ours`), the report (`notes`), and which keys are dealt with (`used`)."""

    source: Source
    ours: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def given(self, key: str, default: Any = None) -> Any:
        """The value of their key, else `default`; the key counts as dealt with."""
        self.used.add(key)
        value = self.source.settings.get(key)
        return default if value is None else value

    def value(self, key: str, default: Any = None) -> Any:
        """The value of their key, else its default there."""
        return self.given(key, defaults_of(self.source.dialect).get(key, default))

    @property
    def has_critic(self) -> bool:
        return algorithm_plugin(self.ours["algorithm.name"]).needs_critic


def import_file(path: Path | str, given: Mapping[str, str] | None = None) -> Imported:
    """Convert a file of verl's or Search-R1's to a configuration of ours, and check that it loads.

    `given` are values of shell variables. Raises UserError for what cannot be converted.
    """
    source = read_source(Path(path), given or {})
    conversion = Conversion(source, notes=list(source.notes))
    _drop_unread(conversion, path)
    for row in mappings_of(source.dialect):
        value = conversion.value(row.theirs, NO_DEFAULT)
        if value is not NO_DEFAULT:
            conversion.ours[row.ours] = _converted(row, value, source)
    for rule in (*(_SEARCH_R1_RULES if source.dialect == SEARCH_R1 else _VERL_RULES), *_RULES):
        rule(conversion)
    replaced = {key for key in source.settings if why_replaced(key)}
    if not (conversion.used | replaced) & source.settings.keys():
        raise UserError(f"{path}: no key of verl's or Search-R1's is in it")
    conversion.notes += _about_other_keys(conversion)
    report = tuple(" ".join(note.split()) for note in conversion.notes)
    head = (f"From {' '.join(source.name.split())}, a configuration of {source.dialect}'s.", *report)
    text = "".join(f"# {line}\n" for line in head) + "\n" + _yaml(conversion, path)
    _check(text, path)
    return Imported(text, report)


def _drop_unread(conversion: Conversion, path: Path | str) -> None:
    """Values that only a shell can tell are asked for where they matter, else left out and named."""
    settings, rows = conversion.source.settings, mappings_of(conversion.source.dialect)
    unread = [key for key, value in settings.items() if UNREAD.search(str(value))]
    if needed := sorted({row.theirs for row in rows} & set(unread)):
        variables = re.findall(r"\$\{?(\w+)", " ".join(str(settings[key]) for key in needed))
        asked = " ".join(f"--define {name}=VALUE" for name in dict.fromkeys(variables))
        said = ", ".join(f"{key}={quoted(str(settings[key]))}" for key in needed)
        raise UserError(
            f"{path}: only a shell can tell {said}", key=needed[0], hint=asked or "write the value there"
        )
    for key in unread:
        del settings[key]
    if unread:
        conversion.notes.append(f"not read, since only a shell can tell the value: {', '.join(unread)}")


def _converted(row: KeyMapping, value: Any, source: Source) -> Any:
    if row.ours in _PATHS:
        return [_at_home(part) for part in value] if isinstance(value, list) else _at_home(value)
    if row.values is ESTIMATORS and str(value).startswith("srl_"):
        return str(value).removeprefix("srl_")
    if isinstance(value, list | dict) or value not in row.values:
        if row.values and all(isinstance(name, str) for name in row.values):
            hint = "srl plugins new algorithm NAME" if row.values is ESTIMATORS else ""
            has = ", ".join(dict.fromkeys([*row.values, *row.values.values()]))
            what = f"{source.name}: {row.theirs}={quoted(str(value))}: srl has no equivalent; it has {has}"
            raise UserError(what, key=row.theirs, hint=hint)
        return value
    return row.values[value]


def _at_home(value: Any) -> Any:
    """A path with `~` expanded, as verl does."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _about_other_keys(conversion: Conversion) -> list[str]:
    """What becomes of each key that no row and no rule has read; what verl alone has goes below `verl:`."""
    source, usual = conversion.source, _verls_defaults(conversion)
    alike = {key.rpartition(".")[2]: key for key in SEARCH_R1_ONLY}
    fates: dict[str, list[str]] = {}
    for key, value in source.settings.items():
        if key in conversion.used:
            continue
        last, reason = key.rpartition(".")[2], why_replaced(key)
        if key in usual and usual[key] == value:
            fate = "left out, same as verl's default"
        elif reason:
            fate = f"dropped, {reason}"
        elif last in alike and key not in usual:
            fate = "ignored, though named like a key of Search-R1's"
        elif key in source.added or (key in usual if usual else key.startswith(_SECTIONS)):
            fate = "kept below verl:, read only with --backend verl"
            conversion.ours[f"verl.{key}" if key in usual or key not in source.added else f"verl.+{key}"] = (
                value
            )
        else:
            fate = "ignored, unknown to srl and to verl 0.9.1"
        fates.setdefault(fate, []).append(
            f"{key} ({alike[last]})" if fate.startswith("ignored, though") else key
        )
    said = [
        f"{fate}: {', '.join(keys) if len(keys) < 60 else f'{len(keys)} keys'}"
        for fate, keys in sorted(fates.items())
    ]
    return said + [f"ignored, {wanted} is not defined: {key}" for key, wanted in source.undefined.items()]


def _verls_defaults(conversion: Conversion) -> dict[str, Any]:
    """verl's defaults under these settings, where verl is installed; empty without it."""
    shipped = _shipped("_megatron" if conversion.ours["cluster.strategy"] == "megatron" else "")
    known, defaults = {**shipped, **conversion.source.settings}, {}
    for key, value in shipped.items():
        try:
            defaults[key] = resolved(value, key, known, {})
        except LookupError:
            defaults[key] = value
    return defaults


@cache
def _shipped(engine: str) -> dict[str, Any]:
    """The default configuration in the verl package, references unresolved; empty without verl."""
    try:
        file = distribution("verl").locate_file(f"verl/trainer/config/_generated_ppo{engine}_trainer.yaml")
        tree = parse(Path(str(file)).read_text(encoding="utf-8"), "verl")
    except (PackageNotFoundError, OSError, UserError):
        return {}
    return {".".join(path): value for path, value in flat(tree)}


def _written(conversion: Conversion) -> dict[str, Any]:
    """Our keys, those of a critic only where the algorithm has one. No preset is below an imported file, and
    no fine-tuning before it."""
    ours = {
        key: value
        for key, value in conversion.ours.items()
        if conversion.has_critic or not key.startswith("critic.")
    }
    return {"extends": None, "sft.steps": 0} | ours


def _yaml(conversion: Conversion, path: Path | str) -> str:
    tree: dict[str, Any] = {"format": FORMAT}
    for key, value in _written(conversion).items():
        node, (*outer, last) = tree, key.split(".")
        for part in outer:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"{path}: {key}: {part} is set to {node!r:.60} and cannot hold keys", key=key)
        node[last] = plain(value)
    return dump(tree)


def _check(text: str, path: Path | str) -> None:
    """Raise UserError unless the configuration loads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file=file)
        except UserError as error:
            said = re.sub(rf"{re.escape(str(file))}(:\d+)?", "converted", str(error))
            raise UserError(f"{path}: {said}", key=error.key) from error


# What no single key says


def _test_files(conversion: Conversion) -> None:
    files = conversion.ours.get("data.val_files")
    tests = [
        str(f) for f in (files if isinstance(files, list) else [files]) if "test" in PurePath(str(f)).name
    ]
    if tests:
        conversion.notes.append(
            f"data.val_files={', '.join(tests)}: test questions would choose the checkpoint; set others "
            "aside for validation and move these to data.test_files"
        )


def _length_of_run(conversion: Conversion) -> None:
    epochs = conversion.given("trainer.total_epochs")
    if "trainer.total_training_steps" not in conversion.ours:
        batch = conversion.ours["data.train_batch_size"]
        conversion.notes.append(
            f"{epochs or 30} epochs: srl counts steps; set trainer.total_training_steps to epochs × "
            f"questions / {batch} (until then it is 30)"
        )
    elif epochs:
        conversion.notes.append(f"total_epochs={epochs} is not read: srl counts steps only")


def _critic(conversion: Conversion) -> None:
    """The critic follows the actor where nothing else is set, and starts from the policy. The actor learns
    after `critic_warmup` steps, with verl from that step on."""
    for key in ("ppo_mini_batch_size", "ppo_epochs"):
        conversion.ours.setdefault(f"critic.{key}", conversion.ours[f"actor.{key}"])
    path = conversion.given("critic.model.path")
    if conversion.has_critic and path not in (None, conversion.given("actor_rollout_ref.model.path")):
        conversion.notes.append(f"critic.model.path={path} is not read: the critic starts from the policy")
    first = conversion.ours["trainer.critic_warmup"]
    if isinstance(first, int) and first > 0:
        conversion.ours["trainer.critic_warmup"] = first - 1
        conversion.notes.append(f"trainer.critic_warmup={first} trains only the critic for {first - 1} steps")


def _loggers(conversion: Conversion) -> None:
    given = conversion.given("trainer.logger")
    if given is not None:
        names = get_args(get_args(Trainer.model_fields["logger"].annotation)[0])
        wanted = given if isinstance(given, list) else [given]
        conversion.ours["trainer.logger"] = [name for name in wanted if name in names]
        if foreign := [str(name) for name in wanted if name not in names]:
            conversion.notes.append(f"trainer.logger has no {', '.join(foreign)}")


def _offloads(conversion: Conversion) -> None:
    """srl has one setting for all networks: the actor's."""
    for kind in ("param_offload", "optimizer_offload"):
        megatron = conversion.given(f"{ACTOR}.megatron.{kind}")
        if megatron is not None and conversion.ours["cluster.strategy"] == "megatron":
            conversion.ours[f"cluster.{kind}"] = megatron
        reference = f"actor_rollout_ref.ref.fsdp_config.{kind}"
        if conversion.source.settings.get(reference) == conversion.ours[f"cluster.{kind}"]:
            conversion.used.add(reference)


def _turns(conversion: Conversion) -> None:
    """A turn fits an episode; what is kept free for an answer fits a turn."""
    turn, room = (conversion.ours.get(key) for key in ("rollout.max_turn_tokens", "data.max_response_length"))
    if isinstance(turn, int) and isinstance(room, int):
        turn = conversion.ours["rollout.max_turn_tokens"] = min(turn, room)
        if turn < Rollout().min_answer_tokens:
            conversion.ours["rollout.min_answer_tokens"] = turn


def _missing(conversion: Conversion) -> None:
    for key in ("model.path", "data.train_files", "data.val_files"):
        if not conversion.ours.get(key):
            conversion.notes.append(f"the file sets no {key}: the default is that of the made-up world")


_RULES: tuple[Callable[[Conversion], None], ...] = (
    _test_files, _length_of_run, _critic, _loggers, _offloads, _turns, _missing,
)  # fmt: skip


def _optimiser_steps(conversion: Conversion) -> None:
    """Search-R1's mini-batch counts episodes, ours counts questions, each with `rollout.n` episodes."""
    value = conversion.value
    batch, mini = value("data.train_batch_size"), value(f"{ACTOR}.ppo_mini_batch_size")
    n, epochs = value(f"{ROLLOUT}.n_agent"), value(f"{ACTOR}.ppo_epochs")
    if (inner := value(f"{ROLLOUT}.n", 1)) != 1:
        conversion.notes.append(f"{ROLLOUT}.n={inner} is not read: n_agent counts the episodes of a question")
    if not all(isinstance(number, int) and 0 < number < 2**20 for number in (batch, mini, n, epochs)):
        return
    theirs, ours = -(-batch * n // mini) * epochs, -(-batch // min(mini, batch)) * epochs
    if theirs != ours:
        divisors = [size for size in range(1, batch + 1) if batch % size == 0]
        size = min(divisors, key=lambda size: abs(batch // size * epochs - theirs))
        conversion.notes.append(
            f"a mini-batch of {mini} is {mini} episodes in Search-R1 and {mini} questions × {n} episodes in "
            f"srl: {theirs} optimiser steps a rollout there, {ours} here; actor.ppo_mini_batch_size={size} "
            f"gives {batch // size * epochs}"
        )


def _greedy_validation(conversion: Conversion) -> None:
    """Search-R1 asks for it and samples; verl's key counts where it samples."""
    samples = conversion.given(f"{ROLLOUT}.val_kwargs.do_sample") is True
    temperature = conversion.given(f"{ROLLOUT}.val_kwargs.temperature", 0.0)
    conversion.ours["eval.temperature"] = temperature if samples else 0.0


def _loss_of_search_r1(conversion: Conversion) -> None:
    conversion.ours |= {"actor.clip_ratio_c": None, "actor.loss_agg_mode": "token-mean"}
    conversion.ours["algorithm.use_kl_in_reward"] = conversion.value(f"{ACTOR}.use_kl_loss") is not True
    if conversion.ours["actor.mask_observations"] is not True:
        conversion.notes.append(
            "state_masking is off, so retrieved text is in the loss: actor.mask_observations=false"
        )


def _reward_of_search_r1(conversion: Conversion) -> None:
    program = conversion.source.program
    scores = {option: conversion.value(f"reward_model.{key}", 0) for key, option in _FORMAT_SCORES.items()}
    name = "format" if program == "main_ppo_format" or (not program and any(scores.values())) else "em"
    conversion.ours["reward.weights"] = {name: 1.0}
    if name == "format":
        conversion.ours |= {f"reward.format.{option}": score for option, score in scores.items()}
    conversion.notes.append(f"the reward is {name}, on the last answer that the policy wrote")


_SEARCH_R1_RULES: tuple[Callable[[Conversion], None], ...] = (
    _optimiser_steps, _greedy_validation, _loss_of_search_r1, _reward_of_search_r1,
)  # fmt: skip


def _turns_of_verl(conversion: Conversion) -> None:
    """An assistant's turns count the answer too, which ours do not; 0 is no limit."""
    section = f"{ROLLOUT}.multi_turn"
    assistant, user = (conversion.given(f"{section}.max_{who}_turns") for who in ("assistant", "user"))
    limits = [
        turns
        for turns in (user, assistant - 1 if isinstance(assistant, int) else None)
        if isinstance(turns, int)
    ]
    if limits := [turns for turns in limits if turns > 0]:
        conversion.ours["rollout.max_turns"] = min(limits)
    conversion.ours["rollout.max_turn_tokens"] = conversion.value("data.max_response_length")
    tool = conversion.given(f"{section}.tool_config_path")
    why = f"{tool} is not read" if tool else "the source does not say what to search"
    conversion.notes.append(f"{why}: set search.url or search.index, or rollout.search=false")


def _loss_of_verl(conversion: Conversion) -> None:
    """verl 0.9.1 clips gradients by `optim.clip_grad`; `gspo` and `cispo` are losses of ours too."""
    for role, ours in {ACTOR: "actor", "critic": "critic"}.items():
        clip = conversion.given(f"{role}.optim.clip_grad")
        if clip is not None:
            conversion.ours[f"{ours}.grad_clip"] = clip
    mode = conversion.given(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in ("gspo", "cispo"):
        conversion.ours["actor.policy_loss.loss_mode"] = mode
    elif mode != "vanilla":
        conversion.ours[f"verl.{ACTOR}.policy_loss.loss_mode"] = mode
        conversion.notes.append(
            f"the loss {mode} is verl's own: kept below verl:; without it the loss is PPO's"
        )
    norm = conversion.given("algorithm.norm_adv_by_std_in_grpo")
    if norm is not None and conversion.ours["algorithm.name"] == "grpo":
        conversion.ours["algorithm.grpo.norm_adv_by_std_in_grpo"] = norm


def _reward_of_verl(conversion: Conversion) -> None:
    conversion.ours["reward.weights"] = {"em": 1.0}
    paths = [conversion.given(f"{section}custom_reward_function.path") for section in ("", "reward.")]
    path = paths[0] or paths[1]
    said = (
        f"{path} is not read; write a plugin (srl plugins new reward NAME)"
        if path
        else "verl's depends on the data"
    )
    conversion.notes.append(f"the reward is em: {said}")


def _strategy_of_verl(conversion: Conversion) -> None:
    """Keys of Megatron imply the strategy where none is set."""
    settings = conversion.source.settings
    if f"{ACTOR}.strategy" not in settings and any(".megatron." in key for key in settings):
        conversion.ours["cluster.strategy"] = "megatron"


_VERL_RULES: tuple[Callable[[Conversion], None], ...] = (
    _strategy_of_verl, _greedy_validation, _turns_of_verl, _loss_of_verl, _reward_of_verl,
)  # fmt: skip
