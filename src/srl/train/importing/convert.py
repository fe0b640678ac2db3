"""A file of verl's or Search-R1's as a configuration of ours, with a report of what changes its meaning.

Which key of ours is which of verl's stands at the key (`Key.verl`). Here is what else the two call it, what
they have by default (verl 0.9.1), and what no single key says. Their settings are a mapping by dotted name,
from which what is dealt with is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from srl.config.keys import facts, flat, keys, plain
from srl.config.load import Layer, flatten, resolve
from srl.config.sections import ACTOR, ROLLOUT, RolloutCorrection
from srl.config.yaml12 import dump, parse
from srl.errors import UserError, parsing
from srl.files import FORMAT
from srl.safe import quoted
from srl.train.importing.script import ECHO, MARK, read_script

Settings = dict[str, Any]
LOGGERS = ("console", "tensorboard", "wandb")
KWARGS = "data.apply_chat_template_kwargs"

NAMES: list[tuple[str, str, str]] = [
    ("data.max_prompt_length", "data.max_start_length", "."),
    ("data.max_response_length", "data.max_prompt_length", "."),
    ("eval.val_questions", "data.val_data_num", "data.val_max_samples"),
    ("search.topk", "retriever.topk", ""),
    ("search.url", "retriever.url", ""),
    ("rollout.search", "do_search", ""),
    ("rollout.max_turns", "max_turns", ""),
    ("rollout.max_turn_tokens", "data.max_response_length", ""),
    ("rollout.max_obs_length", "data.max_obs_length", ""),
    ("rollout.n", f"{ROLLOUT}.n_agent", "."),
    ("actor.clip_ratio_c", "", "."),
    ("actor.mask_observations", f"{ACTOR}.state_masking", ""),
    ("actor.policy_loss.loss_mode", "", f"{ACTOR}.policy_loss.loss_mode"),
    ("reward.format.structure_score", "reward_model.structure_format_score", ""),
    ("reward.format.final_format_score", "reward_model.final_format_score", ""),
    ("reward.format.retrieval_score", "reward_model.retrieval_score", ""),
    *((f"{ours}.{key}", f"{theirs}.{name}", f"{theirs}.{name}")  # of several versions of verl
      for ours, theirs in (("actor", ACTOR), ("critic", "critic"))
      for key, name in (("grad_clip", "grad_clip"), ("optim.lr_scheduler_type", "optim.warmup_style"))),
    *((f"reward.overlong_buffer.{key}", "", f"{section}.reward_kwargs.overlong_buffer_cfg.{key}")
      for section in ("reward_model", "reward") for key in ("enable", "len", "penalty_factor")),
    *((key, "", key) for name in RolloutCorrection.model_fields
      if (key := f"algorithm.rollout_correction.{name}")),
    ("trainer.logger", "trainer.logger", "trainer.logger"),
    ("trainer.max_ckpt_to_keep", "", "trainer.max_actor_ckpt_to_keep"),
]  # fmt: skip
"""Our key, its name in Search-R1 and in verl: `.` where `Key.verl` has it, empty where there is none."""
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model.gradient_checkpointing": (False, True), "model.lora_alpha": (32, 16),
    "data.train_batch_size": (1024, 1024), "data.max_prompt_length": (256, 512),
    "data.max_response_length": (512, 512), "eval.val_questions": (None, None), "rollout.n": (1, 1),
    "rollout.max_turns": (10, 4), "rollout.max_turn_tokens": (512, 512), "rollout.top_p": (0.95, 1.0),
    "rollout.max_obs_length": (512, 500), "rollout.max_num_seqs": (1024, 256),
    "algorithm.name": ("ppo", "ppo"), "algorithm.use_kl_in_reward": (True, False),
    "actor.clip_ratio_c": (None, 3.0), "actor.entropy_coeff": (0.001, 0.0),
    "actor.loss_agg_mode": ("token-mean", "token-mean"), "actor.mask_observations": (False, True),
    "actor.ppo_mini_batch_size": (256, 256), "actor.use_kl_loss": (False, False),
    "trainer.critic_warmup": (0, 0), "trainer.save_freq": (0, 0), "trainer.test_freq": (0, 0),
}  # fmt: skip
"""What a file of Search-R1's and of verl's means that does not say it, beside machines. A key is here if we
have another default, or an algorithm of ours brings one."""
VALUES: dict[str, dict[Any, Any]] = {
    "algorithm.name": {"gae": "ppo", "reinforce++": "reinforce_plus_plus"},
    "cluster.rollout": {"sglang_async": "sglang", "vllm_async": "vllm"},
    "rollout.call_format": {"hermes": "hermes", "qwen3_coder": "qwen-xml", "llama3_json": "llama-json"},
}
"""Their values of keys of ours, besides verl's names of values at the key."""


class Imported(NamedTuple):
    """The configuration as YAML (`text`), and the report, one sentence a line."""

    text: str
    report: tuple[str, ...]


def import_file(path: Path | str) -> Imported:
    """Convert a file of verl's or Search-R1's to a configuration of ours, and check that it loads.

    Raises UserError for what cannot be converted.
    """
    path = Path(path)
    theirs, program, notes = _read(path)
    only_theirs = names_of(is_search_r1=True).keys() - names_of(is_search_r1=False).keys()
    is_search_r1 = program == "main_ppo_format" or bool(theirs.keys() & only_theirs)
    names = names_of(is_search_r1=is_search_r1)
    names |= {key: key.replace(KWARGS, names[KWARGS]) for key in theirs if key.startswith(f"{KWARGS}.")}
    if not theirs.keys() & names.keys():
        raise UserError(f"{path} sets no key of verl or Search-R1")
    theirs = _resolved(theirs, names, path, notes)
    ours = {"sft.steps": 0, **{key: pair[not is_search_r1] for key, pair in DEFAULTS.items()}}
    for name, key in names.items():  # of several names of a key the last one that is set counts
        if (value := theirs.pop(name, None)) is not None:
            ours[key] = _converted(key, value)
    if is_search_r1:
        _search_r1(ours, notes, program)
    else:
        _verl(theirs, ours, notes)
    _both(theirs, ours, notes)
    if theirs:
        notes.append(f"not read: {', '.join(theirs)}")
    resolve([Layer(list(flatten(ours, str(path))))])
    report = tuple(" ".join(note.split()) for note in notes)
    dialect = "Search-R1" if is_search_r1 else "verl"
    head = [f"From {' '.join(path.name.split())}, a configuration of {dialect}'s.", *report]
    text = dump(plain({"format": FORMAT, "extends": None, **ours}))
    return Imported("".join(f"# {line}\n" for line in head) + f"\n{text}", report)


def names_of(*, is_search_r1: bool) -> dict[str, str]:
    """Their keys and ours."""
    rows = [(ours, search_r1 if is_search_r1 else verl) for ours, search_r1, verl in NAMES]
    others = {ours for ours, name in rows if name != "." and is_search_r1}
    at_the_key = {key.facts.verl: key.name for key in keys() if key.facts.verl and key.name not in others}
    return {name: ours for ours, name in rows if name not in (".", "")} | at_the_key


def _converted(ours: str, value: Any) -> Any:
    """Our value of theirs, where −1 is no number of steps or questions."""
    if isinstance(value, list):
        return [_converted(ours, part) for part in value]
    if isinstance(value, int | float) and value == -1:
        return None if ours == "eval.val_questions" else 0
    if isinstance(value, str) and value.startswith("~/"):
        return str(Path(value).expanduser())
    table = {theirs: mine for mine, theirs in facts(ours).names.items()} | VALUES.get(ours, {})
    return table.get(value, value) if isinstance(value, str) else value


# Reading


def _read(path: Path) -> tuple[Settings, str, list[str]]:
    """The settings of a YAML file, a list of overrides or a script, the program that a script runs, and what
    is to be said. Raises UserError in one line."""
    with parsing(path):
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        if not text.strip() or MARK in text:
            raise UserError(f"{path} is empty or not text")
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        tree, program = (parse(text, str(path)), "") if is_yaml else read_script(text)
    if isinstance(tree, Mapping):
        if "format" in tree:
            raise UserError(f"{path} is a configuration of srl's own", hint=f"srl train --config {path}")
        return _flat(tree), "", []
    settings, notes = Settings(), list[str]()
    for word in map(str, tree if isinstance(tree, list) else [tree]):
        override = re.fullmatch(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", word, re.DOTALL)
        if override:
            settings |= _flat({override[1]: read_value(override[2], f"{path}: {word[:60]}")})
        elif word.startswith("-"):
            notes.append(f"not read, nor what only its file sets: {word}")
        else:
            shown = word.replace(MARK, "")[:60]
            raise UserError(f"{path}: expected KEY=VALUE, found {shown!r}", hint=ECHO if MARK in word else "")
    return settings, program, notes


def _flat(tree: Mapping[str, Any]) -> Settings:
    """Settings by dotted name, without `???` (Hydra's mark for a missing value) and classes."""
    settings = ((".".join(path), value) for path, value in flat(tree))
    return {key: value for key, value in settings if value != "???" and not key.endswith("_target_")}


def read_value(text: str, name: str = "value") -> Any:
    """A value of Hydra's: true, false, null, a number, text, quoted text, or a list. Raises UserError."""
    text = text.strip()
    is_yaml = text[:1] in ("[", "{", "'", '"') or re.fullmatch(r"[-+.\w]*", text)
    if MARK in text or not is_yaml:
        return text
    value = parse(text, name)
    if isinstance(value, Mapping) and value:
        raise UserError(f"{name}: a mapping is not read", hint="set each of its keys: NAME.KEY=VALUE")
    return value


def _resolved(settings: Settings, names: Mapping[str, str], path: Path, notes: list[str]) -> Settings:
    """Their settings with references put in, without those that only a shell can tell and what verl has by
    default, where it is not a key of ours. Raises UserError where a key of ours needs a shell."""
    everything, kept = verls_defaults() | settings, Settings()
    for key, value in settings.items():
        if MARK in str(value):
            said = f"only a shell can tell {key}={quoted(str(value).replace(MARK, ''))}"
            if key in names:
                raise UserError(f"{path}: {said}", key=key, hint=f"write it, or {ECHO}")
            notes.append(f"not read, {said}")
        elif key in names and "${" in str(put_in := resolved(value, everything)):
            notes.append(f"ignored, a reference that leads nowhere: {key}={value}")
        elif key in names or verls_defaults().get(key, MARK) != value:
            kept[key] = put_in if key in names else value
    return kept


def resolved(value: Any, settings: Mapping[str, Any], depth: int = 0) -> Any:
    """`value` with each `${a.b}` and `${oc.select:a.b,otherwise}` put in that leads to a value."""
    if isinstance(value, list):
        return [resolved(part, settings) for part in value]
    if not isinstance(value, str) or len(value) > 2**14 or depth > 10:  # a circle has no end
        return value
    reference = re.search(r"\$\{(?:oc\.select:)?([\w./-]+)(?:, *([^${}]*))?\}", value)
    if reference is None or (reference[1] not in settings and reference[2] is None):
        return value
    held = settings[reference[1]] if reference[1] in settings else read_value(reference[2])
    held = held if reference[0] == value else value.replace(reference[0], str(held))
    return resolved(held, settings, depth + 1)


@cache
def verls_defaults() -> Settings:
    """The default configuration in the verl package, references unresolved; empty without verl."""
    try:
        file = distribution("verl").locate_file("verl/trainer/config/_generated_ppo_trainer.yaml")
        return _flat(parse(Path(str(file)).read_text(encoding="utf-8"), "verl"))
    except (PackageNotFoundError, OSError, UserError):
        return {}


# What no single key says


def _search_r1(ours: Settings, notes: list[str], program: str) -> None:
    """Search-R1's mini-batch counts episodes, and the KL is in the reward unless it is in the loss."""
    if (n := ours["rollout.n"]) != 1:
        notes.append(f"mini-batches count questions, not episodes: divide actor.ppo_mini_batch_size by {n}")
    if ours["actor.mask_observations"] is not True:
        notes.append("state_masking is off, so retrieved text is in the loss: actor.mask_observations=false")
    ours["algorithm.use_kl_in_reward"] = ours["actor.use_kl_loss"] is not True
    scores = {key: ours.pop(key, 0) for key, *_ in NAMES if key.startswith("reward.format.")}
    has_format = program == "main_ppo_format" or (not program and any(scores.values()))
    ours |= {"reward.weights": {"format": 1.0}, **scores} if has_format else {"reward.weights": {"em": 1.0}}


def _verl(theirs: Settings, ours: Settings, notes: list[str]) -> None:
    """An assistant's turns count the answer too, which ours do not; 0 is no limit."""
    names = ("max_user_turns", "max_assistant_turns", "max_parallel_calls", "format")
    user, assistant, calls, style = (theirs.pop(f"{ROLLOUT}.multi_turn.{name}", None) for name in names)
    limits = [limit - more for limit, more in ((user, 0), (assistant, 1)) if isinstance(limit, int)]
    if most := [limit for limit in limits if limit > 0]:
        ours["rollout.max_turns"] = min(most)
    ours["rollout.max_turn_tokens"] = ours["data.max_response_length"]
    tools = ("enable", "tool_config_path", "function_tool_path")
    if [name for name in tools if theirs.pop(f"{ROLLOUT}.multi_turn.{name}", None)]:
        ours |= {"rollout.protocol": "native", "rollout.max_calls": calls or 1}
        ours["rollout.call_format"] = VALUES["rollout.call_format"].get(str(style or "hermes"), "auto")
        notes.append("prompts are those of the template tools, not the file's (rollout.protocol=native)")
    norm = theirs.pop("algorithm.norm_adv_by_std_in_grpo", None)
    if norm is not None and ours["algorithm.name"] == "grpo":
        ours["algorithm.grpo.norm_adv_by_std_in_grpo"] = norm
    ours["reward.weights"] = {"em": 1.0}
    notes.append("the reward is em: those of verl are not read (a plugin: srl plugins new reward NAME)")
    notes.append("what to search is not read: set search.url or search.index, or rollout.search=false")


def _both(theirs: Settings, ours: Settings, notes: list[str]) -> None:
    if theirs.pop(f"{ROLLOUT}.val_kwargs.do_sample", None) is not True:
        ours["eval.temperature"] = 0.0
    files = ours.get("data.val_files")
    if any("test" in PurePath(str(file)).name for file in (files if isinstance(files, list) else [files])):
        notes.append("test questions in data.val_files would choose the checkpoint: see data.test_files")
    epochs = theirs.pop("trainer.total_epochs", None) or 30
    if "trainer.total_training_steps" not in ours:
        notes.append(f"{epochs} epochs: srl counts steps, 30 unless trainer.total_training_steps says more")
    ours.setdefault("critic.ppo_mini_batch_size", ours["actor.ppo_mini_batch_size"])
    for key in [key for key in ours if key.startswith("critic.") and ours["algorithm.name"] != "ppo"]:
        del ours[key]  # no other algorithm of theirs has a critic
    first = ours["trainer.critic_warmup"]  # theirs counts the first step with both
    ours["trainer.critic_warmup"] = max(0, first - 1) if isinstance(first, int) else first
    loggers = ours.pop("trainer.logger", "console")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    ours["trainer.logger"] = [name for name in loggers if name in LOGGERS]
    notes += [f"there is no trainer.logger {name}" for name in loggers if name not in LOGGERS]
    turn, room = ours["rollout.max_turn_tokens"], ours["data.max_response_length"]
    if isinstance(turn, int) and isinstance(room, int):
        ours["rollout.max_turn_tokens"] = min(turn, room)
