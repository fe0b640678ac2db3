"""What a run of Search-R1's means in another way here."""

from __future__ import annotations

from collections.abc import Callable

from srl.train.importing.meaning import ACTOR, ROLLOUT, Meaning

_SCORES = {
    "structure_format_score": "structure_score",
    "final_format_score": "final_format_score",
    "retrieval_score": "retrieval_score",
}
"""Keys of its `reward_model`, and the options of the reward format."""


def _optimiser_steps(meaning: Meaning) -> None:
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


def _validation(meaning: Meaning) -> None:
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


def _turns(meaning: Meaning) -> None:
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


def _loss(meaning: Meaning) -> None:
    meaning.ours["actor.clip_ratio_c"] = None
    meaning.ours["actor.loss_agg_mode"] = "token-mean"
    meaning.ours["algorithm.use_kl_in_reward"] = meaning.theirs(f"{ACTOR}.use_kl_loss") is not True
    meaning.say(
        "the loss is a mean over the tokens of each micro-batch there, over those of the mini-batch here"
    )
    if meaning.given("algorithm.no_think_rl") not in (None, False):
        meaning.say("algorithm.no_think_rl has nothing like it (there it ends the run)")


def _reward(meaning: Meaning) -> None:
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


def _search(meaning: Meaning) -> None:
    if meaning.given("reranker.do_rerank") is True:
        url = meaning.given("reranker.url")
        meaning.say(f"reranker.url={url} has nothing like it: what re-ranks belongs behind search.url")
    meaning.used |= {"reranker.url", "reranker.topk"}


def _length_of_run(meaning: Meaning) -> None:
    steps = meaning.ours.get("trainer.total_training_steps")
    if steps is not None:
        meaning.say(f"trainer.total_training_steps={steps} are all trained here, one fewer there")


SEARCH_R1_PARTS: tuple[Callable[[Meaning], None], ...] = (
    _optimiser_steps, _validation, _sampling, _mask, _turns, _lengths, _loss, _reward, _search,
    _length_of_run,
)  # fmt: skip
