"""What a run means in another way here than where its configuration is from, and what cannot be carried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import get_args

from srl.config.sections import Rollout, Trainer
from srl.train.importing.changes_search_r1 import SEARCH_R1_PARTS
from srl.train.importing.changes_verl import VERL_PARTS
from srl.train.importing.key_table import SEARCH_R1
from srl.train.importing.meaning import ACTOR, ROLLOUT, Meaning


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
    _test_files, _length_of_run, _warm_ups, _loggers, _critic, _offloads,
    _shortest_answer, _lacking,
)  # fmt: skip
