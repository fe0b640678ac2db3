"""`srl eval run`: a model answers questions, in the episodes of training and greedy by default.

Each setting (with search, without, a baseline) is a run; it goes on by name, and may be one of several parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from srl import __version__, process
from srl.answers import exact_match
from srl.config import Config, load_saved, save_config
from srl.config.keys import flat
from srl.errors import CheckFailed, UserError
from srl.evaluate import EpisodeResult, Interval, em_interval, read_results, summarise
from srl.evaluate.question_sets import Sample, draw
from srl.progress import Note, counted
from srl.rollout.codec import Codec
from srl.rollout.engine import Engine
from srl.rollout.environment import Environment
from srl.rollout.episode import Key
from srl.serve.named_retrievers import aclose, connect
from srl.store import (
    QUESTION_DIGEST,
    LogWriter,
    Record,
    RunInfo,
    find_logs,
    question_digest,
    read_records,
    reading,
)
from srl.train.baselines import CLOSED_BOOK, baseline_config
from srl.train.load_components import Generation, load_environment, load_generation
from srl.train.load_protocol import load_template
from srl.train.model_settings import trained_with
from srl.train.questions import load_questions
from srl.train.resume import CHANGEABLE
from srl.train.run_directory import LOG, RECORD, RunRecord
from srl.train.search import as_inputs, index_digests, load_search, new_cassette
from srl.trajectory import Question, SearchTool, Trajectory, failed_episodes
from srl.workspace import EVALUATION, Workspace, is_evaluation

PAUSE_S = 0.25
"""Seconds between two writes to the log."""
_AHEAD = 4
"""Episodes that run for each that generates: the others search, or wait for their turn."""
_MAY_DIFFER = (*CHANGEABLE, "rollout.engine", "rollout.deterministic", "eval.max_failed",
               "model.path", "model.device", "search.index", "data.corpus", "cluster")  # fmt: skip
"""Keys, and a section, that do not decide what is answered, or whose content is compared instead."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one setting; `metrics` are those of `srl.evaluate.summarise`, prefixed with `eval/`.

    `run` is its run, and `generated` the number of episodes that were not in its log before.
    """

    results: list[EpisodeResult]
    metrics: dict[str, float]
    em_interval: Interval | None
    run: Path
    generated: int

    @classmethod
    def read(cls, runs: Sequence[Path], questions: Sequence[Question], n: int, generated: int) -> Evaluation:
        """The result of `n` episodes for each of `questions` from the logs of `runs`. Raises UserError."""
        logged = reading(runs, read_results)
        logged.sort(key=lambda result: result.valid)  # of shards, a whole episode counts before a failed one
        by_episode = {(result.question_id, result.sample): result for result in logged}
        keys = [(question.id, sample) for question in questions for sample in range(n)]
        if missing := sum(episode not in by_episode for episode in keys):
            raise UserError(f"{missing:,} episodes are not in the log of {runs[0].name}; repeat the command")
        results = [by_episode[episode] for episode in keys]
        metrics = summarise(results, prefix="eval")
        return cls(results, metrics, em_interval(results), runs[0], generated)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The measurement of a model in several settings on the same questions: its own first.

    A setting is `search`, `no_search` or the name of a baseline.

    `indexes` are the digests of those searched now, by retriever ("": the default one), `trained_with` those
    of training; empty if unknown. `usage` has the requests and tokens of a server. `sample` has the questions
    that were asked, by sets.
    """

    model: str
    files: tuple[str, ...]
    questions: int
    samples: int
    temperature: float
    templates: Mapping[str, str]
    indexes: Mapping[str, str]
    trained_with: Mapping[str, str]
    settings: Mapping[str, Evaluation]
    sample: Sample
    usage: Mapping[str, float] = field(default_factory=dict)

    def gain_over_closed_book(self, setting: str) -> float | None:
        """EM of the setting less closed-book EM; None for closed-book itself, and without it."""
        if CLOSED_BOOK not in self.settings or setting == CLOSED_BOOK:
            return None
        return self.settings[setting].metrics["eval/em"] - self.settings[CLOSED_BOOK].metrics["eval/em"]

    def check_failures(self, limit: float) -> None:
        """Raises CheckFailed when the share of episodes, or of searches, lost to faults is above `limit`."""
        for evaluation in self.settings.values():
            episodes = evaluation.metrics["eval/failed_share"]
            searches = evaluation.metrics["eval/env/failed_search_share"]
            if max(episodes, searches) > limit:
                lost = reading([evaluation.run], lambda log: read_records(log, "NOT valid"))
                failed = failed_episodes([record.trajectory for record in lost])
                raise CheckFailed(
                    f"{failed.what} failed in {episodes:.1%} of the episodes and {searches:.1%} of the "
                    f"searches, more than eval.max_failed={limit:g} ({failed.fault})"
                )


def evaluate_model(
    config: Config,
    files: Sequence[str],
    workspace: Workspace,
    *,
    n: int = 1,
    limit: int | None = None,
    baselines: Sequence[str] = (),
    preset: str = "defaults",
    runs: Sequence[Path] = (),
    shard: tuple[int, int] = (1, 1),
    note: Note = lambda text: None,
) -> ModelReport:
    """Measure the model `config.model.path` on the questions of `files`, with the settings of `config`.

    With rollout.engine=openai it is a server's model.
    `limit` draws that many questions, the same each time, of each data source as many (`question_sets.draw`).
    `baselines` (names in `srl.train.baselines`) are further settings on the same questions. `shard` (k, of):
    every `of`-th question from the `k`-th on.

    Each setting is a run of the workspace, with the name of `preset`. With `runs` an evaluation goes on: what
    their logs have is not generated again, and more is added to the first. Raises UserError.
    """
    if n > 1 and config.eval.temperature == 0:
        raise UserError(f"{n} samples at temperature 0 are all the same; type --temperature 1 as well")
    if runs and config.search.cassette_use is not None:
        raise UserError("an evaluation with a cassette starts over: leave out --run", key="search.cassette")
    settings = _settings(config, files, baselines)
    for name in baselines:
        if (longer := settings[name].data.max_prompt_length) > config.data.max_prompt_length:
            note(f"{name} has a longer prompt: data.max_prompt_length={longer} for it")
    earlier = runs_by_setting(runs)
    loaded = _load(config, settings, note)
    pools, sample = _questions(settings, files, loaded.codec, limit, shard, note)
    searches = any(setting.rollout.search for setting in settings.values())
    with new_cassette(config):
        search = load_search(config.with_settings({"rollout.search": searches}), workspace, note)
    evaluations: dict[str, Evaluation] = {}
    evaluation = RunRecord.read(runs[0]).evaluation if runs else ""
    try:
        for name, setting in settings.items():
            tool, places = (search if setting.rollout.search else None), earlier.get(name, [])
            for run in places:
                check_same(run, setting, index_digests(tool), pools[name])
            if not places:
                run = workspace.new_run(preset, EVALUATION, config.trainer.seed)
                save_config(run, setting)
                evaluation, inputs = evaluation or run.name, as_inputs(index_digests(tool))
                started = datetime.now(UTC).isoformat(timespec="seconds")
                record = RunRecord(
                    preset, EVALUATION, started, inputs=inputs, evaluation=evaluation, setting=name
                )
                record.save(run)
                places = [run]
            evaluations[name] = _evaluated(setting, name, loaded, tool, pools[name], places, n=n, note=note)
    finally:
        loaded.engine.close()
    return ModelReport(
        model=loaded.name, files=tuple(files), questions=len(next(iter(pools.values()))), samples=n,
        temperature=config.eval.temperature,
        templates={name: load_template(setting).name for name, setting in settings.items()},
        indexes=index_digests(search), trained_with=trained_with(config), usage=loaded.usage(),
        settings=evaluations, sample=sample,
    )  # fmt: skip


def _settings(config: Config, files: Sequence[str], baselines: Sequence[str]) -> dict[str, Config]:
    """The configuration of each setting; files without prompts of their own get the default template."""
    has_prompts = all(Path(file).suffix == ".parquet" for file in files)
    if config.data.template is None and not has_prompts:
        config = config.with_settings({"data.template": load_template(config).name})
    own = "search" if config.rollout.search else "no_search"
    return {own: config} | {name: baseline_config(config, name) for name in baselines}


def _load(config: Config, settings: Mapping[str, Config], note: Note) -> Generation:
    """What generates, with room for the longest episodes of all settings. Raises UserError."""
    data = max((setting.data for setting in settings.values()), key=lambda data: data.max_episode_tokens)
    lengths = ("max_prompt_length", "max_response_length")
    config = config.with_settings({f"data.{name}": getattr(data, name) for name in lengths})
    return load_generation(config, note)


def _questions(
    settings: Mapping[str, Config], files: Sequence[str], codec: Codec, limit: int | None,
    shard: tuple[int, int], note: Note,
) -> tuple[dict[str, list[Question]], Sample]:  # fmt: skip
    """The questions of each setting: those that fit in all settings, drawn by `limit`, and of these a shard;
    and the draw. Raises UserError."""
    pools = {name: load_questions(tuple(files), config, codec, note) for name, config in settings.items()}
    fitting = set.intersection(*({question.id for question in pool} for pool in pools.values()))
    questions = [question for question in next(iter(pools.values())) if question.id in fitting]
    sets: dict[str, list[str]] = {}
    for question in questions:
        sets.setdefault(question.data_source, []).append(question.id)
    sample = draw(sets, limit)
    drawn = {*sample.ids}
    ids = {*[question.id for question in questions if question.id in drawn][shard[0] - 1 :: shard[1]]}
    if not ids:
        raise UserError(f"fewer than {shard[1]} questions are left, so a shard has none", key="shard")
    pools = {name: [question for question in pool if question.id in ids] for name, pool in pools.items()}
    return pools, sample.within(ids)


def runs_by_setting(directories: Sequence[Path]) -> dict[str, list[Path]]:
    """The runs of the evaluations that `directories` are of, in the order of the names. Raises UserError."""
    runs: dict[str, list[Path]] = {}
    if strange := [run.name for run in directories if not RunRecord.read(run).evaluation]:
        raise UserError(f"{strange[0]} is not an evaluation", key="run")
    for name in dict.fromkeys(RunRecord.read(run).evaluation for run in directories):
        for file in sorted(directories[0].resolve().parent.glob(f"*/{RECORD}")):
            if is_evaluation(file.parent) and (record := RunRecord.read(file.parent)).evaluation == name:
                runs.setdefault(record.setting, []).append(file.parent)
    return runs


def check_same(run: Path, config: Config, digests: Mapping[str, str], questions: Iterable[Question]) -> None:
    """Raises UserError where `run` was of another configuration, index, or question of the same id."""
    hint = "leave out --run to start another evaluation"
    before, now = (dict(flat(each.model_dump(mode="json"))) for each in (load_saved(run), config))
    for path in before.keys() | now.keys():
        key, old, new = ".".join(path), before.get(path), now.get(path)
        if old != new and not key.startswith(_MAY_DIFFER):
            raise UserError(f"{key} was {old} in {run.name} and is {new}", key=key, hint=hint)
    if RunRecord.read(run).inputs != as_inputs(digests):
        raise UserError(f"{run.name} searched another index", key="search.index", hint=hint)
    query = f"SELECT question_id, {QUESTION_DIGEST} FROM trajectories"
    logged = dict(reading([run], lambda log: log.execute(query).fetchall())) if find_logs(run) else {}
    for question in questions:
        if question.id in logged and logged[question.id] != question_digest(question):
            raise UserError(f"the question {question.id} has changed since {run.name}", key="data", hint=hint)


def _evaluated(
    config: Config, setting: str, loaded: Generation, search: SearchTool | None,
    questions: Sequence[Question], runs: Sequence[Path], *, n: int, note: Note,
) -> Evaluation:  # fmt: skip
    """One setting: generate what the logs of its `runs` lack into the first, and read the result. What a
    fault ended is generated again."""
    run, record = runs[0], RunRecord.read(runs[0])
    columns = "question_id, sample, run_id, id, valid, coalesce(em, 0)"
    query = f"SELECT {columns} FROM trajectories WHERE phase = 'eval'"
    logs = [each for each in runs if find_logs(each)]
    rows = reading(logs, lambda log: log.execute(query).fetchall(), warn=note) if logs else []
    em = {(question, sample): value for question, sample, *_, valid, value in rows if valid}
    episodes = [(question, sample) for question in questions for sample in range(n)]
    done = [em[key] for question, sample in episodes if (key := (question.id, sample)) in em]
    wanted = [(question, sample) for question, sample in episodes if (question.id, sample) not in em]
    again = {(question.id, sample) for question, sample in wanted}
    replaced = {row[3] for row in rows if row[2] == run.name and row[:2] in again}
    note(f"evaluation {run.name}" + (f": its log has {len(done):,} of {len(episodes):,}" if done else ""))
    if not wanted:
        return Evaluation.read(runs, questions, n, 0)
    environment = load_environment(config, loaded.codec, search, note, loaded.engine)
    environment = environment.for_evaluation(config.eval.temperature)
    loaded.engine.reset()
    info = RunInfo(
        run_id=run.name, preset=record.preset, algo=EVALUATION, seed=config.trainer.seed, model=loaded.name,
        config=config.model_dump() | {"setting": setting}, index_digest=record.inputs.get("index", ""),
        srl_version=__version__, started=record.started,
    )  # fmt: skip
    # All run at once where their order of admission has to repeat.
    at_once = len(wanted) if config.rollout.deterministic else _AHEAD * config.rollout.max_num_seqs
    try:
        with (
            LogWriter(run / LOG, info, adds=True, warn=note) as log,
            counted(_WORDS.get(setting, f"episodes of {setting}"), len(episodes)) as count,
        ):
            count(len(done))

            def on_written(trajectories: Sequence[Trajectory]) -> None:
                for each in trajectories:
                    done.append(exact_match(each.answer, each.question.golden_answers) if each.valid else 0.0)
                count(len(done), f"EM {sum(done) / len(done):.3f}")

            if replaced:
                log.drop_trajectories(replaced)
            process.run_async(
                generate(
                    wanted, loaded.engine, environment, log, at_once=at_once, seed=config.trainer.seed,
                    on_written=on_written,
                )
            )  # fmt: skip
    except BaseException as error:
        if config.search.cassette_use is None:
            error.add_note(f"the same command with --run {run.name} continues the evaluation")
        raise
    return Evaluation.read(runs, questions, n, len(wanted))


_WORDS = {"search": "episodes with search", "no_search": "episodes without search"}


async def generate(
    episodes: Sequence[tuple[Question, int]],
    engine: Engine,
    environment: Environment,
    log: LogWriter,
    *,
    at_once: int,
    seed: int = 0,
    on_written: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
) -> None:
    """Run an episode for each question and sample number of `episodes`, `at_once` at a time, into `log`.

    What has ended is written every `PAUSE_S`, also where an error ends it, and not kept: memory does not grow
    with the questions. `on_written` is called with it. Raises UserError if a search server does not answer.
    """
    ended, last_write = list[Trajectory](), time.monotonic()

    def write() -> None:
        nonlocal last_write
        batch, ended[:] = ended[:], []
        if batch:
            log.write(0, "eval", [Record(trajectory) for trajectory in batch], {})
            on_written(batch)
        last_write = time.monotonic()

    async def on_done(_: int, trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if time.monotonic() - last_write >= PAUSE_S:
            write()

    keyed = ((question, Key(seed, "eval", 0, sample)) for question, sample in episodes)
    try:
        await connect(environment.search)
        await environment.play_each(engine, keyed, on_done, min(at_once, len(episodes)))
    finally:
        try:
            write()
        finally:
            await aclose(environment.search)
