"""A file of verl's or Search-R1's as a configuration of ours, with a report of what changes its meaning.

Which key of ours is which of verl's stands at the key (`Key.verl`). Here is what Search-R1 calls otherwise,
what both have by default, and what no single key says.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from typing import Any, get_args

from srl.config import load_config
from srl.config.keys import facts, flat, keys, plain
from srl.config.sections import ACTOR, KL, ROLLOUT, RolloutCorrection, Trainer
from srl.config.yaml12 import dump, parse
from srl.errors import UserError, parsing
from srl.files import FORMAT
from srl.safe import quoted
from srl.train.importing.script import ECHO, MARK, read_script

KWARGS = "data.apply_chat_template_kwargs"

SEARCH_R1, VERL = "Search-R1", "verl"
"""The dialects: Search-R1's own version of verl, and verl itself (0.9.1)."""

VALUES: dict[str, dict[Any, Any]] = {
    "algorithm.name": {"gae": "ppo", "reinforce++": "reinforce_plus_plus"},
    **{key: {name: name for name in KL} for key in ("algorithm.kl_penalty", "actor.kl_loss_type")},
    **{f"{who}.optim.lr_warmup_steps": {-1: 0} for who in ("actor", "critic")},
    **{f"trainer.{name}": {-1: 0} for name in ("save_freq", "test_freq")},
    "eval.val_questions": {-1: None},
    "cluster.rollout": {"sglang_async": "sglang", "vllm_async": "vllm"},
}
"""Their values of keys of ours, besides verl's names of values in the table."""
CALL_FORMATS = {"hermes": "hermes", "qwen3_coder": "qwen-xml", "llama3_json": "llama-json"}
"""Our formats of calls by their names."""
NAMES: dict[str, dict[str, str]] = {
    SEARCH_R1: {
        f"{ACTOR}.state_masking": "actor.mask_observations",
        f"{ROLLOUT}.n_agent": "rollout.n",
        "data.max_start_length": "data.max_prompt_length",
        "data.max_prompt_length": "data.max_response_length",
        "data.max_response_length": "rollout.max_turn_tokens",
        "data.max_obs_length": "rollout.max_obs_length",
        "data.val_data_num": "eval.val_questions",
        "do_search": "rollout.search",
        "max_turns": "rollout.max_turns",
        "retriever.topk": "search.topk",
        "retriever.url": "search.url",
    },
    VERL: {
        "data.val_max_samples": "eval.val_questions",
        "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
        f"{ACTOR}.policy_loss.loss_mode": "actor.policy_loss.loss_mode",
        **{f"{place}.reward_kwargs.overlong_buffer_cfg.{name}": f"reward.overlong_buffer.{name}"
           for place in ("reward_model", "reward") for name in ("enable", "len", "penalty_factor")},
        **{key: key for name in RolloutCorrection.model_fields
           if (key := f"algorithm.rollout_correction.{name}")},
    },
}  # fmt: skip
"""Their names of keys of ours that verl lacks, or has under another name."""
OPTIMISER = {
    f"{theirs}.{name}": f"{ours}.{key}"
    for theirs, ours in ((ACTOR, "actor"), ("critic", "critic"))
    for name, key in (("grad_clip", "grad_clip"), ("optim.warmup_style", "optim.lr_scheduler_type"),
                      ("optim.lr_decay_style", "optim.lr_scheduler_type"))
}  # fmt: skip
"""Names of several versions and engines of verl; what the table names replaces them."""
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model.gradient_checkpointing": (False, True), "model.lora_alpha": (32, 16),
    "data.train_batch_size": (1024, 1024), "data.max_prompt_length": (256, 512),
    "data.max_response_length": (512, 512), "eval.val_questions": (None, None),
    "rollout.max_turn_tokens": (512, 512), "rollout.max_obs_length": (512, 500),
    "rollout.max_turns": (10, 4), "rollout.max_num_seqs": (1024, 256), "rollout.top_p": (0.95, 1.0),
    "rollout.n": (1, 1), "algorithm.name": ("ppo", "ppo"), "algorithm.use_kl_in_reward": (True, False),
    "actor.clip_ratio_c": (None, 3.0), "actor.entropy_coeff": (0.001, 0.0),
    "actor.loss_agg_mode": ("token-mean", "token-mean"), "actor.mask_observations": (False, True),
    "actor.ppo_mini_batch_size": (256, 256), "actor.use_kl_loss": (False, False),
    "trainer.critic_warmup": (0, 0), "trainer.save_freq": (0, 0), "trainer.test_freq": (0, 0),
    "cluster.n_gpus_per_node": (8, 8), "cluster.strategy": ("fsdp", "fsdp"),
    "cluster.tensor_model_parallel_size": (2, 2),
}  # fmt: skip
"""What a file means that does not say it, by our keys: with Search-R1 and with verl. A key is here if we have
another default, or an algorithm of ours brings one."""
SCORES = {
    "reward_model.structure_format_score": "reward.format.structure_score",
    "reward_model.final_format_score": "reward.format.final_format_score",
    "reward_model.retrieval_score": "reward.format.retrieval_score",
}
"""The options of Search-R1's reward `format`."""
ONLY_SEARCH_R1 = {*SCORES, *NAMES[SEARCH_R1], "data.train_data_num", "algorithm.no_think_rl"} - {
    key.facts.verl for key in keys()
}
"""Keys that mark a configuration as Search-R1's."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The configuration as YAML (`text`), and the report, one sentence a line."""

    text: str
    report: tuple[str, ...]


@dataclass
class Conversion:
    """Their `settings` by dotted name, the `program` that the file's command runs (empty without one), the
    report (`notes`), our keys so far (`ours`), and what is `used` of theirs."""

    settings: dict[str, Any]
    program: str = ""
    notes: list[str] = field(default_factory=list)
    ours: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of their key; it counts as dealt with."""
        self.used.add(key)
        value = self.settings.get(key)
        return default if value is None else value

    @property
    def dialect(self) -> str:
        is_search_r1 = self.program == "main_ppo_format" or ONLY_SEARCH_R1 & self.settings.keys()
        return SEARCH_R1 if is_search_r1 else VERL


def import_file(path: Path | str) -> Imported:
    """Convert a file of verl's or Search-R1's to a configuration of ours, and check that it loads.

    Raises UserError for what cannot be converted.
    """
    path = Path(path)
    theirs = _read(path)
    names = names_of(theirs.dialect)
    options = [key for key in theirs.settings if key.startswith(f"{KWARGS}.")]
    names |= {key: key.replace(KWARGS, names[KWARGS]) for key in options}
    if not theirs.settings.keys() & names.keys():
        raise UserError(f"{path}: no key of verl's or Search-R1's is in it")
    _resolve(theirs, path, names)
    theirs.ours = {key: pair[theirs.dialect == VERL] for key, pair in DEFAULTS.items()}
    for name, ours in names.items():
        if (value := theirs.get(name)) is not None:
            theirs.ours[ours] = _converted(ours, value)
    (_search_r1 if theirs.dialect == SEARCH_R1 else _verl)(theirs)
    _both(theirs)
    _other_keys(theirs)
    report = tuple(" ".join(note.split()) for note in theirs.notes)
    head = (f"From {' '.join(path.name.split())}, a configuration of {theirs.dialect}'s.", *report)
    text = "".join(f"# {line}\n" for line in head) + "\n" + _yaml(theirs.ours)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file=file)
        except UserError as error:
            name = next((name for name in theirs.settings if names.get(name) == error.key), "converted")
            said = re.sub(rf"{re.escape(str(file))}(:\d+)?", name, str(error))
            raise UserError(f"{path}: {said}", key=error.key) from error
    return Imported(text, report)


def names_of(dialect: str) -> dict[str, str]:
    """Their keys and ours. Of several for one of ours the last one that is set counts."""
    of_table = {key.facts.verl: key.name for key in keys() if key.facts.verl}
    if dialect == SEARCH_R1:  # it has no dual clip, and n_agent counts the episodes of a question
        del of_table[f"{ACTOR}.clip_ratio_c"], of_table[f"{ROLLOUT}.n"]
    return {**OPTIMISER, **of_table, **NAMES[dialect]}


def _converted(ours: str, value: Any) -> Any:
    """Our value of theirs."""
    if isinstance(value, list):
        return [_converted(ours, part) for part in value]
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        value = value.removeprefix("srl_") if ours == "algorithm.name" else value
        value = str(Path(value).expanduser()) if value.startswith("~/") else value
    table = {theirs: mine for mine, theirs in facts(ours).names.items()} | VALUES.get(ours, {})
    return table.get(value, value)


# Reading


def _read(path: Path) -> Conversion:
    """The settings of a YAML file, a list of overrides or a script. Raises UserError in one line."""
    with parsing(path):
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    if not text.strip() or "\0" in text:
        raise UserError(f"{path} is empty or not text")
    if path.suffix.lower() not in (".yaml", ".yml"):
        with parsing(path):
            script = read_script(text, frozenset(key for key in ONLY_SEARCH_R1 if "." not in key))
        return Conversion(_of_overrides(script.words, path), script.program, script.notes)
    tree = parse(text, str(path))
    if isinstance(tree, list):
        return Conversion(_of_overrides(map(str, tree), path))
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected sections with keys under them, or a list of overrides")
    if "format" in tree:
        raise UserError(f"{path} is a configuration of srl's own", hint=f"srl train --config {path}")
    theirs = Conversion(_flat({key: tree[key] for key in tree if key not in ("defaults", "hydra")}))
    bases = tree.get("defaults")
    if unread := [str(base) for base in bases if base != "_self_"] if isinstance(bases, list) else []:
        theirs.notes.append(f"the bases of the file are not read: {', '.join(unread)}")
    return theirs


def _of_overrides(words: Iterable[str], path: Path) -> dict[str, Any]:
    settings = dict[str, Any]()
    for word in words:
        override = re.fullmatch(r"(?:\+{0,2}([A-Za-z_][\w./@-]*)=(.*)|~[A-Za-z_][\w./@-]*)", word, re.DOTALL)
        if override is None:
            shown = word.replace(MARK, "")[:60]
            raise UserError(f"{path}: expected KEY=VALUE, found {shown!r}", hint=ECHO if MARK in word else "")
        if override[1]:
            settings |= _flat({override[1]: read_value(override[2], f"{path}: {word[:60]}")})
    return settings


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, without `???` (Hydra's mark for a missing value) and classes."""
    settings = ((".".join(path), value) for path, value in flat(tree))
    return {key: value for key, value in settings if value != "???" and not key.endswith("_target_")}


def read_value(text: str, name: str = "value") -> Any:
    """A value of Hydra's: true, false, null, a number, text, quoted text, or a list. Raises UserError."""
    text = text.strip()
    if MARK in text:
        return text
    if text[:1] in ("[", "{", "'", '"'):
        value = parse(text, name)
        if any(isinstance(part, dict) and part for part in (value if isinstance(value, list) else [value])):
            raise UserError(f"{name}: a mapping is not read", hint="set each of its keys: NAME.KEY=VALUE")
        return value
    plain_word = re.fullmatch(r"[-+.\w]*", text)  # others are text in Hydra, whatever they are in YAML
    return parse(text, name) if plain_word else text


def _resolve(theirs: Conversion, path: Path, names: Mapping[str, str]) -> None:
    """Put in references. What only a shell can tell is refused where it matters, else named. What verl has by
    default says nothing, where it is not a key of ours."""
    settings, theirs.settings = theirs.settings, {}
    for key, value in settings.items():
        if MARK in str(value):
            said = f"only a shell can tell {key}={quoted(str(value).replace(MARK, ''))}"
            if key in names:
                raise UserError(f"{path}: {said}", key=key, hint=f"write it, or {ECHO}")
            theirs.notes.append(f"not read, {said}")
        elif key in names or verls_defaults().get(key, MARK) != value:
            try:
                theirs.settings[key] = resolved(value, verls_defaults() | settings)
            except LookupError as error:
                theirs.settings[key] = None
                if key in names:
                    theirs.notes.append(f"ignored, {error.args[0]} is not defined: {key}")


def resolved(value: Any, settings: Mapping[str, Any]) -> Any:
    """`value` with each `${a.b}` and `${oc.select:a.b,otherwise}` put in.

    Raises LookupError with one that leads nowhere, or in a circle.
    """
    if isinstance(value, list):
        return [resolved(part, settings) for part in value]
    for _ in range(10):  # references behind references; a circle has no end
        if not isinstance(value, str) or len(value) > 2**14 or "${" not in value:
            return value
        reference = re.search(r"\$\{(?:oc\.select:)?([\w./-]+)(?:, *([^${}]*))?\}", value)
        if reference is None or (reference[1] not in settings and reference[2] is None):
            break
        held = settings[reference[1]] if reference[1] in settings else read_value(reference[2])
        value = held if reference[0] == value else value.replace(reference[0], str(held))
    raise LookupError(value[:60])


@cache
def verls_defaults() -> dict[str, Any]:
    """The default configuration in the verl package, references unresolved; empty without verl."""
    try:
        file = distribution("verl").locate_file("verl/trainer/config/_generated_ppo_trainer.yaml")
        return _flat(parse(Path(str(file)).read_text(encoding="utf-8"), "verl"))
    except (PackageNotFoundError, OSError, UserError):
        return {}


# What no single key says


def _search_r1(theirs: Conversion) -> None:
    """Search-R1's mini-batch counts episodes, and the KL is in the reward unless it is in the loss."""
    ours, notes = theirs.ours, theirs.notes
    mini, n = ours["actor.ppo_mini_batch_size"], ours["rollout.n"]
    if n != 1:
        notes.append(
            f"a mini-batch of {mini} is {mini} episodes in Search-R1, and {mini} questions × {n} episodes "
            f"here: fewer optimiser steps; actor.ppo_mini_batch_size is to be about {n} times smaller"
        )
    ours["algorithm.use_kl_in_reward"] = ours["actor.use_kl_loss"] is not True
    if ours["actor.mask_observations"] is not True:
        notes.append("state_masking is off, so retrieved text is in the loss: actor.mask_observations=false")
    scores = {option: theirs.get(key, 0) for key, option in SCORES.items()}
    has_format = theirs.program == "main_ppo_format" or (not theirs.program and any(scores.values()))
    ours["reward.weights"] = {"format" if has_format else "em": 1.0}
    ours |= scores if has_format else {}


def _verl(theirs: Conversion) -> None:
    """An assistant's turns count the answer too, which ours do not; 0 is no limit."""
    ours, notes, turns = theirs.ours, theirs.notes, f"{ROLLOUT}.multi_turn"
    limits = [(theirs.get(f"{turns}.max_user_turns"), 0), (theirs.get(f"{turns}.max_assistant_turns"), 1)]
    if most := [limit - more for limit, more in limits if isinstance(limit, int) and limit > more]:
        ours["rollout.max_turns"] = min(most)
    ours["rollout.max_turn_tokens"] = ours["data.max_response_length"]
    tools = [theirs.get(f"{turns}.{name}") for name in ("enable", "tool_config_path", "function_tool_path")]
    if any(tools):
        ours |= {
            "rollout.protocol": "native",
            "rollout.max_calls": theirs.get(f"{turns}.max_parallel_calls", 1),
            "rollout.call_format": CALL_FORMATS.get(str(theirs.get(f"{turns}.format", "hermes")), "auto"),
        }
        notes.append("prompts are those of the template tools, not the file's (rollout.protocol=native)")
    notes.append("what to search is not read: set search.url or search.index, or rollout.search=false")
    norm = theirs.get("algorithm.norm_adv_by_std_in_grpo")
    if norm is not None and ours["algorithm.name"] == "grpo":
        ours["algorithm.grpo.norm_adv_by_std_in_grpo"] = norm
    ours["reward.weights"] = {"em": 1.0}
    notes.append("the reward is em: those of verl are not read (a plugin: srl plugins new reward NAME)")


def _both(theirs: Conversion) -> None:
    ours, notes = theirs.ours, theirs.notes
    samples = theirs.get(f"{ROLLOUT}.val_kwargs.do_sample") is True
    ours["eval.temperature"] = theirs.get(f"{ROLLOUT}.val_kwargs.temperature", 0.0) if samples else 0.0
    files = ours.get("data.val_files")
    files = files if isinstance(files, list) else [files]
    if tests := [str(file) for file in files if "test" in PurePath(str(file)).name]:
        notes.append(
            f"data.val_files={', '.join(tests)}: test questions would choose the checkpoint; set others "
            "aside for validation and move these to data.test_files"
        )
    if "trainer.total_training_steps" not in ours:
        epochs = theirs.get("trainer.total_epochs", 30)
        notes.append(f"{epochs} epochs: srl counts steps, 30 unless trainer.total_training_steps says more")
    ours.setdefault("critic.ppo_mini_batch_size", ours["actor.ppo_mini_batch_size"])
    if ours["algorithm.name"] != "ppo":  # theirs with a critic
        theirs.ours = ours = {key: ours[key] for key in ours if not key.startswith("critic.")}
    first = ours["trainer.critic_warmup"]
    if isinstance(first, int) and first > 0:
        ours["trainer.critic_warmup"] = first - 1
        notes.append(f"trainer.critic_warmup={first} trains only the critic for {first - 1} steps")
    if (loggers := theirs.get("trainer.logger")) is not None:
        names = get_args(get_args(Trainer.model_fields["logger"].annotation)[0])
        loggers = loggers if isinstance(loggers, list) else [loggers]
        ours["trainer.logger"] = [name for name in loggers if name in names]
        if foreign := [str(name) for name in loggers if name not in names]:
            notes.append(f"trainer.logger has no {', '.join(foreign)}")
    turn, room = ours["rollout.max_turn_tokens"], ours["data.max_response_length"]
    if isinstance(turn, int) and isinstance(room, int):
        ours["rollout.max_turn_tokens"] = min(turn, room)


def _other_keys(theirs: Conversion) -> None:
    """Name each key that nothing has read, and those apart that are named like one that is."""
    alike = {name.rpartition(".")[2]: name for name in (*names_of(VERL), *ONLY_SEARCH_R1)}
    unread = {
        key: None if key in verls_defaults() else alike.get(key.rpartition(".")[2])
        for key in theirs.settings
        if key not in theirs.used
    }
    if rest := [key for key, name in unread.items() if not name]:
        theirs.notes.append(f"not read (verl: in the file takes keys of verl's alone): {', '.join(rest)}")
    if foreign := [f"{key} ({name})" for key, name in unread.items() if name]:
        theirs.notes.append(f"not read, though named like another key: {', '.join(foreign)}")


def _yaml(ours: Mapping[str, Any]) -> str:
    """No preset is below an imported file, and no fine-tuning before it."""
    settings = {"format": FORMAT, "extends": None, "sft.steps": 0, **ours}
    return dump({key: plain(value) for key, value in settings.items()})
