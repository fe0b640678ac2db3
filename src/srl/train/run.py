"""A whole run, from configuration to summary: started, resumed, or a fine-tuning alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from srl import __version__
from srl.config import Config, load_saved, located, save_config
from srl.errors import UserError
from srl.files import FORMAT, atomic_directory, read_json, write_json
from srl.manifests import ABOUT, CHECKPOINT, checksums, write_manifest
from srl.model import save_model
from srl.renamed import current_fields
from srl.rollout.torch_engine import TorchEngine
from srl.serve.named_retrievers import digest_of
from srl.store import LogWriter, RunInfo
from srl.store.run_info import claim
from srl.train.checkpoint import load_newest
from srl.train.cold_start import about, cold_started, demonstrated, demonstration_file
from srl.train.cold_start import train as fine_tune
from srl.train.episodes import Environment, EpisodeRunner
from srl.train.experience import Learner
from srl.train.extension import Extension, finished, planned, rate_notes
from srl.train.loading import (
    LoadedModel,
    load_engine,
    load_environment,
    load_learner,
    load_optimisers,
    load_policy,
    reference_digest,
)
from srl.train.local import LocalTrainer
from srl.train.prepare import BASE_MODEL, Note, with_data
from srl.train.progress import Progress
from srl.train.report import Terminal, check_loggers, loggers
from srl.train.resuming import LOG, how_to_resume, resumable, unchecked
from srl.train.saved import all_checkpoints, checkpoint_path, newest_step
from srl.train.search import IndexDigests, new_cassette
from srl.train.threads import set_threads
from srl.trajectory import SearchTool
from srl.workspace import Workspace

Backend = Literal["local", "verl"]
"""What trains: this process, or verl on a cluster."""
SFT = "sft"
IDENTITY = "run.json"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to; the last line of `srl train --json`."""

    run_id: str
    algo: str
    seed: int
    steps: int
    seconds: float
    test_em_start: float | None
    test_em_end: float | None
    val_em_best: float | None
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is, saved as `run.json` in its directory when it starts."""

    preset: str
    algo: str
    started: str
    backend: Backend = "local"
    reference_digest: str = ""
    index_digest: str = ""
    retriever_digests: dict[str, str] = field(default_factory=dict)
    extended: list[dict[str, Any]] = field(default_factory=list)
    """Each `Extension`, in order."""

    def save(self, run: Path) -> None:
        write_json(run / IDENTITY, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, run: Path) -> Identity:
        """As it was saved in the directory `run`. Raises UserError where that is no run."""
        path = run / IDENTITY
        if not path.is_file():
            raise UserError(f"{run} is no run: there is no {IDENTITY} in it")
        return read_json(path, lambda **found: cls(**current_fields("run", found)))


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def start(config: Config, *, preset: str, algo: str, workspace: Workspace, terminal: Terminal) -> Summary:
    """A new run. Nothing is left of one that cannot start: its directory comes after all checks."""
    began = time.perf_counter()
    threads = set_threads(config.trainer.threads, config.rollout.deterministic)
    with new_cassette(config):
        config = with_paths(config, algo, workspace, terminal)
        prepared = _prepare(config, algo, workspace, terminal)
    run = workspace.new_run(preset, algo, config.trainer.seed)
    with removed_unless_begun(run):
        save_config(run, config)
        identity = Identity(
            preset, algo, utc_now(), reference_digest=prepared.reference,
            **IndexDigests.of(prepared.environment.search).as_fields(),
        )  # fmt: skip
        identity.save(run)
        terminal.note(
            f"run {run.name}: {len(prepared.environment.splits.train):,} questions, {threads} threads, "
            f"set up in {time.perf_counter() - began:.1f} s"
        )
        return _go(run, config, identity, prepared, terminal)


@contextmanager
def removed_unless_begun(run: Path) -> Iterator[None]:
    """Nothing is left of a run that ends, ctrl-C included, before it has a log."""
    try:
        yield
    except BaseException:
        if not (run / LOG).is_dir():
            shutil.rmtree(run, ignore_errors=True)
        raise


def resume(run: Path, *, workspace: Workspace, terminal: Terminal, steps: int | None = None) -> Summary:
    """Go on with `run` from its newest checkpoint, or from the start where it has none.

    `steps` is the new number of steps in all. A run that has made all of them is left as it is.
    """
    identity, before = Identity.read(run), load_saved(run)
    if identity.algo == SFT:
        raise UserError(f"{run.name} is a fine-tuning, which is not resumed; start it again")
    done = newest_step(run)
    config = planned(run, before, steps, done)
    if progress := finished(run, config, done, terminal.note):
        return _summary(run, config, identity, progress)
    set_threads(config.trainer.threads, config.rollout.deterministic)
    prepared = _prepare(config, identity.algo, workspace, terminal)
    if prepared.reference != identity.reference_digest:
        raise UserError(
            f"the reference of {run.name} has changed: {config.ref.path or config.model.path} is not the "
            f"model that the run started with (digest {identity.reference_digest})"
        )
    warn_about_other_indexes(run, IndexDigests.of(prepared.environment.search), identity, terminal)
    terminal.note(f"resuming {run.name}")
    identity = extended(run, identity, before, config, done, terminal.note)
    return _go(run, config, identity, prepared, terminal, resumed=True)


def extended(
    run: Path, identity: Identity, before: Config, config: Config, done: int, note: Note
) -> Identity:
    """Save that the run has another number of steps from here on, where it has; and say what that changes."""
    was, steps = before.trainer.total_training_steps, config.trainer.total_training_steps
    if steps == was:
        return identity
    claim(run / LOG)
    note(f"{run.name} has {steps} steps now, not {was}")
    for line in rate_notes(before, config, done):
        note(line)
    save_config(run, config)
    known = Extension(done, was, steps, utc_now())
    identity = replace(identity, extended=[*identity.extended, asdict(known)])
    identity.save(run)
    return identity


def warn_about_other_indexes(run: Path, now: IndexDigests, identity: Identity, terminal: Terminal) -> None:
    """Every retriever that has another index than when the run began, or that no longer says which."""
    before = IndexDigests(identity.index_digest, identity.retriever_digests)
    if now.index_digest != before.index_digest:
        terminal.note(f"warning: {run.name} started with another index ({before.index_digest[:12] or '?'})")
    for other in now.others(before):
        if other.retriever:
            was = f"{other.named} {other.before[:12]}, which is {other.now[:12]} now"
            terminal.note(f"warning: {run.name} started with {was}")


def _unless_ours(config: Config, workspace: Workspace, terminal: Terminal) -> Note:
    """What is said of a tokenizer, but not of that of the small model which comes with `srl`."""
    path = Path(str(config.model.path))
    ours = path == BASE_MODEL or path.resolve().parent == workspace.models.resolve()
    return (lambda text: None) if ours else terminal.note


def with_paths(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> Config:
    """`config` with every path filled in and absolute: the world's files, the model that RL starts from.

    With no model of the user's own, RL starts from the cold-started base and fine-tuning from the base.
    """
    config = located(with_data(located(config), workspace, terminal.note))
    if config.model.path is not None:
        return config
    path = BASE_MODEL if algo == SFT else cold_started(config, workspace, terminal.note)
    return located(config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})}))


Loop = Callable[[Path, EpisodeRunner, bool], Progress]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """All that a run needs besides its directory; `reference` is the digest of its reference policy."""

    environment: Environment
    engine: TorchEngine
    loop: Loop
    reference: str = ""


def _prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> _Prepared:
    """Load and check everything; the seed is set first, for new weights such as an adapter's."""
    check_loggers(config.trainer.logger)
    torch.manual_seed(config.trainer.seed)
    policy = load_policy(config.model, _unless_ours(config, workspace, terminal))
    environment = load_environment(config, workspace, policy.codec, terminal.note)
    engine = load_engine(config, policy)
    if algo == SFT:
        return _Prepared(environment, engine, _sft_loop(config, policy, environment, workspace, terminal))
    learner = load_learner(config, policy)
    loop = _rl_loop(config, learner, environment, terminal)
    return _Prepared(environment, engine, loop, reference_digest(config, learner))


def _rl_loop(config: Config, learner: Learner, environment: Environment, terminal: Terminal) -> Loop:
    optimisers = load_optimisers(config, learner)

    def loop(run: Path, runner: EpisodeRunner, resumed: bool) -> Progress:
        trainer = LocalTrainer(config, run, runner, learner, optimisers, _about(environment))
        checkpoints = all_checkpoints(run) if resumed else []
        if checkpoints:
            trainer.progress = load_newest(checkpoints, learner, optimisers)
            for line in (f"from {checkpoints[-1].name}", *unchecked(checkpoints[-1])):
                terminal.note(line)
        if resumed:
            runner.log.supersede(trainer.progress.step if checkpoints else -1)
        return trainer.run()

    return loop


def _sft_loop(
    config: Config, policy: LoadedModel, environment: Environment, workspace: Workspace, terminal: Terminal
) -> Loop:
    if config.sft.steps == 0:
        raise UserError("nothing to fine-tune: sft.steps = 0; type --steps with a number above 0")
    file = demonstration_file(config, workspace, terminal.note)
    place = environment
    episodes = demonstrated(file, place.search, policy.codec, place.template, place.options)

    def loop(run: Path, runner: EpisodeRunner, resumed: bool) -> Progress:
        progress = Progress()
        if config.trainer.val_before_train:
            runner.validate(progress)
            progress.test_em_start = runner.test(0)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            progress.step = step
            runner.record(step, "sft", [], metrics)
            if step % 10 == 0 or step == config.sft.steps:
                terminal.step(step, config.sft.steps, metrics)

        began = time.perf_counter()
        fine_tune(config.sft, policy, episodes, on_step, config.actor.ppo_max_token_len, config.trainer.seed)
        progress.seconds = time.perf_counter() - began
        runner.validate(progress)
        progress.test_em_end = runner.test(progress.step)
        save_fine_tuned(checkpoint_path(run, progress.step), policy, _about(environment))
        return progress

    return loop


def save_fine_tuned(path: Path, policy: LoadedModel, known: dict[str, Any]) -> None:
    """The fine-tuned model as a Hugging Face directory, with what it was taught beside it."""
    with atomic_directory(path) as folder:
        save_model(policy.model, policy.codec.tokenizer, folder)
        write_json(folder / ABOUT, {"format": 1, **known})
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})


def _about(environment: Environment) -> dict[str, Any]:
    """What a checkpoint says of how its model was trained to talk, and with which index."""
    return {**about(environment.template), **IndexDigests.of(environment.search).as_fields()}


def run_info(run: Path, config: Config, identity: Identity, search: SearchTool | None) -> RunInfo:
    """What the log says of the run."""
    known = config.model_dump() | ({"extended": identity.extended} if identity.extended else {})
    return RunInfo(
        run_id=run.name, preset=identity.preset, algo=identity.algo, seed=config.trainer.seed,
        model=config.model.path or "", config=known, index_digest=digest_of(search),
        srl_version=__version__, started=identity.started,
    )  # fmt: skip


def _how_to_go_on(run: Path, identity: Identity) -> str:
    if identity.algo == SFT:
        return "a fine-tuning is not resumed; type the same again to start over"
    return how_to_resume(run, newest_step(run))


def _go(
    run: Path, config: Config, identity: Identity, prepared: _Prepared, terminal: Terminal,
    resumed: bool = False,
) -> Summary:  # fmt: skip
    """Open the log, run the loop, and sum up. An interruption leaves both to be resumed."""
    names = config.trainer.logger
    known = loggers(names, run, config.trainer.project_name, config.trainer.experiment_name or run.name,
                    config.model_dump())  # fmt: skip
    info = run_info(run, config, identity, prepared.environment.search)
    with (
        resumable(run, lambda: _how_to_go_on(run, identity)),
        LogWriter(run / LOG, info, warn=lambda text: terminal.note(f"warning: {text}")) as log,
    ):
        runner = EpisodeRunner(config, prepared.environment, prepared.engine, log, terminal, known)
        try:
            progress = prepared.loop(run, runner, resumed)
        finally:
            runner.close()
    return _summary(run, config, identity, progress)


def _summary(run: Path, config: Config, identity: Identity, progress: Progress) -> Summary:
    checkpoints = all_checkpoints(run)
    return Summary(
        run.name, identity.algo, config.trainer.seed, progress.step, round(progress.seconds, 3),
        progress.test_em_start, progress.test_em_end, progress.val_em_best,
        str(checkpoints[-1]) if checkpoints else None,
    )  # fmt: skip
