"""Decides by a run's configuration whether its updates go through `torch.compile`.

`srl.update.compiling` tries it and does it, without configuration and workspace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from srl.config import Config
from srl.model import error_line
from srl.train.make_missing import Note
from srl.train.run_directory import RFT, SFT
from srl.update.compiling import (
    LENGTH,
    ROWS,
    Trial,
    compile_layers,
    layers_of,
    seconds_of_a_layer,
    try_compiling,
)
from srl.update.packing import packs
from srl.workspace import Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORTH_S = 600.0
"""Seconds of updates in a run from which on it is compiled; compiling takes up to a minute."""

Try = Callable[["PreTrainedModel"], Trial]


def compile_updates(
    config: Config, trunks: Sequence[PreTrainedModel], tokens: float, workspace: Workspace, note: Note,
    *, try_it: Try = try_compiling, seconds: Callable[[PreTrainedModel], float] = seconds_of_a_layer,
) -> None:  # fmt: skip
    """Compile the layers of `trunks`, the policy's first, if `actor.use_torch_compile` or a trial says so.

    `tokens` is the number of tokens in all updates of the run. Compiled artefacts are kept in the workspace.
    """
    wanted, policy = config.actor.use_torch_compile, trunks[0]
    unwanted = wanted is False or (wanted == "auto" and config.rollout.deterministic)
    if unwanted or not packs(policy, config.data.max_episode_tokens) or not layers_of(policy):
        return
    if wanted == "auto" and seconds(policy) * len(layers_of(policy)) * tokens / (ROWS * LENGTH) < WORTH_S:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(workspace.compiled.absolute()))
    try:
        trial = try_it(policy)
    except Exception as error:  # a compiler that is missing or fails, in whatever way
        note(f"torch.compile failed, and updates go on without it: {error_line(error)}")
        return
    if wanted == "auto" and not trial.pays:
        note(f"updates run without torch.compile: {trial}")
        return
    for trunk in trunks:
        compile_layers(trunk, note)
    note(f"updates use torch.compile: {trial}")


def tokens_of_updates(config: Config, algo: str) -> float:
    """The number of tokens in all updates of a run, if episodes have half of the longest length."""
    if algo in (SFT, RFT):
        rounds = config.trainer.total_training_steps if algo == RFT else 1
        episodes = rounds * config.sft.steps * config.sft.batch_size
    else:
        step = config.data.train_batch_size * config.rollout.n * config.actor.ppo_epochs
        episodes = config.trainer.total_training_steps * step
    return episodes * config.data.max_episode_tokens / 2
