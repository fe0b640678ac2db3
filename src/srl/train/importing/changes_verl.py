"""What a run of verl's means in another way here."""

from __future__ import annotations

from collections.abc import Callable

from srl.train.importing.meaning import ACTOR, ROLLOUT, Meaning

_TURNS = f"{ROLLOUT}.multi_turn"
_SAMPLED = f"{ROLLOUT}.val_kwargs"
_CORRECTION = "algorithm.rollout_correction"


def _optimiser_steps(meaning: Meaning) -> None:
    batch, mini = meaning.theirs("data.train_batch_size"), meaning.theirs(f"{ACTOR}.ppo_mini_batch_size")
    n = meaning.theirs(f"{ROLLOUT}.n")
    if isinstance(batch, int) and isinstance(mini, int) and 0 < mini < batch:
        meaning.say(
            f"a mini-batch of {mini} is {mini} questions × {n} episodes there and here: ",
            f"{batch // mini} optimiser steps a rollout in both, times ppo_epochs",
        )


def _validation(meaning: Meaning) -> None:
    samples = meaning.given(f"{_SAMPLED}.do_sample") is True
    temperature = meaning.given(f"{_SAMPLED}.temperature") or 0.0
    meaning.ours["eval.temperature"] = temperature if samples else 0.0
    many, top_p = meaning.given(f"{_SAMPLED}.n"), meaning.given(f"{_SAMPLED}.top_p")
    if many not in (None, 1):
        meaning.say(f"{_SAMPLED}.n={many} has nothing like it: each question is asked once")
    if samples and top_p not in (None, 1):
        meaning.say(f"{_SAMPLED}.top_p={top_p} has nothing like it: validation samples from all tokens")


def _turns(meaning: Meaning) -> None:
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


def _search(meaning: Meaning) -> None:
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


def _loss(meaning: Meaning) -> None:
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


def _reward(meaning: Meaning) -> None:
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
    _optimiser_steps, _validation, _turns, _search, _clips, _loss, _importance, _questions,
    _reward,
)  # fmt: skip
