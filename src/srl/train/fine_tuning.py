"""A run of supervised fine-tuning, `srl train --algo sft`: a step is one batch of demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from srl.config import Config
from srl.errors import UserError
from srl.train.cold_start import demonstration_file
from srl.train.episodes import TrainingEnvironment
from srl.train.load_components import LoadedModel
from srl.train.logged_episodes import check_tokens, episodes_of_log
from srl.train.loop import Loop
from srl.train.make_missing import Note
from srl.train.sft import batches, demonstrated, fine_tune_step
from srl.trajectory import Trajectory
from srl.workspace import Workspace


@dataclass(slots=True, kw_only=True)
class FineTuning(Loop):
    """Fine-tunes for `sft.steps`, or until the validation EM stops rising.

    The order of the episodes depends on the seed only, so a resumed run continues as if it had not stopped.
    """

    episodes: list[Trajectory]
    counts: dict[str, float] = field(default_factory=dict)
    """Of the episodes, for the log."""
    data: Iterator[list[Trajectory]] = field(init=False)

    def step(self, number: int) -> dict[str, float]:
        sft = self.config.sft
        self.put_to_sleep()
        metrics = fine_tune_step(
            self.actor, self.optimisers["actor"], next(self.data),
            max_tokens=self.config.actor.ppo_max_token_len,
        )  # fmt: skip
        self.runner.record(number, "sft", [], metrics)
        if number in (1, sft.steps) or number % 10 == 0:
            self.terminal.fine_tuning_step(number, sft.steps, metrics)
        return metrics

    @property
    def steps(self) -> int:
        return self.config.sft.steps

    def begin(self) -> None:
        self.data = islice(
            batches(self.episodes, self.config.sft, self.config.trainer.seed), self.progress.step, None
        )
        if self.progress.step == 0:
            self.runner.record(0, "sft", [], self.counts)

    @property
    def patience(self) -> int | None:
        return self.config.sft.patience


def episodes_to_learn(
    config: Config, policy: LoadedModel, environment: TrainingEnvironment, workspace: Workspace, note: Note
) -> tuple[list[Trajectory], dict[str, float]]:  # fmt: skip
    """What a fine-tuning learns from, and its counts: the episodes of `sft.log`, or the demonstrations of
    `sft.train_files` or the world, which are run here first.

    Raises UserError for patience without questions for validations, and for episodes of another tokenizer.
    """
    if config.sft.patience and not environment.splits.val:
        raise UserError("sft.patience counts validations, and there are none: data.val_files is not set")
    counts = dict[str, float]()
    if config.sft.log is not None:
        selection = episodes_of_log(config)
        check_tokens(selection.episodes, policy.codec, config.sft.log)
        for line in selection.lines():
            note(line)
        episodes, counts = selection.episodes, selection.metrics()
    else:
        file = demonstration_file(config, workspace, note)
        episodes = demonstrated(file, environment, note, environment.splits.train)
    counts |= {
        "sft/episodes": len(episodes),
        "sft/policy_tokens": sum(episode.policy_tokens for episode in episodes),
    }
    return episodes, counts
