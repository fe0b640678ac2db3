"""What a setting means differently in srl than in verl or Search-R1, and what has no equivalent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, get_args

from srl.config.cross_checks import algorithm_plugin
from srl.config.sections import Rollout, Trainer
from srl.train.importing.key_table import CORRECTION, SEARCH_R1, VERL, defaults_of
from srl.train.importing.source import Source

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
_MULTI_TURN = f"{ROLLOUT}.multi_turn"
_VALIDATION = f"{ROLLOUT}.val_kwargs"


@dataclass
class Conversion:
    """A source, our keys so far (`ours`), notes for the user, and which keys are dealt with (`used`)."""

    source: Source
    ours: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def given(self, key: str) -> Any:
        """The value of their key, None where the source does not set it; the key counts as dealt with."""
        self.used.add(key)
        return self.source.settings.get(key)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of their key, else its default there; the key counts as dealt with."""
        value = self.given(key)
        return defaults_of(self.source.dialect).get(key, default) if value is None else value

    def note(self, *parts: str) -> None:
        """Add one sentence, in parts."""
        self.notes.append("".join(parts))

    @property
    def has_critic(self) -> bool:
        return algorithm_plugin(self.ours["algorithm.name"]).needs_critic


def adjust(conversion: Conversion) -> None:
    """Set what no single key says, and note every difference."""
    conversion.notes += conversion.source.notes
    dialect = conversion.source.dialect
    for rule in (*(_SEARCH_R1_RULES if dialect == SEARCH_R1 else _VERL_RULES), *_RULES):
        rule(conversion)
    for only, key, unremarkable, sentence in _REMARKS:
        if only in (None, dialect) and (value := conversion.given(key)) not in unremarkable:
            conversion.note(sentence.format(key=key, value=value))


_DECAYS = "{key} has no equivalent: the learning rate decays to 0"
_MASK = "{key} has no equivalent: the mask follows who wrote a token, not tags"
_REWARD_MODEL = "a reward model has no equivalent: rewards are plugins"
_ALL_QUESTIONS = "{key} has no equivalent: all questions of data.train_files are used"
_LAST_BATCH = "validation in Search-R1 drops an incomplete last batch; srl asks all questions"
_VALIDATES = "{key}: the command only validates, as srl eval does; the imported file trains"
_PADDING = "use_remove_padding: in srl, model.attn_implementation=flash_attention_2 removes padding"
_CHARACTERS = (
    "max_tool_response_length={value} counts characters; set rollout.max_obs_length, in tokens (500)"
)
_GROUPS = (
    "algorithm.filter_groups is not converted; set algorithm.filter_groups.enable=true to replace groups"
)
_LONG_PROMPT = (
    "{key}={value}: srl truncates no prompt; one that is too long is an error, or left out with "
    "data.filter_overlong_prompts=true"
)
_REMARKS: tuple[tuple[str | None, str, tuple[Any, ...], str], ...] = (
    (None, f"{ROLLOUT}.top_k", (None, -1, 0), "{key}={value} has no equivalent: it is not applied"),
    (None, f"{ACTOR}.optim.min_lr_ratio", (None, 0), _DECAYS),
    (None, "critic.optim.min_lr_ratio", (None, 0), _DECAYS),
    (None, "trainer.val_only", (None, False), _VALIDATES),
    (None, "actor_rollout_ref.model.use_remove_padding", (None, False), _PADDING),
    (SEARCH_R1, "data.val_batch_size", (None, 0, False), _LAST_BATCH),
    (SEARCH_R1, "data.train_data_num", (None,), _ALL_QUESTIONS),
    (SEARCH_R1, "algorithm.no_think_rl", (None, False), "{key} has no equivalent (Search-R1 ends the run)"),
    (SEARCH_R1, "algorithm.state_masking.start_state_marker", (None, "<information>"), _MASK),
    (SEARCH_R1, "algorithm.state_masking.end_state_marker", (None, "</information>"), _MASK),
    (
        SEARCH_R1,
        "trainer.total_training_steps",
        (None,),
        "{key}={value}: srl trains all, Search-R1 one fewer",
    ),
    (VERL, f"{_VALIDATION}.n", (None, 1), "{key}={value} has no equivalent: a question is asked once"),
    (VERL, f"{_MULTI_TURN}.max_tool_response_length", (None,), _CHARACTERS),
    (VERL, "algorithm.filter_groups.enable", (None, False), _GROUPS),
    (VERL, "data.truncation", (None, "error"), _LONG_PROMPT),
    (VERL, "data.prompt_key", (None, "prompt"), "{key}={value}: srl reads the column prompt"),
    (VERL, "data.train_max_samples", (None, -1), _ALL_QUESTIONS),
    (VERL, "reward_model.enable", (None, False), _REWARD_MODEL),
    (VERL, "reward.reward_model.enable", (None, False), _REWARD_MODEL),
    (
        VERL,
        "actor_rollout_ref.model.trust_remote_code",
        (None, False),
        "{key} is kept: the model's code will run",
    ),
)
"""Keys that are only remarked on: dialect (None: both), key, the values that need no remark, the sentence."""


def _test_files(conversion: Conversion) -> None:
    files = conversion.ours.get("data.val_files")
    every = files if isinstance(files, list) else [files]
    tests = [str(file) for file in every if "test" in PurePath(str(file)).name]
    if tests:
        conversion.note(
            f"data.val_files={', '.join(tests)}: these look like test questions, and would choose the ",
            "checkpoint; set other questions aside for validation and move these to data.test_files",
        )


def _length_of_run(conversion: Conversion) -> None:
    epochs = conversion.given("trainer.total_epochs")
    if "trainer.total_training_steps" not in conversion.ours:
        conversion.note(
            f"{epochs or 30} epochs: srl counts steps only; set trainer.total_training_steps to epochs × ",
            f"questions / {conversion.ours['data.train_batch_size']} (until then it is 30)",
        )
    elif epochs:
        dialect = conversion.source.dialect
        conversion.note(f"total_epochs={epochs} may end a run earlier in {dialect}; srl counts steps only")
    if conversion.ours["trainer.save_freq"] == 0:
        conversion.note("the source saves no checkpoints; srl still saves the last step")


def _warm_ups(conversion: Conversion) -> None:
    """The warm-up of the learning rates, and the steps in which only the critic learns."""
    first, critic_only = conversion.ours["trainer.critic_warmup"], 0
    if isinstance(first, int) and first > 0:
        critic_only = conversion.ours["trainer.critic_warmup"] = first - 1
        conversion.note(
            f"trainer.critic_warmup={first} trains only the critic for {critic_only} steps: in srl that is ",
            f"critic_warmup={critic_only}",
        )
    total = conversion.ours.get("trainer.total_training_steps")
    for role in ("actor", "critic") if conversion.has_critic else ("actor",):
        ratio = conversion.ours.get(f"{role}.optim.lr_warmup_steps_ratio")
        steps = conversion.ours.get(f"{role}.optim.lr_warmup_steps")
        if isinstance(ratio, float) and ratio > 0 and not steps and isinstance(total, int):
            trained = max(0, total - critic_only) if role == "actor" else total
            conversion.note(
                f"{role}.optim: a warm-up ratio of {ratio} is {int(ratio * total)} of {total} steps in ",
                f"{conversion.source.dialect}, starting at a learning rate of 0, and ",
                f"{round(ratio * trained)} in srl, starting above 0",
            )


def _loggers(conversion: Conversion) -> None:
    given = conversion.given("trainer.logger")
    if given is None:
        return
    known = get_args(get_args(Trainer.model_fields["logger"].annotation)[0])
    wanted = given if isinstance(given, list) else [given]
    conversion.ours["trainer.logger"] = [name for name in wanted if name in known]
    if foreign := [str(name) for name in wanted if name not in known]:
        conversion.note(f"trainer.logger has no {', '.join(foreign)}; it has {', '.join(known)}")


def _critic(conversion: Conversion) -> None:
    """The critic follows the actor where nothing else is set, and starts from the policy."""
    for key in ("ppo_mini_batch_size", "ppo_epochs"):
        conversion.ours.setdefault(f"critic.{key}", conversion.ours[f"actor.{key}"])
    path = conversion.given("critic.model.path")
    if conversion.has_critic and path not in (None, conversion.given("actor_rollout_ref.model.path")):
        conversion.note(f"critic.model.path={path} has no equivalent: the critic starts from the policy")


def _offloads(conversion: Conversion) -> None:
    """srl has one setting for all networks: the actor's."""
    for kind in ("param_offload", "optimizer_offload"):
        megatron = conversion.given(f"{ACTOR}.megatron.{kind}")
        if megatron is not None and conversion.ours["cluster.strategy"] == "megatron":
            conversion.ours[f"cluster.{kind}"] = megatron
        for section in ("critic.model.fsdp_config", "critic.fsdp", "critic.megatron"):
            value = conversion.given(f"{section}.{kind}")
            if conversion.has_critic and value not in (None, conversion.ours[f"cluster.{kind}"]):
                conversion.note(f"{section}.{kind}={value} differs from the actor's, which srl uses for both")
        of_reference = f"actor_rollout_ref.ref.fsdp_config.{kind}"
        if conversion.source.settings.get(of_reference) == conversion.ours[f"cluster.{kind}"]:
            conversion.used.add(of_reference)


def _shortest_answer(conversion: Conversion) -> None:
    """The tokens kept for an answer are no more than a turn may have."""
    turn = conversion.ours.get("rollout.max_turn_tokens")
    if isinstance(turn, int) and turn < Rollout().min_answer_tokens:
        conversion.ours["rollout.min_answer_tokens"] = turn


def _missing(conversion: Conversion) -> None:
    for key in ("model.path", "data.train_files", "data.val_files"):
        if not conversion.ours.get(key):
            conversion.note(f"the file sets no {key}: the default is that of the made-up world")


def _importance_weights(conversion: Conversion) -> None:
    if f"{CORRECTION}.rollout_is" not in conversion.ours:
        conversion.note(
            "tokens are weighted by truncated importance sampling where the sampler is not the trainer, as ",
            f"with vLLM: {CORRECTION}.rollout_is=off switches it off",
        )


_RULES: tuple[Callable[[Conversion], None], ...] = (
    _test_files, _length_of_run, _warm_ups, _loggers, _critic, _offloads, _shortest_answer, _missing,
    _importance_weights,
)  # fmt: skip

# Search-R1

_FORMAT_SCORES = {
    "structure_format_score": "structure_score",
    "final_format_score": "final_format_score",
    "retrieval_score": "retrieval_score",
}
"""Keys of Search-R1's `reward_model`, and the options of our reward `format`."""


def _mini_batch_of_episodes(conversion: Conversion) -> None:
    """Search-R1's mini-batch counts episodes, ours counts questions, each with `rollout.n` episodes."""
    value = conversion.value
    batch, mini = value("data.train_batch_size"), value(f"{ACTOR}.ppo_mini_batch_size")
    n, inner = value(f"{ROLLOUT}.n_agent"), value(f"{ROLLOUT}.n", 1)
    epochs = value(f"{ACTOR}.ppo_epochs")
    if not all(isinstance(each, int) and each > 0 for each in (batch, mini, n, inner, epochs)):
        return
    theirs, ours = -(-batch * n // mini) * epochs, -(-batch // min(mini, batch)) * epochs
    if inner > 1:
        conversion.note(f"{ROLLOUT}.n={inner}: only n_agent counts the episodes of a question in srl: {n}")
    if theirs != ours:
        conversion.note(
            f"a mini-batch of {mini} is {mini} episodes in Search-R1 and {mini} questions × {n} episodes in ",
            f"srl: {theirs} optimiser steps a rollout in Search-R1, {ours} in srl",
            _nearest(batch, epochs, theirs, ours),
        )


def _nearest(batch: int, epochs: int, theirs: int, ours: int) -> str:
    """The mini-batch size that divides the batch and comes nearest to as many optimiser steps as `theirs`."""
    if batch > 2**20:
        return ""
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    size = min(divisors, key=lambda size: abs(batch // size * epochs - theirs))
    steps = batch // size * epochs
    return f"; actor.ppo_mini_batch_size={size} gives {steps}" if steps != ours else ""


def _greedy_validation(conversion: Conversion) -> None:
    conversion.ours["eval.temperature"] = 0.0
    temperature, top_p = conversion.ours["rollout.temperature"], conversion.ours["rollout.top_p"]
    conversion.note(
        "validation is greedy in srl; Search-R1 asks for greedy but samples, at temperature ",
        f"{temperature} and top_p {top_p}: eval.temperature={temperature} gives comparable numbers",
    )


def _top_p_and_groups(conversion: Conversion) -> None:
    top_p = conversion.ours["rollout.top_p"]
    if isinstance(top_p, int | float) and top_p < 1:
        by_default = "" if f"{ROLLOUT}.top_p" in conversion.source.settings else ", Search-R1's default,"
        conversion.note(
            f"top_p {top_p}{by_default} is kept: tokens are sampled from a truncated distribution, while ",
            "log-probs are of the whole one; rollout.top_p=1.0 makes them agree",
        )
    if conversion.ours["rollout.n"] != 1:
        conversion.note(
            "a group is the episodes of one question in srl; in Search-R1 it is those of one row number, ",
            "which rows of two data sets may share",
        )


def _mask(conversion: Conversion) -> None:
    if conversion.ours["actor.mask_observations"] is True:
        conversion.note(
            "state_masking keeps retrieved text out of the policy loss in Search-R1; in srl it is kept out ",
            "of advantages, whitening, values and returns too",
        )
    else:
        conversion.note(
            "state_masking is off, so retrieved text is in the loss too: actor.mask_observations=false"
        )


def _lengths(conversion: Conversion) -> None:
    """The turns of an episode, and how long a prompt, a turn, a search result and an episode may be."""
    turns, seen = conversion.value("max_turns"), conversion.value("data.max_obs_length")
    start, room = conversion.value("data.max_start_length"), conversion.value("data.max_prompt_length")
    turn = conversion.value("data.max_response_length")
    conversion.note(
        f"max_turns={turns} means the same: {turns} turns may search and one more may only answer"
    )
    conversion.note(
        f"data.max_start_length={start} is data.max_prompt_length in srl (a longer prompt is cut at its ",
        f"beginning in Search-R1 and an error in srl), data.max_response_length={turn} is ",
        f"rollout.max_turn_tokens, data.max_prompt_length={room} is data.max_response_length",
    )
    if not all(isinstance(value, int) for value in (turns, seen, turn, room)):
        return
    if turn > room:
        conversion.ours["rollout.max_turn_tokens"] = room
        conversion.note(f"rollout.max_turn_tokens={room}: a turn cannot be longer than an episode")
    if (longest := (turns + 1) * turn + turns * seen) > room:
        conversion.note(
            f"{turns} turns of {turn} + {seen} tokens and an answer of {turn} are {longest} tokens, more ",
            f"than {room}: in Search-R1 the policy then no longer sees the question and is not trained on ",
            "the end; in srl the episode ends and nothing is cut",
        )


def _loss_of_search_r1(conversion: Conversion) -> None:
    conversion.ours["actor.clip_ratio_c"] = None
    conversion.ours["actor.loss_agg_mode"] = "token-mean"
    conversion.ours["algorithm.use_kl_in_reward"] = conversion.value(f"{ACTOR}.use_kl_loss") is not True
    conversion.note(
        "the loss is a mean over the tokens of each micro-batch in Search-R1, of the mini-batch in srl"
    )


def _reward_of_search_r1(conversion: Conversion) -> None:
    program = conversion.source.program
    scores = {ours: conversion.value(f"reward_model.{key}", 0) for key, ours in _FORMAT_SCORES.items()}
    reads_scores = program == "main_ppo_format" or (not program and any(scores.values()))
    name = "format" if reads_scores else "em"
    conversion.ours["reward.weights"] = {name: 1.0}
    if reads_scores:
        conversion.ours |= {f"reward.format.{option}": score for option, score in scores.items()}
    elif any(scores.values()):
        conversion.note(f"{program} does not read the format scores: only exact match counts, in srl too")
    conversion.note(
        f"the reward is {name}, on the last answer that the policy wrote; Search-R1 also finds answers in ",
        "the example of the prompt and in passages",
    )


_SEARCH_R1_RULES: tuple[Callable[[Conversion], None], ...] = (
    _mini_batch_of_episodes, _greedy_validation, _top_p_and_groups, _mask, _lengths,
    _loss_of_search_r1, _reward_of_search_r1,
)  # fmt: skip

# verl


def _mini_batch_of_questions(conversion: Conversion) -> None:
    batch = conversion.value("data.train_batch_size")
    mini, n = conversion.value(f"{ACTOR}.ppo_mini_batch_size"), conversion.value(f"{ROLLOUT}.n")
    if isinstance(batch, int) and isinstance(mini, int) and 0 < mini < batch:
        conversion.note(
            f"a mini-batch of {mini} is {mini} questions × {n} episodes in verl and srl: ",
            f"{batch // mini} optimiser steps a rollout in both, times ppo_epochs",
        )


def _sampled_validation(conversion: Conversion) -> None:
    samples = conversion.given(f"{_VALIDATION}.do_sample") is True
    temperature = conversion.given(f"{_VALIDATION}.temperature") or 0.0
    conversion.ours["eval.temperature"] = temperature if samples else 0.0
    if temperature and not samples:
        conversion.note(
            f"{_VALIDATION}.temperature={temperature} is not used, since do_sample is false; verl's agent "
            f"loops sample with it nevertheless: set eval.temperature={temperature} for that"
        )
    top_p = conversion.given(f"{_VALIDATION}.top_p")
    if samples and top_p not in (None, 1):
        conversion.note(f"{_VALIDATION}.top_p={top_p} has no equivalent: validation samples from all tokens")


def _multi_turn(conversion: Conversion) -> None:
    assistant = conversion.given(f"{_MULTI_TURN}.max_assistant_turns")
    user = conversion.given(f"{_MULTI_TURN}.max_user_turns")
    if isinstance(assistant, int) and assistant > 0:
        conversion.ours["rollout.max_turns"] = assistant - 1
        conversion.note(
            f"max_assistant_turns={assistant} counts the answer too: rollout.max_turns={assistant - 1}, ",
            "and one more turn to answer",
        )
    if isinstance(user, int) and user > 0:  # 0 is no limit in verl
        conversion.ours["rollout.max_turns"] = min(user, conversion.ours.get("rollout.max_turns", user))
    conversion.ours["rollout.max_turn_tokens"] = conversion.value("data.max_response_length")
    conversion.note(
        "in verl a turn may be as long as an episode; rollout.max_turn_tokens can limit it in srl"
    )


def _search_server(conversion: Conversion) -> None:
    tool = conversion.given(f"{_MULTI_TURN}.tool_config_path")
    if tool is not None:
        conversion.note(f"the tool configuration {tool} is not read: set search.url to its server")
    else:
        conversion.note(
            "the source does not say what to search: set search.url or search.index, or rollout.search=false"
        )


def _clips(conversion: Conversion) -> None:
    """Keys that verl 0.9.1 ignores in favour of others, and older versions read."""
    for role, ours in {ACTOR: "actor", "critic": "critic"}.items():
        clip, other = conversion.given(f"{role}.grad_clip"), conversion.given(f"{role}.optim.clip_grad")
        if other is not None:
            conversion.ours[f"{ours}.grad_clip"] = other
        if clip not in (None, 1, other):
            conversion.note(
                f"{role}.grad_clip={clip}: verl 0.9.1 reads {role}.optim.clip_grad, "
                f"{1.0 if other is None else other}; srl uses {conversion.ours[f'{ours}.grad_clip']}"
            )
    clip = conversion.given(f"{ACTOR}.clip_ratio")
    ends = [conversion.given(f"{ACTOR}.clip_ratio_{end}") for end in ("low", "high")]
    if clip not in (None, 0.2) and None in ends:
        conversion.note(
            f"clip_ratio={clip} is used in srl; verl 0.9.1 reads clip_ratio_low and clip_ratio_high, ",
            "0.2 each where they are not set",
        )


def _loss_of_verl(conversion: Conversion) -> None:
    mode = conversion.given(f"{ACTOR}.policy_loss.loss_mode")
    if mode in ("gspo", "cispo"):
        conversion.ours["actor.policy_loss.loss_mode"] = mode
    elif mode not in (None, "vanilla"):
        conversion.ours[f"verl.{ACTOR}.policy_loss.loss_mode"] = mode
        conversion.note(
            f"the loss {mode} is verl's own: kept below verl:; without --backend verl the loss is PPO's"
        )
    norm = conversion.given("algorithm.norm_adv_by_std_in_grpo")
    if norm is not None and conversion.ours["algorithm.name"] == "grpo":
        conversion.ours["algorithm.grpo.norm_adv_by_std_in_grpo"] = norm


def _reward_of_verl(conversion: Conversion) -> None:
    conversion.ours["reward.weights"] = {"em": 1.0}
    paths = [conversion.given(f"{section}custom_reward_function.path") for section in ("", "reward.")]
    if path := paths[0] or paths[1]:
        conversion.note(
            f"the reward function in {path} is not read: make it a plugin (srl plugins new reward NAME); ",
            "until then the reward is em",
        )
    else:
        conversion.note("the reward is em; verl chooses it by the data_source of each row")


_VERL_RULES: tuple[Callable[[Conversion], None], ...] = (
    _mini_batch_of_questions, _sampled_validation, _multi_turn, _search_server, _clips, _loss_of_verl,
    _reward_of_verl,
)  # fmt: skip
