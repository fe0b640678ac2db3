"""What a setting means differently here than in verl or Search-R1, and what cannot be carried over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, get_args

from srl.config.checks import algorithm_plugin
from srl.config.sections import Rollout, Trainer
from srl.train.importing.key_table import SEARCH_R1, defaults_of
from srl.train.importing.source import Source

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Meaning:
    """A source, our keys so far, the sentences about changes, and the keys there that are dealt with."""

    source: Source
    ours: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def theirs(self, key: str, otherwise: Any = None) -> Any:
        """The value of their key, its default there where it is not given; it counts as dealt with."""
        value = self.given(key)
        return defaults_of(self.source.dialect).get(key, otherwise) if value is None else value

    def given(self, key: str) -> Any:
        """The value of their key where the source has one, else None; it counts as dealt with."""
        self.used.add(key)
        return self.source.settings.get(key)

    def say(self, *parts: str) -> None:
        """One sentence, in parts."""
        self.changes.append("".join(parts))

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm learns from a critic."""
        return algorithm_plugin(self.ours["algorithm.name"]).needs_critic


def adjust(meaning: Meaning) -> None:
    """Set what no single key says, and say what changes."""
    meaning.changes += meaning.source.notes
    for part in SEARCH_R1_PARTS if meaning.source.dialect == SEARCH_R1 else VERL_PARTS:
        part(meaning)
    for part in _PARTS:
        part(meaning)


def _test_files(meaning: Meaning) -> None:
    files = meaning.ours.get("data.val_files")
    every = files if isinstance(files, list) else [files]
    tests = [str(file) for file in every if "test" in PurePath(str(file)).name]
    if tests:
        meaning.say(
            f"data.val_files={', '.join(tests)}: by the name these are test questions, and they choose ",
            "checkpoints there; set other questions aside for validation and move these to data.test_files",
        )


def _length_of_run(meaning: Meaning) -> None:
    epochs = meaning.given("trainer.total_epochs")
    if "trainer.total_training_steps" not in meaning.ours:
        meaning.say(
            f"{epochs or 30} epochs are no number of steps: set trainer.total_training_steps to epochs × ",
            f"questions / {meaning.ours['data.train_batch_size']}; until then it is 30",
        )
    elif epochs:
        meaning.say(f"total_epochs={epochs} may end a run earlier there; here the steps alone count")
    if meaning.given("trainer.val_only") is True:
        meaning.say("trainer.val_only: the command only validates, as srl eval does; this file trains")
    if meaning.ours["trainer.save_freq"] == 0:
        meaning.say("no checkpoints are asked for; here the last step is saved all the same")


def _warm_ups(meaning: Meaning) -> None:
    """The first steps of the learning rate, and those of the critic alone."""
    first, alone = meaning.ours["trainer.critic_warmup"], 0
    if isinstance(first, int) and first > 0:
        alone = meaning.ours["trainer.critic_warmup"] = first - 1
        meaning.say(f"trainer.critic_warmup={first} leaves the critic {alone} steps alone there and here")
    total = meaning.ours.get("trainer.total_training_steps")
    for role in ("actor", "critic") if meaning.has_critic else ("actor",):
        ratio = meaning.ours.get(f"{role}.optim.lr_warmup_steps_ratio")
        steps = meaning.ours.get(f"{role}.optim.lr_warmup_steps")
        if isinstance(ratio, float) and ratio > 0 and not steps and isinstance(total, int):
            learned = max(0, total - alone) if role == "actor" else total
            meaning.say(
                f"{role}.optim: a warm-up of {ratio} is {int(ratio * total)} of {total} steps there and ",
                f"{round(ratio * learned)} here; it begins with a learning rate of 0 there and above 0 here",
            )


def _loggers(meaning: Meaning) -> None:
    given = meaning.given("trainer.logger")
    if given is None:
        return
    known = get_args(get_args(Trainer.model_fields["logger"].annotation)[0])
    wanted = given if isinstance(given, list) else [given]
    meaning.ours["trainer.logger"] = [name for name in wanted if name in known]
    if foreign := [str(name) for name in wanted if name not in known]:
        meaning.say(f"trainer.logger has nothing like {', '.join(foreign)}; it has {', '.join(known)}")


def _critic(meaning: Meaning) -> None:
    """The critic follows the actor where nothing else is said, and starts from the policy."""
    for key in ("ppo_mini_batch_size", "ppo_epochs"):
        meaning.ours.setdefault(f"critic.{key}", meaning.ours[f"actor.{key}"])
    path = meaning.given("critic.model.path")
    if meaning.has_critic and path not in (None, meaning.given("actor_rollout_ref.model.path")):
        meaning.say(f"critic.model.path={path} has nothing like it: the critic starts from the policy")


def _offloads(meaning: Meaning) -> None:
    """One setting for all networks here; that of the actor's engine counts."""
    for kind in ("param_offload", "optimizer_offload"):
        megatron = meaning.given(f"{ACTOR}.megatron.{kind}")
        if megatron is not None and meaning.ours["cluster.strategy"] == "megatron":
            meaning.ours[f"cluster.{kind}"] = megatron
        for section in ("critic.model.fsdp_config", "critic.fsdp", "critic.megatron"):
            value = meaning.given(f"{section}.{kind}")
            if meaning.has_critic and value not in (None, meaning.ours[f"cluster.{kind}"]):
                meaning.say(f"{section}.{kind}={value} differs from the actor's, which holds for both here")
        of_reference = f"actor_rollout_ref.ref.fsdp_config.{kind}"
        if meaning.source.settings.get(of_reference) == meaning.ours[f"cluster.{kind}"]:
            meaning.used.add(of_reference)


def _shortest_answer(meaning: Meaning) -> None:
    """Room for an answer is no more than a turn may have."""
    turn = meaning.ours.get("rollout.max_turn_tokens")
    if isinstance(turn, int) and turn < Rollout().min_answer_tokens:
        meaning.ours["rollout.min_answer_tokens"] = turn


def _lacking(meaning: Meaning) -> None:
    for key in ("model.path", "data.train_files", "data.val_files"):
        if not meaning.ours.get(key):
            meaning.say(f"the file gives no {key}: without one it is the tiny world's")
    top_k = meaning.given(f"{ROLLOUT}.top_k")
    if top_k not in (None, -1, 0):
        meaning.say(f"{ROLLOUT}.top_k={top_k} has nothing like it: sampling is from all tokens")
    if meaning.given("actor_rollout_ref.model.use_remove_padding") is True:
        meaning.say("use_remove_padding: here model.attn_implementation=flash_attention_2 leaves padding out")
    if meaning.ours.get("model.trust_remote_code") is True:
        meaning.say("trust_remote_code is kept: code that comes with the model will run")
    for role in (ACTOR, "critic"):
        if meaning.given(f"{role}.optim.min_lr_ratio") not in (None, 0):
            meaning.say(f"{role}.optim.min_lr_ratio has nothing like it: the learning rate falls to 0")


_PARTS: tuple[Callable[[Meaning], None], ...] = (
    _test_files,
    _length_of_run,
    _warm_ups,
    _loggers,
    _critic,
    _offloads,
    _shortest_answer,
    _lacking,
)


_SCORES = {
    "structure_format_score": "structure_score",
    "final_format_score": "final_format_score",
    "retrieval_score": "retrieval_score",
}
"""Keys of its `reward_model`, and the options of the reward format."""


def _search_r1_optimiser_steps(meaning: Meaning) -> None:
    """Its mini-batch counts episodes; ours counts questions, each with its rollout.n episodes."""
    batch, mini = meaning.theirs("data.train_batch_size"), meaning.theirs(f"{ACTOR}.ppo_mini_batch_size")
    n, inner = meaning.theirs(f"{ROLLOUT}.n_agent"), meaning.theirs(f"{ROLLOUT}.n", 1)
    epochs = meaning.theirs(f"{ACTOR}.ppo_epochs")
    if not all(isinstance(value, int) and value > 0 for value in (batch, mini, n, inner, epochs)):
        return
    there, here = -(-batch * n // mini) * epochs, -(-batch // min(mini, batch)) * epochs
    if inner > 1:
        meaning.say(f"{ROLLOUT}.n={inner}: only n_agent counts the episodes of a question here: {n}")
    if there != here:
        meaning.say(
            f"a mini-batch of {mini} is {mini} episodes there and {mini} questions × {n} episodes here: ",
            f"{there} optimiser steps a rollout there, {here} here{_nearer(batch, epochs, there, here)}",
        )


def _nearer(batch: int, epochs: int, there: int, here: int) -> str:
    """Which mini-batch that divides the batch comes nearest to as many steps as `there`."""
    if batch > 2**20:
        return ""
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    size = min(divisors, key=lambda size: abs(batch // size * epochs - there))
    steps = batch // size * epochs
    return f"; actor.ppo_mini_batch_size={size} gives {steps}" if steps != here else ""


def _search_r1_validation(meaning: Meaning) -> None:
    meaning.ours["eval.temperature"] = 0.0
    temperature, top_p = meaning.ours["rollout.temperature"], meaning.ours["rollout.top_p"]
    meaning.say(
        "validation is greedy here; there it is asked for greedy and samples all the same, at temperature ",
        f"{temperature} and top_p {top_p}: for numbers like theirs set eval.temperature={temperature}",
    )
    if meaning.given("data.val_batch_size"):
        meaning.say("validation leaves out what does not fill a last batch there; here all are asked")
    if meaning.given("data.train_data_num") is not None:
        meaning.say("data.train_data_num has nothing like it: all questions of data.train_files are used")


def _sampling(meaning: Meaning) -> None:
    top_p = meaning.ours["rollout.top_p"]
    if isinstance(top_p, int | float) and top_p < 1:
        by_default = "" if f"{ROLLOUT}.top_p" in meaning.source.settings else ", the default there,"
        meaning.say(
            f"top_p {top_p}{by_default} is kept: tokens are drawn from fewer than the log-probs are of; ",
            "rollout.top_p=1.0 samples what is trained",
        )
    if meaning.ours["rollout.n"] != 1:
        meaning.say(
            "a group is the episodes of one question here; there it is those of one row number, which ",
            "rows of two data sets may share",
        )


def _mask(meaning: Meaning) -> None:
    if meaning.ours["actor.mask_observations"] is True:
        meaning.say(
            "state_masking leaves what was retrieved out of the policy's loss there; here it is out of ",
            "advantages, whitening, values and returns too",
        )
    else:
        meaning.say(
            "state_masking is off, so the loss is over what was retrieved too: actor.mask_observations=false"
        )
    for end in ("start", "end"):
        key = f"algorithm.state_masking.{end}_state_marker"
        if meaning.given(key) not in (None, f"<{'/' * (end == 'end')}information>"):
            meaning.say(f"{key} has nothing like it: the mask goes by who wrote a token, not by tags")


def _lengths(meaning: Meaning) -> None:
    start, room = meaning.theirs("data.max_start_length"), meaning.theirs("data.max_prompt_length")
    turn = meaning.theirs("data.max_response_length")
    meaning.say(
        f"data.max_start_length={start} is data.max_prompt_length here (a longer prompt loses its beginning ",
        f"there and is an error here), data.max_response_length={turn} is rollout.max_turn_tokens, ",
        f"data.max_prompt_length={room} is data.max_response_length",
    )
    if isinstance(room, int) and isinstance(turn, int) and turn > room:
        meaning.ours["rollout.max_turn_tokens"] = room
        meaning.say(f"rollout.max_turn_tokens={room}: a turn is not longer than an episode")


def _search_r1_turns(meaning: Meaning) -> None:
    turns, seen = meaning.theirs("max_turns"), meaning.theirs("data.max_obs_length")
    turn, room = meaning.theirs("data.max_response_length"), meaning.theirs("data.max_prompt_length")
    meaning.say(f"max_turns={turns} counts alike: {turns} turns may search and one more may only answer")
    if not all(isinstance(value, int) for value in (turns, seen, turn, room)):
        return
    longest = (turns + 1) * turn + turns * seen
    if longest > room:
        meaning.say(
            f"{turns} turns of {turn} + {seen} tokens and an answer of {turn} come to {longest}, more than ",
            f"{room}: there the question drops out of what the policy sees, and the end out of what is ",
            "trained on; here the episode ends and nothing is cut",
        )


def _search_r1_loss(meaning: Meaning) -> None:
    meaning.ours["actor.clip_ratio_c"] = None
    meaning.ours["actor.loss_agg_mode"] = "token-mean"
    meaning.ours["algorithm.use_kl_in_reward"] = meaning.theirs(f"{ACTOR}.use_kl_loss") is not True
    meaning.say(
        "the loss is a mean over the tokens of each micro-batch there, over those of the mini-batch here"
    )
    if meaning.given("algorithm.no_think_rl") not in (None, False):
        meaning.say("algorithm.no_think_rl has nothing like it (there it ends the run)")


def _search_r1_reward(meaning: Meaning) -> None:
    program = meaning.source.program
    scores = {ours: meaning.theirs(f"reward_model.{theirs}", 0) for theirs, ours in _SCORES.items()}
    reads_scores = program == "main_ppo_format" or (not program and any(scores.values()))
    name = "format" if reads_scores else "em"
    meaning.ours["reward.weights"] = {name: 1.0}
    if reads_scores:
        meaning.ours |= {f"reward.format.{option}": score for option, score in scores.items()}
    elif any(scores.values()):
        meaning.say(f"{program} does not read the format scores: only exact match counts, as there")
    meaning.say(
        f"the reward is {name}: an answer is the last that the policy wrote; there the example in the ",
        "prompt and what passages say between the tags count too",
    )


def _search_r1_search(meaning: Meaning) -> None:
    if meaning.given("reranker.do_rerank") is True:
        url = meaning.given("reranker.url")
        meaning.say(f"reranker.url={url} has nothing like it: what re-ranks belongs behind search.url")
    meaning.used |= {"reranker.url", "reranker.topk"}


def _search_r1_length_of_run(meaning: Meaning) -> None:
    steps = meaning.ours.get("trainer.total_training_steps")
    if steps is not None:
        meaning.say(f"trainer.total_training_steps={steps} are all trained here, one fewer there")


SEARCH_R1_PARTS: tuple[Callable[[Meaning], None], ...] = (
    _search_r1_optimiser_steps,
    _search_r1_validation,
    _sampling,
    _mask,
    _search_r1_turns,
    _lengths,
    _search_r1_loss,
    _search_r1_reward,
    _search_r1_search,
    _search_r1_length_of_run,
)


_TURNS = f"{ROLLOUT}.multi_turn"
_SAMPLED = f"{ROLLOUT}.val_kwargs"
_CORRECTION = "algorithm.rollout_correction"


def _verl_optimiser_steps(meaning: Meaning) -> None:
    batch, mini = meaning.theirs("data.train_batch_size"), meaning.theirs(f"{ACTOR}.ppo_mini_batch_size")
    n = meaning.theirs(f"{ROLLOUT}.n")
    if isinstance(batch, int) and isinstance(mini, int) and 0 < mini < batch:
        meaning.say(
            f"a mini-batch of {mini} is {mini} questions × {n} episodes there and here: ",
            f"{batch // mini} optimiser steps a rollout in both, times ppo_epochs",
        )


def _verl_validation(meaning: Meaning) -> None:
    samples = meaning.given(f"{_SAMPLED}.do_sample") is True
    temperature = meaning.given(f"{_SAMPLED}.temperature") or 0.0
    meaning.ours["eval.temperature"] = temperature if samples else 0.0
    many, top_p = meaning.given(f"{_SAMPLED}.n"), meaning.given(f"{_SAMPLED}.top_p")
    if many not in (None, 1):
        meaning.say(f"{_SAMPLED}.n={many} has nothing like it: each question is asked once")
    if samples and top_p not in (None, 1):
        meaning.say(f"{_SAMPLED}.top_p={top_p} has nothing like it: validation samples from all tokens")


def _verl_turns(meaning: Meaning) -> None:
    speaks, hears = meaning.given(f"{_TURNS}.max_assistant_turns"), meaning.given(f"{_TURNS}.max_user_turns")
    if isinstance(speaks, int) and speaks > 0:
        meaning.ours["rollout.max_turns"] = speaks - 1
        meaning.say(
            f"max_assistant_turns={speaks} counts the answer too: rollout.max_turns={speaks - 1}, ",
            "and one more to answer",
        )
    if isinstance(hears, int) and hears >= 0:
        meaning.ours["rollout.max_turns"] = min(hears, meaning.ours.get("rollout.max_turns", hears))
    if (length := meaning.given(f"{_TURNS}.max_tool_response_length")) is not None:
        meaning.say(
            f"max_tool_response_length={length} counts characters there; rollout.max_obs_length counts ",
            "tokens, and is 500 until you set it",
        )
    meaning.ours["rollout.max_turn_tokens"] = meaning.theirs("data.max_response_length")
    meaning.say("a turn may be as long as an episode there; rollout.max_turn_tokens can bound it here")


def _verl_search(meaning: Meaning) -> None:
    tool = meaning.given(f"{_TURNS}.tool_config_path")
    if tool is not None:
        meaning.say(f"the tool's file {tool} is not read: set search.url to its server")
    else:
        meaning.say(
            "nothing there says what to search: set search.url or search.index, or rollout.search=false"
        )


def _clips(meaning: Meaning) -> None:
    """Keys that verl 0.9.1 passes over for others, and older versions do not."""
    for role, ours in {ACTOR: "actor", "critic": "critic"}.items():
        clip, other = meaning.given(f"{role}.grad_clip"), meaning.given(f"{role}.optim.clip_grad")
        if other is not None:
            meaning.ours[f"{ours}.grad_clip"] = other
        if clip not in (None, 1, other):
            meaning.say(
                f"{role}.grad_clip={clip}: verl 0.9.1 reads {role}.optim.clip_grad, "
                f"{1.0 if other is None else other}; here it is {meaning.ours[f'{ours}.grad_clip']}"
            )
    clip = meaning.given(f"{ACTOR}.clip_ratio")
    ends = [meaning.given(f"{ACTOR}.clip_ratio_{end}") for end in ("low", "high")]
    if clip not in (None, 0.2) and None in ends:
        meaning.say(
            f"clip_ratio={clip} counts here; verl 0.9.1 reads clip_ratio_low and clip_ratio_high, ",
            "0.2 each where they are not given",
        )


def _verl_loss(meaning: Meaning) -> None:
    mode = meaning.given(f"{ACTOR}.policy_loss.loss_mode")
    if mode not in (None, "vanilla"):
        meaning.ours[f"verl.{ACTOR}.policy_loss.loss_mode"] = mode
        meaning.say(f"the loss {mode} is verl's own: kept below verl:; without --backend verl it is PPO's")
    norm = meaning.given("algorithm.norm_adv_by_std_in_grpo")
    if norm is not None and meaning.ours["algorithm.name"] == "grpo":
        meaning.ours["algorithm.grpo.norm_adv_by_std_in_grpo"] = norm
    if meaning.given("algorithm.filter_groups.enable") is True:
        meaning.say(
            "algorithm.filter_groups has nothing like it: groups of equal scores stay, at advantage 0"
        )


def _importance(meaning: Meaning) -> None:
    level = meaning.given(f"{_CORRECTION}.rollout_is")
    cap = meaning.given(f"{_CORRECTION}.rollout_is_threshold")
    if level == "token":
        meaning.ours["rollout.logprobs"] = "sampler"
        meaning.ours["rollout.sampler_is_cap"] = 2.0 if cap is None else cap
    elif level is not None:
        meaning.say(
            f"{_CORRECTION}.rollout_is={level} has nothing like it: ",
            "rollout.logprobs=sampler weighs each token",
        )


def _questions(meaning: Meaning) -> None:
    cut, column = meaning.given("data.truncation"), meaning.given("data.prompt_key")
    if cut not in (None, "error"):
        meaning.say(
            f"data.truncation={cut}: no prompt is cut here; one that is too long is an error, or left out ",
            "with data.filter_overlong_prompts=true",
        )
    if column not in (None, "prompt"):
        meaning.say(f"data.prompt_key={column}: the prompt is in the column prompt here")
    if meaning.given("data.train_max_samples") not in (None, -1):
        meaning.say("data.train_max_samples has nothing like it: all questions of data.train_files are used")


def _verl_reward(meaning: Meaning) -> None:
    meaning.ours["reward.weights"] = {"em": 1.0}
    paths = [meaning.given(f"{section}custom_reward_function.path") for section in ("", "reward.")]
    models = [meaning.given(f"{section}reward_model.enable") for section in ("", "reward.")]
    if path := paths[0] or paths[1]:
        meaning.say(
            f"the reward function in {path} is not read: make it a plugin (srl plugins new reward NAME); ",
            "until then the reward is em",
        )
    else:
        meaning.say("the reward is em; there it is chosen by the data_source of each row")
    if True in models:
        meaning.say("a reward model has nothing like it: rewards are plugins")


VERL_PARTS: tuple[Callable[[Meaning], None], ...] = (
    _verl_optimiser_steps,
    _verl_validation,
    _verl_turns,
    _verl_search,
    _clips,
    _verl_loss,
    _importance,
    _questions,
    _verl_reward,
)
