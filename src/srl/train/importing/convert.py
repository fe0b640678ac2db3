"""A file of verl's or Search-R1's as a configuration of ours, with a report of what changes its meaning.

Which key of ours is which of verl's stands at the key (`Key.verl`). Here is what Search-R1 calls otherwise,
what both have by default, and what no single key says.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin

from srl.config import load_config
from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import facts, flat, keys, place, plain
from srl.config.sections import ACTOR, KL, ROLLOUT, LossMode, RolloutCorrection, Trainer
from srl.config.yaml12 import dump, parse
from srl.errors import UserError, parsing
from srl.files import FORMAT
from srl.plugins.manager import installed
from srl.safe import quoted
from srl.train.importing.script import ECHO, MARK, read_script

SEARCH_R1, VERL = "Search-R1", "verl"
"""The dialects: Search-R1's own version of verl, and verl itself (0.9.1)."""

VALUES: dict[str, dict[Any, Any]] = {
    "algorithm.name": {
        "gae": "ppo",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
        "reinforce++": "reinforce_plus_plus",
    },
    **{key: {name: name for name in KL} for key in ("algorithm.kl_penalty", "actor.kl_loss_type")},
    **{f"{who}.optim.lr_warmup_steps": {-1: 0, None: 0} for who in ("actor", "critic")},
    "cluster.rollout": {"sglang_async": "sglang", "vllm_async": "vllm"},
    "eval.val_questions": {-1: None},
    "trainer.save_freq": {-1: 0},
    "trainer.test_freq": {-1: 0},
}
"""Their values of keys of ours, besides verl's names of values in the table."""
CALL_FORMATS = {"hermes": "hermes", "qwen3_coder": "qwen-xml", "llama3_json": "llama-json"}
"""Our formats of calls by their names."""
NAMES: dict[str, dict[str, str]] = {
    SEARCH_R1: {
        f"{ACTOR}.state_masking": "actor.mask_observations",
        f"{ROLLOUT}.n_agent": "rollout.n",
        f"{ROLLOUT}.n": "",
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
        **{f"{who}.optim.lr_decay_style": f"{ours}.optim.lr_scheduler_type"
           for who, ours in ((ACTOR, "actor"), ("critic", "critic"))},
        **{f"{place}.reward_kwargs.overlong_buffer_cfg.{name}": f"reward.overlong_buffer.{name}"
           for place in ("reward_model", "reward") for name in ("enable", "len", "penalty_factor")},
        **{f"algorithm.rollout_correction.{name}": f"algorithm.rollout_correction.{name}"
           for name in RolloutCorrection.model_fields},
    },
}  # fmt: skip
"""Their names of keys of ours that verl lacks, or has under another name."""
OLDER = {
    f"{theirs}.{name}": f"{ours}.{key}"
    for theirs, ours in ((ACTOR, "actor"), ("critic", "critic"))
    for name, key in (("grad_clip", "grad_clip"), ("optim.warmup_style", "optim.lr_scheduler_type"))
}
"""Names of older verl, which a later one replaces."""
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model.gradient_checkpointing": (False, True), "model.lora_alpha": (32, 16),
    "data.train_batch_size": (1024, 1024), "data.max_prompt_length": (256, 512),
    "data.max_response_length": (512, 512), "eval.val_questions": (None, None),
    "rollout.max_turn_tokens": (512, 512), "rollout.max_obs_length": (512, 500),
    "rollout.max_turns": (10, 4), "rollout.max_num_seqs": (1024, 256), "rollout.top_p": (0.95, 1.0),
    "rollout.n": (1, 1), "rollout.temperature": (1.0, 1.0), "algorithm.name": ("ppo", "ppo"),
    "algorithm.kl_penalty": ("k1", "k1"), "algorithm.use_kl_in_reward": (True, False),
    "algorithm.kl_ctrl.kl_coef": (0.001, 0.001), "actor.clip_ratio": (0.2, 0.2),
    "actor.clip_ratio_c": (None, 3.0), "actor.entropy_coeff": (0.001, 0.0),
    "actor.kl_loss_coef": (0.001, 0.001), "actor.kl_loss_type": ("k3", "k3"),
    "actor.loss_agg_mode": ("token-mean", "token-mean"), "actor.mask_observations": (False, True),
    "actor.ppo_epochs": (1, 1), "actor.ppo_mini_batch_size": (256, 256), "actor.use_kl_loss": (False, False),
    "trainer.critic_warmup": (0, 0), "trainer.save_freq": (0, 0), "trainer.test_freq": (0, 0),
    "cluster.n_gpus_per_node": (8, 8), "cluster.strategy": ("fsdp", "fsdp"),
    "rollout.gpu_memory_utilization": (0.5, 0.5), "cluster.tensor_model_parallel_size": (2, 2),
}  # fmt: skip
"""What a file means that does not say it, by our keys: with Search-R1 and with verl. A key is here if we have
another default, or an algorithm of ours brings one."""
ONLY_SEARCH_R1 = (NAMES[SEARCH_R1].keys() - {key.facts.verl for key in keys()} - {f"{ROLLOUT}.n"}) | {
    "data.train_data_num", "algorithm.no_think_rl", "algorithm.state_masking.start_state_marker",
    "algorithm.state_masking.end_state_marker", "reward_model.structure_format_score",
    "reward_model.final_format_score", "reward_model.retrieval_score", "reranker.do_rerank",
    "reranker.url", "reranker.topk",
}  # fmt: skip
"""Keys that mark a configuration as Search-R1's."""
DROPPED = """
trainer.project_name trainer.experiment_name
trainer.default_* trainer.resume_* trainer.del_* trainer.remove_previous_*
trainer.max_critic_ckpt_to_keep custom_reward_function.* trainer.checkpoint_* trainer.esi_*
trainer.*_data_dir trainer.log_val_* trainer.total_epochs trainer.use_v1
trainer.v1.* trainer.device trainer.val_only data.* reward.* reward_model.* reranker.*
*.checkpoint.* *micro_batch_size* *use_dynamic_bsz *max_token_len_per_gpu *.rollout_n *.data_loader_seed
*.use_remove_padding *.grad_offload *.optim.total_training_steps *.optim.min_lr_ratio *.shuffle
*.optim.num_cycles
*.rollout.trace.* *.rollout.multi_turn.* *.rollout.agent.* *.rollout.mode *.rollout.*do_sample
*.rollout.val_kwargs.* *.rollout.ignore_eos *.rollout.*_length *.rollout.top_k *.rollout.calculate_log_probs
*.rollout.over_sample_rate *.rollout.skip_tokenizer_init *.rollout.load_format *.rollout.seed *.rollout.dtype
*.rollout.max_model_len *.rollout.max_num_batched_tokens *.hybrid_engine *.ref.strategy *.ref.*_offload
critic.enable critic.nccl_timeout critic.strategy critic.*_offload critic.model.*
ray_kwargs.ray_init.runtime_env.* ray_init.* transfer_queue.* skip.* distillation.* hydra.* hydra/*
algorithm.rollout_correction.* algorithm.filter_groups.* algorithm.state_masking.*
algorithm.no_think_rl sandbox_fusion.*
"""
"""Keys for what srl does itself: runs, checkpoints, questions, episodes, passes, rewards, starting verl."""
SECTIONS = (
    "actor_rollout_ref.", "critic.", "trainer.", "data.", "algorithm.", "ray_kwargs.", "global_profiler.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Imported:
    """The configuration as YAML (`text`), and the report, one sentence a line."""

    text: str
    report: tuple[str, ...]


@dataclass
class Conversion:
    """Their `settings` by dotted name, our keys so far (`ours`), the report (`notes`), and what is `used`.

    `program` is what the file's command runs, empty without one. `added` are the keys that a `+` adds.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    notes: list[str] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
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
    for name in [name for name, ours in names.items() if _is_mapping(ours)]:
        below = [key for key in theirs.settings if key.startswith(f"{name}.")]
        names |= {key: f"{names[name]}{key.removeprefix(name)}" for key in below}
    _resolve(theirs, path, names)
    theirs.ours = {key: pair[theirs.dialect == VERL] for key, pair in DEFAULTS.items()}
    for name, ours in names.items():
        if name in theirs.settings and (value := theirs.settings[name]) is not None:
            theirs.used.add(name)
            theirs.ours[ours] = _converted(path, name, ours, value)
    if not {key for key in theirs.settings if key in theirs.used or _is_dropped(key)}:
        raise UserError(f"{path}: no key of verl's or Search-R1's is in it")
    (_search_r1 if theirs.dialect == SEARCH_R1 else _verl)(theirs)
    _both(theirs)
    theirs.notes += _about_other_keys(theirs)
    report = tuple(" ".join(note.split()) for note in theirs.notes)
    head = (f"From {' '.join(path.name.split())}, a configuration of {theirs.dialect}'s.", *report)
    text = "".join(f"# {line}\n" for line in head) + "\n" + _yaml(theirs, path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file=file)
        except UserError as error:
            said = re.sub(rf"{re.escape(str(file))}(:\d+)?", "converted", str(error))
            raise UserError(f"{path}: {said}", key=error.key) from error
    return Imported(text, report)


def names_of(dialect: str) -> dict[str, str]:
    """Their keys and ours. Of several for one of ours the last one that is set counts."""
    of_table = {key.facts.verl: key.name for key in keys() if key.facts.verl}
    if dialect == SEARCH_R1:
        of_table.pop(f"{ACTOR}.clip_ratio_c")
    return {name: ours for name, ours in {**OLDER, **of_table, **NAMES[dialect]}.items() if ours}


def _is_mapping(ours: str) -> bool:
    """Whether a key of ours holds whatever keys a user writes."""
    kind, field = place(ours.split("."))
    return kind == "free" and field is not None


def _converted(path: Path, name: str, ours: str, value: Any) -> Any:
    """Our value of theirs, a path with `~` expanded. Raises UserError where we have nothing for it."""
    if isinstance(value, list):
        return [_at_home(part) for part in value]
    if isinstance(value, dict):
        return value
    table = {theirs: mine for mine, theirs in facts(ours).names.items()} | VALUES.get(ours, {})
    value = table.get(value, _at_home(value))
    annotation = getattr(place(ours.split("."))[1], "annotation", None)
    choices = list(get_args(annotation)) if get_origin(annotation) is Literal else []
    if ours == "algorithm.name":
        value, choices = str(value).removeprefix("srl_"), [each.name for each in installed("algorithm")]
    if choices and value not in choices:
        said = f"{path}: {name}={quoted(str(value))}: srl has {', '.join(map(str, choices))}"
        raise UserError(said, key=name)
    return value


def _at_home(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


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
        return _of_overrides(script.words, path, Conversion(program=script.program, notes=script.notes))
    tree = parse(text, str(path))
    if isinstance(tree, list):
        return _of_overrides(map(str, tree), path, Conversion())
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected sections with keys under them, or a list of overrides")
    if "format" in tree:
        raise UserError(f"{path} is a configuration of srl's own", hint=f"srl train --config {path}")
    theirs = Conversion(_flat({key: tree[key] for key in tree if key not in ("defaults", "hydra")}))
    bases = tree.get("defaults")
    if unread := [str(base) for base in bases if base != "_self_"] if isinstance(bases, list) else []:
        theirs.notes.append(f"the bases of the file are not read: {', '.join(unread)}")
    return theirs


def _of_overrides(words: Iterable[str], path: Path, theirs: Conversion) -> Conversion:
    for word in words:
        override = re.fullmatch(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)(?:=(.*))?", word, re.DOTALL)
        if override is None or (override[3] is None) != (override[1] == "~"):
            shown = word.replace(MARK, "")[:60]
            raise UserError(f"{path}: expected KEY=VALUE, found {shown!r}", hint=ECHO if MARK in word else "")
        settings = _flat({override[2]: read_value(override[3] or "", f"{path}: {word[:60]}")})
        theirs.settings |= settings
        theirs.added |= settings.keys() if "+" in override[1] else set()
    return theirs


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, without `???` (Hydra's mark for a missing value) and classes."""
    settings = ((".".join(path), value) for path, value in flat(tree))
    return {key: value for key, value in settings if value != "???" and not key.endswith("_target_")}


def read_value(text: str, name: str = "value") -> Any:
    """A value of Hydra's: true, false, null, a number, text, quoted text, or a list. Raises UserError."""
    text = text.strip()
    if text.lower() in ("true", "false", "null", ""):
        return {"true": True, "false": False}.get(text.lower())
    if number := re.fullmatch(r"[-+]?(\d+)|[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", text):
        return int(text) if number[1] else float(text)
    if text[0] not in "[{'\"" or MARK in text:
        return text
    value = parse(text, name)
    if any(isinstance(part, dict) and part for part in [value, *(value if isinstance(value, list) else [])]):
        raise UserError(f"{name}: a mapping is not read", hint="set each of its keys: NAME.KEY=VALUE")
    return value


def _resolve(theirs: Conversion, path: Path, names: Mapping[str, str]) -> None:
    """Put in references. What only a shell can tell is refused where it matters, else named."""
    settings, unread = theirs.settings, [key for key, value in theirs.settings.items() if MARK in str(value)]
    if needed := sorted(names.keys() & set(unread)):
        said = ", ".join(f"{key}={quoted(str(settings[key]).replace(MARK, ''))}" for key in needed)
        raise UserError(f"{path}: only a shell can tell {said}", key=needed[0], hint=f"write it, or {ECHO}")
    for key in unread:
        del settings[key]
    if unread:
        theirs.notes.append(f"not read, since only a shell can tell the value: {', '.join(unread)}")
    for key, value in list(settings.items()):
        try:
            settings[key] = resolved(value, key, settings)
        except LookupError as error:
            theirs.notes.append(f"ignored, {error.args[0]} is not defined: {key}")
            del settings[key]


_REFERENCE = re.compile(r"\$\{(?:oc\.(?P<of>env|select):)?(?P<name>[^${},:]*)(?:,(?P<otherwise>[^${}]*))?\}")


def resolved(value: Any, key: str, settings: Mapping[str, Any]) -> Any:
    """The value of `key` with `${a.b}`, `${oc.select:a.b,otherwise}` and `${oc.env:NAME,otherwise}` put in.

    Raises LookupError with a reference that leads nowhere, or in a circle.
    """
    if isinstance(value, list):
        return [resolved(part, key, settings) for part in value]
    for _ in range(10):  # references behind references; a circle has no end
        if not isinstance(value, str) or len(value) > 2**14 or not (found := _REFERENCE.search(value)):
            break
        name = found["name"].strip()
        if up := len(name) - len(name.lstrip(".")):  # leading dots count sections up from that of `key`
            name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
        if found["of"] != "env" and name in settings:
            held: Any = settings[name]
        elif found["of"] and found["otherwise"] is not None:
            held = read_value(found["otherwise"])
        else:
            raise LookupError(found[0][:60])
        around = value[: found.start()], value[found.end() :]
        value = f"{around[0]}{'' if held is None else held}{around[1]}" if any(around) else held
    if isinstance(value, str) and (rest := re.search(r"\$\{[^${}]*\}", value)):
        raise LookupError(rest[0][:60])
    return value


# What no single key says


def _search_r1(theirs: Conversion) -> None:
    """Search-R1's mini-batch counts episodes, ours questions with `rollout.n` episodes each. It has no dual
    clip, the KL is in the reward unless it is in the loss, and validation samples though it asks not to."""
    ours, notes = theirs.ours, theirs.notes
    batch, mini = ours["data.train_batch_size"], ours["actor.ppo_mini_batch_size"]
    n, epochs = ours["rollout.n"], ours["actor.ppo_epochs"]
    if (inner := theirs.get(f"{ROLLOUT}.n", 1)) != 1:
        notes.append(f"{ROLLOUT}.n={inner} is not read: n_agent counts the episodes of a question")
    if all(isinstance(number, int) and 0 < number < 2**20 for number in (batch, mini, n, epochs)):
        there, here = -(-batch * n // mini) * epochs, -(-batch // min(mini, batch)) * epochs
        if there != here:
            divisors = [size for size in range(1, batch + 1) if batch % size == 0]
            size = min(divisors, key=lambda size: abs(batch // size * epochs - there))
            notes.append(
                f"a mini-batch of {mini} is {mini} episodes in Search-R1 and {mini} questions × {n} episodes "
                f"in srl: {there} optimiser steps a rollout there, {here} here; "
                f"actor.ppo_mini_batch_size={size} gives {batch // size * epochs}"
            )
    ours["algorithm.use_kl_in_reward"] = ours["actor.use_kl_loss"] is not True
    if ours["actor.mask_observations"] is not True:
        notes.append("state_masking is off, so retrieved text is in the loss: actor.mask_observations=false")
    options = {"structure_score": "structure_format_score", "final_format_score": "final_format_score",
               "retrieval_score": "retrieval_score"}  # fmt: skip
    scores = {option: theirs.get(f"reward_model.{key}", 0) for option, key in options.items()}
    has_format = theirs.program == "main_ppo_format" or (not theirs.program and any(scores.values()))
    name = "format" if has_format else "em"
    ours["reward.weights"] = {name: 1.0}
    ours |= {f"reward.format.{option}": score for option, score in scores.items()} if has_format else {}
    notes.append(f"the reward is {name}, on the last answer that the policy wrote")


def _verl(theirs: Conversion) -> None:
    """An assistant's turns count the answer too, which ours do not; 0 is no limit."""
    ours, notes, turns = theirs.ours, theirs.notes, f"{ROLLOUT}.multi_turn"
    assistant, user = (theirs.get(f"{turns}.max_{who}_turns") for who in ("assistant", "user"))
    limits = [user, assistant - 1 if isinstance(assistant, int) else None]
    if limits := [limit for limit in limits if isinstance(limit, int) and limit > 0]:
        ours["rollout.max_turns"] = min(limits)
    ours["rollout.max_turn_tokens"] = ours["data.max_response_length"]
    tool = theirs.get(f"{turns}.tool_config_path")
    if tool or theirs.get(f"{turns}.enable") is True or theirs.get(f"{turns}.function_tool_path"):
        form, calls = theirs.get(f"{turns}.format", "hermes"), theirs.get(f"{turns}.max_parallel_calls", 1)
        ours |= {"rollout.protocol": "native", "rollout.max_calls": calls}
        ours["rollout.call_format"] = CALL_FORMATS.get(str(form), "auto")
        notes.append(
            "the policy calls tools as its chat template has them (rollout.protocol=native); prompts are "
            "those of the template tools, not the file's"
        )
        if form not in CALL_FORMATS:
            notes.append(f"{turns}.format={form}: srl reads {', '.join(CALL_FORMATS)}; auto may refuse it")
    why = f"{tool} is not read" if tool else "the source does not say what to search"
    notes.append(f"{why}: set search.url or search.index, or rollout.search=false")
    mode = theirs.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in get_args(LossMode):
        ours["actor.policy_loss.loss_mode"] = mode
    else:
        ours[f"verl.{ACTOR}.policy_loss.loss_mode"] = mode
        notes.append(f"the loss {mode} is verl's own: kept below verl:; without it the loss is PPO's")
    norm = theirs.get("algorithm.norm_adv_by_std_in_grpo")
    if norm is not None and ours["algorithm.name"] == "grpo":
        ours["algorithm.grpo.norm_adv_by_std_in_grpo"] = norm
    ours["reward.weights"] = {"em": 1.0}
    paths = [theirs.get(f"{section}custom_reward_function.path") for section in ("", "reward.")]
    path = paths[0] or paths[1]
    what = (
        f"{path} is not read; write a plugin (srl plugins new reward NAME)" if path else "it was the data's"
    )
    notes.append(f"the reward is em: {what}")
    if f"{ACTOR}.strategy" not in theirs.settings and any(".megatron." in key for key in theirs.settings):
        ours["cluster.strategy"] = "megatron"
    if ours["cluster.strategy"] == "megatron":
        for name in ("param_offload", "optimizer_offload"):  # one setting for all networks: the actor's
            if (offload := theirs.get(f"{ACTOR}.megatron.{name}")) is not None:
                ours[f"cluster.{name}"] = offload


def _both(theirs: Conversion) -> None:
    ours, notes = theirs.ours, theirs.notes
    samples = theirs.get(f"{ROLLOUT}.val_kwargs.do_sample") is True
    ours["eval.temperature"] = theirs.get(f"{ROLLOUT}.val_kwargs.temperature", 0.0) if samples else 0.0
    files = ours.get("data.val_files")
    files = [str(file) for file in (files if isinstance(files, list) else [files])]
    if tests := [file for file in files if "test" in PurePath(file).name]:
        notes.append(
            f"data.val_files={', '.join(tests)}: test questions would choose the checkpoint; set others "
            "aside for validation and move these to data.test_files"
        )
    epochs = theirs.get("trainer.total_epochs")
    if "trainer.total_training_steps" not in ours:
        notes.append(
            f"{epochs or 30} epochs: srl counts steps; set trainer.total_training_steps to epochs × "
            f"questions / {ours['data.train_batch_size']} (until then it is 30)"
        )
    ours.setdefault("critic.ppo_mini_batch_size", ours["actor.ppo_mini_batch_size"])
    policy, path = theirs.get("actor_rollout_ref.model.path"), theirs.get("critic.model.path")
    has_critic = algorithm_plugin(ours["algorithm.name"]).needs_critic
    if has_critic and path not in (None, policy):
        notes.append(f"critic.model.path={path} is not read: the critic starts from the policy")
    if not has_critic:
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
    for key in ("model.path", "data.train_files", "data.val_files"):
        if not ours.get(key):
            notes.append(f"the file sets no {key}: the default is that of the made-up world")


def _about_other_keys(theirs: Conversion) -> list[str]:
    """What becomes of each key that nothing has read; what verl alone has goes below `verl:`."""
    usual = _verls_defaults(theirs)
    alike = {name.rpartition(".")[2]: name for name in (*names_of(VERL), *ONLY_SEARCH_R1)}
    fates: dict[str, list[str]] = {}
    for key, value in theirs.settings.items():
        if key in theirs.used:
            continue
        last = key.rpartition(".")[2]
        if _is_dropped(key) or (key in usual and usual[key] == value):
            fate = "left out, since srl does this itself or verl by default"
        elif last in alike and key not in usual:
            fate, key = "ignored, though named like another key", f"{key} ({alike[last]})"
        elif key in theirs.added or (key in usual if usual else key.startswith(SECTIONS)):
            fate = "kept below verl:, read only with --backend verl"
            theirs.ours[f"verl.{'+' * (key in theirs.added and key not in usual)}{key}"] = value
        else:
            fate = "ignored, unknown to srl and to verl 0.9.1"
        fates.setdefault(fate, []).append(key)
    return [f"{fate}: {', '.join(names)}" for fate, names in sorted(fates.items())]


def _is_dropped(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in DROPPED.split())


def _verls_defaults(theirs: Conversion) -> dict[str, Any]:
    """verl's defaults under these settings, where verl is installed; empty without it."""
    shipped = _shipped("_megatron" if theirs.ours["cluster.strategy"] == "megatron" else "")
    known, defaults = {**shipped, **theirs.settings}, dict(shipped)
    for key, value in shipped.items():
        try:
            defaults[key] = resolved(value, key, known)
        except LookupError:
            continue
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


def _yaml(theirs: Conversion, path: Path) -> str:
    """No preset is below an imported file, and no fine-tuning before it."""
    tree: dict[str, Any] = {"format": FORMAT, "extends": None}
    for key, value in ({"sft.steps": 0} | theirs.ours).items():
        node, (*outer, last) = tree, key.split(".")
        for part in outer:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"{path}: {key}: {part} is set to {node!r:.60} and cannot hold keys", key=key)
        node[last] = plain(value)
    return dump(tree)
