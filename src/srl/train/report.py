"""Reports the progress of a run: lines on the terminal, and metrics to external loggers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console
from rich.text import Text

from srl.browse.formatting import duration
from srl.config import Config
from srl.errors import UserError, first_line
from srl.install import pip_install
from srl.safe import Stderr, quoted, safe_message


class Reporter(Protocol):
    """An external logger, which gets a run's metrics besides its own log."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_loggers(names: Sequence[str]) -> None:
    """Raises UserError for a logger whose module, of the same name, is not installed."""
    for name in names:
        if name != "console" and find_spec(name) is None:
            raise UserError(f"trainer.logger: {name} is not installed; type: {pip_install(name)}")


@contextmanager
def reporters(config: Config, run: Path, resumed_from: int | None = None) -> Iterator[list[Reporter]]:
    """The external loggers that `trainer.logger` names, closed at the end; `console` is none. A run that is
    resumed after the step `resumed_from` goes on with what they have of it."""
    trainer, opened = config.trainer, list[Reporter]()
    try:
        if "tensorboard" in trainer.logger:
            opened.append(_TensorBoard(run / "tensorboard", resumed_from))
        if "wandb" in trainer.logger:
            opened.append(_WandB(run.name, config.model_dump()))
        yield opened
    finally:
        for reporter in opened:
            reporter.close()


class _TensorBoard:
    def __init__(self, directory: Path, resumed_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = None if resumed_from is None else resumed_from + 1  # steps that are made again
        self.writer = SummaryWriter(str(directory), purge_step=purged)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


_STEP = "training/global_step"


class _WandB:
    """W&B's own step only rises, and a run that was rolled back counts again: the curves have `_STEP`."""

    def __init__(self, run: str, config: Any) -> None:
        import wandb

        try:
            project = os.environ.get("WANDB_PROJECT", "srl")
            self.run = wandb.init(project=project, name=run, id=run, resume="allow", config=config)
        except wandb.Error as error:
            why = quoted(first_line(error))
            raise UserError(
                f"trainer.logger: wandb does not start: {why}; or set trainer.logger=console"
            ) from error
        self.run.define_metric(_STEP)
        self.run.define_metric("*", step_metric=_STEP)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, _STEP: step})

    def close(self) -> None:
        self.run.finish()


class Terminal:
    """Progress lines on stderr; none if `quiet`. Lines are wrapped, between words, only on a terminal."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(file=cast("Any", Stderr()), highlight=False)
        self.quiet = quiet
        self._began: tuple[int, float] | None = None
        self._evaluations = dict[str, float]()

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(safe_message(text)), soft_wrap=not self.console.file.isatty())

    def step(self, step: int, config: Config, values: Mapping[str, float]) -> None:
        """`step 12/30  reward .43  EM .43  searches 1.21 | …health… | 1.9 s  40s left`.

        A line more says so where the first step has nothing to learn from.
        """
        self._progress(step, config.trainer.total_training_steps, values)
        if step == 1 and (why := nothing_to_learn(values, config)):
            self.note(f"step {step}: {why}")

    def fine_tuning_step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """`step 12/400  loss 1.234  |  9.8 s  1,310 tokens/s  1h 03m left`."""
        self._progress(step, total, values, f"  {values['perf/throughput']:,.0f} tokens/s")

    def _progress(self, step: int, total: int, values: Mapping[str, float], rate: str = "") -> None:
        """A step's line, with the time left: steps take as long as those since the first one, with the
        validations between them, and the evaluations at the end as long as the latest ones."""
        now = time.monotonic()
        first, began = self._began = self._began or (step - 1, now - values["timing_s/step"])
        pace = (now - began) / max(step - first, 1)
        remaining = duration(pace * (total - step) + sum(self._evaluations.values()))
        self.note(
            f"step {step:>{len(str(total))}}/{total}  {_learning(values)}  |  {_health(values)}{rate}"
            f"  {remaining} left"
        )

    def evaluation(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """EM in all and by kind of question, F1, and searches of a validation or test."""
        self._evaluations[name] = values.get("timing_s/testing", 0.0)
        parts = [f"{name} at step {step}:  EM {values[f'{name}/em']:.3f}"]
        detail = [
            f"{key.rpartition('/')[2]} {value:.3f}"
            for key, value in values.items()
            if key.startswith(f"{name}/em/")
        ]
        if len(detail) > 1:
            parts.append(f"({', '.join(detail)})")
        parts.append(f"F1 {values[f'{name}/f1']:.3f}")
        parts.append(f"searches {values.get(f'{name}/env/number_of_valid_search', 0.0):.2f}")
        self.note("  ".join(parts))


def nothing_to_learn(values: Mapping[str, float], config: Config) -> str:
    """Why a policy learns nothing from a step, or nothing about searching; "" where it may."""
    if config.rollout.search and values.get("env/number_of_valid_search") == 0:
        return (
            "no episode searched, so there is nothing to learn about searching; fine-tune the model on "
            "demonstrations first (docs/training.md)"
        )
    if values.get("critic/advantages/max") == values.get("critic/advantages/min") == 0:
        return (
            "there is nothing to learn from: no episode has a better reward than the others of its question, "
            f"{values.get('critic/score/mean', 0.0):.3g} on average"
        )
    return ""


def _learning(values: Mapping[str, float]) -> str:
    keys = {
        "reward": "critic/score/mean",
        "EM": "train/em",
        "searches": "env/number_of_valid_search",
        "loss": "sft/policy_loss",
    }
    return "  ".join(f"{name} {values[key]:.3f}" for name, key in keys.items() if key in values)


def _health(values: Mapping[str, float]) -> str:
    """What shows trouble first: log-prob difference, equal groups, lost episodes, entropy, KL."""
    parts = []
    if "rollout/logprob_diff/mean" in values:
        parts.append(f"Δlogp {values['rollout/logprob_diff/mean']:.1e}")
    for name, key in {
        "equal groups": "env/equal_groups_share",
        "excluded": "env/excluded_share",
        "truncated": "env/truncated_share",
    }.items():
        if key in values:
            parts.append(f"{name} {100 * values[key]:.0f}%")
    for name, key in {"entropy": "actor/entropy", "KL": "actor/ref_kl"}.items():
        if key in values:
            parts.append(f"{name} {values[key]:.3f}")
    return "  ".join([*parts, f"{values['timing_s/step']:.1f} s"])
