"""`srl eval run`: run a model on questions, in the episodes of training and greedy by default; measure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from srl import process
from srl.answers import exact_match
from srl.config import Config
from srl.errors import CheckFailed, UserError
from srl.evaluate import EpisodeResult, Interval, em_interval, read_results, summarise
from srl.evaluate.question_sets import Sample, draw
from srl.progress import Count, counted
from srl.rollout.codec import Codec
from srl.rollout.environment import Environment
from srl.store import LogWriter, reading
from srl.train.baselines import CLOSED_BOOK, baseline_config
from srl.train.evaluation_run import About, Plan, check_same, generate, new_run, run_info, runs_by_setting
from srl.train.load_components import Generation, episode_options, load_generation, load_native
from srl.train.make_missing import Note
from srl.train.model_settings import trained_with
from srl.train.questions import (
    check_some_left,
    load_questions,
    load_template,
    warn_about_unlisted_retrievers,
)
from srl.train.run_directory import LOG, BackendName
from srl.train.search import ChangedIndex, changed_indexes, index_digests, load_search, new_cassette
from srl.trajectory import FailedEpisodes, Question, SearchTool, Trajectory
from srl.workspace import Workspace

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one setting; `metrics` are those of `srl.evaluate.summarise`, prefixed with `eval/`.

    `run` is its run, and `generated` the number of episodes that were not in its log before. `failed` counts
    the episodes that faults ended.
    """

    results: list[EpisodeResult]
    metrics: dict[str, float]
    em_interval: Interval | None
    run: Path
    generated: int
    failed: FailedEpisodes

    @classmethod
    def read(
        cls,
        runs: Sequence[Path],
        questions: Sequence[Question],
        n: int,
        generated: int,
    ) -> Evaluation:
        """The result of `n` episodes for each of `questions` from the logs of `runs`. Raises UserError."""
        logged, fault = reading(runs, lambda log: (read_results(log), _first_fault(log)))
        logged.sort(key=lambda result: result.valid)  # of shards, a whole episode counts before a failed one
        by_episode = {(result.question_id, result.sample): result for result in logged}
        keys = [(question.id, sample) for question in questions for sample in range(n)]
        missing = sum(episode not in by_episode for episode in keys)
        if missing:
            raise UserError(f"{missing:,} episodes are not in the log of {runs[0].name}; repeat the command")
        results = [by_episode[episode] for episode in keys]
        failed = FailedEpisodes(sum(not result.valid for result in results), len(results), *fault)
        metrics = summarise(results, prefix="eval")
        return cls(results, metrics, em_interval(results), runs[0], generated, failed)


_FAULTS = """
SELECT error, (
    SELECT arg_max(status || ': ' || searches.error, position) FROM searches
    WHERE (run_id, trajectory_id) = (trajectories.run_id, trajectories.id)
) AS search FROM trajectories WHERE phase = 'eval' AND NOT valid ORDER BY question_id, sample LIMIT 1
"""


def _first_fault(log: duckdb.DuckDBPyConnection) -> tuple[str, str]:
    """The first fault that ended an episode, in one line, and what had it; empty texts without one."""
    error, search = next(iter(log.execute(_FAULTS).fetchall()), ("", ""))
    return (str(error), "the engine") if error else (str(search or ""), "search")


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The measurement of a model in several settings on the same questions: its own first.

    A setting is `search`, `no_search` or the name of a baseline.

    `index_digest` is that of the index searched now, `trained_with` that of training; empty if unknown.
    `changed_indexes` are those with another digest than in training. `usage` has the requests and tokens of a
    server, and their cost where prices are set. `sample` has the questions that were asked, by sets.
    """

    model: str
    files: tuple[str, ...]
    questions: int
    samples: int
    temperature: float
    templates: Mapping[str, str]
    index_digest: str
    trained_with: str
    settings: Mapping[str, Evaluation]
    sample: Sample
    retriever_digests: Mapping[str, str] = field(default_factory=dict)
    changed_indexes: Sequence[ChangedIndex] = ()
    usage: Mapping[str, float] = field(default_factory=dict)

    def gain_over_closed_book(self, setting: str) -> float | None:
        """EM of the setting less closed-book EM; None for closed-book itself, and without it."""
        if CLOSED_BOOK not in self.settings or setting == CLOSED_BOOK:
            return None
        return self.settings[setting].metrics["eval/em"] - self.settings[CLOSED_BOOK].metrics["eval/em"]


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
    backend: BackendName = "local",
    note: Note = lambda text: None,
) -> ModelReport:
    """Measure the model `config.model.path` on the questions of `files`, with the settings of `config`.

    With rollout.engine=openai it is a server's model; on the `backend` verl, verl's rollout servers generate.
    `limit` draws that many questions, the same each time, of each data source as many (`question_sets.draw`).
    `baselines` (names in `srl.train.baselines`) are further settings on the same questions. `shard` (k, of):
    every `of`-th question from the `k`-th on.

    Each setting is a run of the workspace, with the name of `preset`. With `runs` an evaluation goes on: what
    their logs have is not generated again, and more is added to the first. Raises UserError.
    """
    check_samples(n, config.eval.temperature)
    if runs and config.search.cassette_use is not None:
        raise UserError("an evaluation with a cassette starts over: leave out --run", key="search.cassette")
    if backend == "verl":  # its servers answer in no fixed order
        config = config.with_settings({"rollout.deterministic": False})
    settings = _settings(config, files, baselines)
    for name in baselines:
        if (longer := settings[name].data.max_prompt_length) > config.data.max_prompt_length:
            note(f"{name} has a longer prompt: data.max_prompt_length={longer} for it")
    earlier = runs_by_setting(runs)
    loaded = _load(config, settings, backend, workspace, note)
    pools = _same_questions(settings, files, loaded.codec, note)
    first = next(iter(pools))
    sets: dict[str, list[str]] = {}
    for question in pools[first]:
        sets.setdefault(question.data_source, []).append(question.id)
    sample = draw(sets, limit)
    sampled_ids = {*sample.ids}
    ids = [question.id for question in pools[first] if question.id in sampled_ids]
    part = {*ids[shard[0] - 1 :: shard[1]]}
    sample = sample.within(part)
    pools = {name: [question for question in pool if question.id in part] for name, pool in pools.items()}
    if not pools[first]:
        raise UserError(f"fewer than {shard[1]} questions are left, so a shard has none", key="shard")
    if "search" in pools:
        warn_about_unlisted_retrievers(pools["search"], config, note)
    searches = any(setting.rollout.search for setting in settings.values())
    with new_cassette(config):
        search = load_search(config.with_settings({"rollout.search": searches}), workspace, note)
    evaluations: dict[str, Evaluation] = {}
    evaluation = About.read(runs[0]).evaluation if runs else ""
    try:
        for name, setting in settings.items():
            tool, places = (search if setting.rollout.search else None), earlier.get(name, [])
            for run in places:
                check_same(run, setting, index_digests(tool), pools[name])
            if not places:
                places = [new_run(setting, name, evaluation, workspace, preset, index_digests(tool))]
                evaluation = evaluation or places[0].name
            evaluations[name] = _evaluated(setting, name, loaded, tool, pools[name], places, n=n, note=note)
    finally:
        loaded.engine.close()
    searched, trained = index_digests(search), trained_with(config)
    return ModelReport(
        model=loaded.name,
        files=tuple(files),
        questions=len(pools[first]),
        samples=n,
        temperature=config.eval.temperature,
        templates={name: load_template(setting).name for name, setting in settings.items()},
        index_digest=searched.get("", ""),
        trained_with=trained.get("", ""),
        settings=evaluations,
        sample=sample,
        retriever_digests={name: digest for name, digest in searched.items() if name},
        changed_indexes=changed_indexes(searched, trained),
        usage=loaded.usage(),
    )


def _load(
    config: Config,
    settings: Mapping[str, Config],
    backend: BackendName,
    workspace: Workspace,
    note: Note,
) -> Generation:
    """What generates, with room for the longest episodes of all settings. Raises UserError."""
    data = max((setting.data for setting in settings.values()), key=lambda data: data.max_episode_tokens)
    lengths = ("max_prompt_length", "max_response_length")
    config = config.with_settings({f"data.{name}": getattr(data, name) for name in lengths})
    if backend == "verl":
        from srl.train.verl.rollout_servers import load_servers

        return load_servers(config, workspace, note)
    return load_generation(config, note)


def _evaluated(
    config: Config,
    setting: str,
    loaded: Generation,
    search: SearchTool | None,
    questions: Sequence[Question],
    runs: Sequence[Path],
    *,
    n: int,
    note: Note,
) -> Evaluation:
    """One setting: generate what the logs of its `runs` lack into the first, and read the result."""
    run, digests = runs[0], index_digests(search)
    environment = Environment(
        loaded.codec, load_template(config), episode_options(config), search,
        native=load_native(config, loaded.codec, search, note, loaded.engine),
    )  # fmt: skip
    plan = Plan.of(runs, questions, n, note)
    progress = f": {len(plan.done):,} of {n * len(questions):,} episodes are in its log" if plan.done else ""
    note(f"evaluation {run.name}{progress}")
    if plan.wanted:
        loaded.start()
        loaded.engine.reset()
        info = run_info(run, setting, loaded.name, config, digests)
        words = _WORDS.get(setting, f"episodes of {setting}")
        try:
            with (
                LogWriter(run / LOG, info, adds=True, warn=note) as log,
                counted(words, n * len(questions)) as count,
            ):
                if plan.replaced:
                    log.drop_trajectories(plan.replaced)
                process.run_async(
                    generate(
                        plan.wanted, loaded.engine, environment.for_evaluation(config.eval.temperature), log,
                        at_once=_window(config, len(plan.wanted), n, loaded.copies), seed=config.trainer.seed,
                        on_written=_RunningEm(count, plan.done),
                    )
                )  # fmt: skip
        except BaseException as error:
            if config.search.cassette_use is None:
                error.add_note(f"the same command with --run {run.name} continues the evaluation")
            raise
    return Evaluation.read(runs, questions, n, len(plan.wanted))


_WORDS = {"search": "episodes with search", "no_search": "episodes without search"}
_AHEAD = 4
"""Episodes that run for each that generates: the others search, or wait for their turn."""


def _window(config: Config, episodes: int, n: int, copies: int) -> int:
    """How many episodes run at the same time; all where their order of admission has to repeat."""
    return episodes if config.rollout.deterministic else _AHEAD * copies * config.rollout.max_num_seqs


class _RunningEm:
    """Shows the progress of an evaluation, with the exact match so far."""

    def __init__(self, count: Count, ems: Sequence[float]) -> None:
        self._count, self._ems = count, list(ems)
        count(len(ems))

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        for episode in trajectories:
            right = exact_match(episode.answer, episode.question.golden_answers) if episode.valid else 0.0
            self._ems.append(right)
        self._count(len(self._ems), f"EM {sum(self._ems) / len(self._ems):.3f}")


def check_samples(n: int, temperature: float) -> None:
    """Raises UserError for several samples at temperature 0, which are all the same."""
    if n > 1 and temperature == 0:
        raise UserError(f"{n} samples at temperature 0 are all the same; type --temperature 1 as well")


def check_failures(report: ModelReport, limit: float) -> None:
    """Raises CheckFailed when the share of episodes, or of searches, lost to faults is above `limit`."""
    for evaluation in report.settings.values():
        episodes, searches = (evaluation.metrics[f"eval/{name}"] for name in _LOST_SHARES)
        if max(episodes, searches) > limit:
            failed = evaluation.failed
            raise CheckFailed(
                f"{failed.what} failed in {episodes:.1%} of the episodes and {searches:.1%} of the searches, "
                f"more than eval.max_failed={limit:g} ({failed.fault})"
            )


_LOST_SHARES = ("failed_share", "env/failed_search_share")


def _settings(config: Config, files: Sequence[str], baselines: Sequence[str]) -> dict[str, Config]:
    """The configuration of each setting; files without prompts of their own get the default template."""
    has_prompts = all(Path(file).suffix == ".parquet" for file in files)
    if config.data.template is None and not has_prompts:
        config = config.with_settings({"data.template": load_template(config).name})
    own = "search" if config.rollout.search else "no_search"
    return {own: config} | {name: baseline_config(config, name) for name in baselines}


def _same_questions(
    settings: Mapping[str, Config],
    files: Sequence[str],
    codec: Codec,
    note: Note,
) -> dict[str, list[Question]]:
    """The questions of each setting: those that fit in all settings."""
    loaded = {name: load_questions(tuple(files), config, codec, note) for name, config in settings.items()}
    ids = set.intersection(*({question.id for question in questions} for questions in loaded.values()))
    check_some_left(list(ids), files)
    return {name: [question for question in pool if question.id in ids] for name, pool in loaded.items()}
