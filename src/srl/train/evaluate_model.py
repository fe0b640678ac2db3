"""`srl eval run`: run a model on questions, in the episodes of training and greedy by default; measure it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl import process
from srl.config import Config, load_config
from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import plain
from srl.config.load import SAVED, read_layers, typed_keys
from srl.config.unread import Kind, unread, unread_lines
from srl.errors import CheckFailed, UserError
from srl.evaluate import EpisodeResult, Interval, em_interval, read_results, summarise
from srl.evaluate.coverage import WrittenCoverage, coverage_metrics, write_coverage
from srl.evaluate.sample import Sample, Selection
from srl.progress import counted
from srl.protocol import TEMPLATES, WITHOUT_SEARCH
from srl.rollout.codec import Codec
from srl.rollout.environment import Environment
from srl.store import LogWriter, reading
from srl.train.baselines import CLOSED_BOOK, baseline_config
from srl.train.evaluation.coverage import evaluation_coverage
from srl.train.evaluation.generate import RunningEm, generate
from srl.train.evaluation.run import evaluation_run, run_info
from srl.train.evaluation.subject import subject_of
from srl.train.fetch_models import with_local_models
from srl.train.load_components import Generation, episode_options, load_generation
from srl.train.make_missing import Note
from srl.train.model_card import read_card
from srl.train.questions import (
    check_some_left,
    load_questions,
    load_template,
    warn_about_unlisted_retrievers,
)
from srl.train.resume import tells_how_to_resume
from srl.train.run_directory import CHECKPOINTS, RECORD, BackendName, RunRecord
from srl.train.search import ChangedIndex, IndexDigests, load_search, new_cassette
from srl.trajectory import FailedEpisodes, Question, SearchTool
from srl.workspace import Workspace

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one setting; `metrics` are those of `srl.evaluate.summarise`, prefixed with `eval/`.

    Where the coverage of the questions is known, they include `srl.evaluate.coverage.coverage_metrics`.

    `run` is its run, and `generated` the number of episodes that were not in its log before. `failed` counts
    the episodes that faults ended. `coverage` is that of this evaluation, not of an earlier one of its run.
    """

    results: list[EpisodeResult]
    metrics: dict[str, float]
    em_interval: Interval | None
    run: Path
    generated: int
    failed: FailedEpisodes
    coverage: WrittenCoverage | None = None

    @classmethod
    def read(
        cls,
        run: Path,
        questions: Sequence[Question],
        n: int,
        generated: int,
        coverage: WrittenCoverage | None = None,
    ) -> Evaluation:
        """The result of `n` episodes for each of `questions` from the log of `run`. Raises UserError."""
        found, fault = reading([run], lambda log: (read_results(log), _first_fault(log)))
        by_episode = {(item.question_id, item.sample): item for item in found}
        asked = [(item.id, sample) for item in questions for sample in range(n)]
        lacking = sum(episode not in by_episode for episode in asked)
        if lacking:
            raise UserError(f"{lacking:,} episodes are not in the log of {run.name}; repeat the command")
        results = [by_episode[episode] for episode in asked]
        failed = FailedEpisodes(sum(not item.valid for item in results), len(results), *fault)
        metrics = summarise(results, prefix="eval")
        if coverage is not None:
            metrics |= coverage_metrics(results, coverage.found)
        return cls(results, metrics, em_interval(results), run, generated, failed, coverage)


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
    server, and their cost where prices are set. `sample` has the questions of a `Selection`, by sets.
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
    retriever_digests: Mapping[str, str] = field(default_factory=dict)
    changed_indexes: Sequence[ChangedIndex] = ()
    usage: Mapping[str, float] = field(default_factory=dict)
    sample: Sample | None = None

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
    no_search_too: bool = False,
    no_search_template: str | None = None,
    baselines: Sequence[str] = (),
    preset: str = "defaults",
    fresh: bool = False,
    backend: BackendName = "local",
    questions: Sequence[Question] | None = None,
    selection: Selection | None = None,
    note: Note = lambda text: None,
) -> ModelReport:
    """Measure the model `config.model.path` on the questions of `files`, with the settings of `config`.

    With rollout.engine=openai it is a server's model; on the `backend` verl, verl's rollout servers generate.
    `limit` draws that many questions, the same each time; `selection` draws them by sets, and each run gets a
    file of them. `questions` are those of `files` where the caller has read them. `baselines` (names in
    `srl.train.baselines`) are further settings on the same questions.

    Each setting is a run of the workspace, with the name of `preset`. Episodes in the log of an earlier run
    of the same evaluation are not generated again, unless `fresh` or with a cassette. Raises UserError.
    """
    check_samples(n, config.eval.temperature)
    if backend == "verl":  # its servers answer in no fixed order
        config = config.with_settings({"rollout.deterministic": False})
    settings = _settings(config, files, no_search_too, no_search_template, baselines)
    _tell_longer(config, settings, baselines, note)
    loaded = _load(_with_longest(config, settings.values()), backend, n, workspace, note)
    asked = _same_questions(settings, files, questions, loaded.codec, note, limit)
    sample = None if selection is None else selection.draw(next(iter(asked.values())))
    if sample is not None:
        asked = _only(set(sample.ids), asked)
    if "search" in asked:
        warn_about_unlisted_retrievers(asked["search"], config, note)
    with new_cassette(config):
        search = load_search(_with_search(config, settings.values()), workspace, note)
    coverage = evaluation_coverage(next(iter(asked.values())), search, workspace, note)
    fresh = fresh or config.search.cassette_use is not None
    try:
        found = {
            name: _evaluated(
                setting, name, loaded, search if setting.rollout.search else None, asked[name], workspace,
                n=n, preset=preset, fresh=fresh, coverage=coverage, note=note,
            )
            for name, setting in settings.items()
        }  # fmt: skip
    finally:
        loaded.engine.close()
    if selection is not None and sample is not None:
        for one in found.values():
            selection.save(sample, one.run)
    searched, trained = IndexDigests.of(search), trained_with(config)
    return ModelReport(
        model=loaded.name,
        files=tuple(files),
        questions=len(asked[next(iter(asked))]),
        samples=n,
        temperature=config.eval.temperature,
        templates={name: load_template(setting).name for name, setting in settings.items()},
        index_digest=searched.index_digest,
        trained_with=trained.index_digest,
        settings=found,
        retriever_digests=searched.retriever_digests,
        changed_indexes=searched.changed_since(trained),
        usage=loaded.usage(),
        sample=sample,
    )


def _with_longest(config: Config, settings: Iterable[Config]) -> Config:
    """`config` with the lengths of the setting that has the longest episodes."""
    data = max((setting.data for setting in settings), key=lambda found: found.max_episode_tokens)
    lengths = ("max_prompt_length", "max_response_length")
    return config.with_settings({f"data.{name}": getattr(data, name) for name in lengths})


def _with_search(config: Config, settings: Iterable[Config]) -> Config:
    """`config`, with search if one of the settings searches."""
    return config.with_settings({"rollout.search": any(setting.rollout.search for setting in settings)})


def _tell_longer(
    config: Config, settings: Mapping[str, Config], baselines: Sequence[str], note: Note
) -> None:
    """Tell of the baselines that need longer prompts, which may not fit into the model's context."""
    for name in baselines:
        if (longest := settings[name].data.max_prompt_length) > config.data.max_prompt_length:
            note(f"{name} has a longer prompt: data.max_prompt_length={longest} for it")


def _load(config: Config, backend: BackendName, n: int, workspace: Workspace, note: Note) -> Generation:
    """What generates, with the settings of `config`. Raises UserError."""
    if backend == "verl":
        from srl.train.verl.rollout_servers import load_servers

        return load_servers(config, workspace, note)
    return load_generation(config.with_settings({"rollout.max_num_seqs": _episodes_at_once(config, n)}), note)


def _evaluated(
    config: Config,
    setting: str,
    loaded: Generation,
    search: SearchTool | None,
    questions: Sequence[Question],
    workspace: Workspace,
    *,
    n: int,
    preset: str,
    fresh: bool,
    coverage: WrittenCoverage | None,
    note: Note,
) -> Evaluation:
    """One setting: find or start its run, generate what its log lacks, and read the result from the log."""
    template = load_template(config)
    options = episode_options(config).for_evaluation(config.eval.temperature)
    subject = subject_of(
        config, loaded.name, setting=setting, template=template, options=options, search=search,
        engine=loaded.about,
    )  # fmt: skip
    digests = IndexDigests.of(search)
    with evaluation_run(
        subject, questions, config, workspace, preset=preset, digests=digests, fresh=fresh, note=note
    ) as run:
        if coverage is not None:
            write_coverage(run.path, coverage)
        plan = run.logged.plan(questions, n)
        told = f": {len(plan.done):,} of {n * len(questions):,} episodes are in its log" if plan.done else ""
        note(f"evaluation {run.path.name}{told}")
        if plan.wanted:
            loaded.start()
            loaded.engine.reset()
            words = _WORDS.get(setting, f"episodes of {setting}")
            info = run_info(run.path, subject, config, digests)
            with (
                tells_how_to_resume(lambda: _how_to_continue(config, fresh), run.path),
                LogWriter(run.log, info, adds=True, warn=note) as log,
                counted(words, n * len(questions)) as count,
            ):
                if plan.replaced:
                    log.drop_trajectories(plan.replaced)
                process.run_async(
                    generate(
                        plan.wanted, loaded.engine, Environment(loaded.codec, template, options, search), log,
                        at_once=_window(config, len(plan.wanted), n, loaded.copies),
                        seed=config.trainer.seed, on_written=RunningEm(count, plan.done),
                    )
                )  # fmt: skip
        return Evaluation.read(run.path, questions, n, len(plan.wanted), coverage)


def _how_to_continue(config: Config, fresh: bool) -> str:
    """What is said when an evaluation is stopped."""
    mode, cassette = config.search.cassette_use or ("", "")
    if mode == "record":
        return f"an evaluation that records starts over: remove {cassette}, or name another cassette"
    if mode:
        return "an evaluation that replays a cassette starts over"
    return f"the same command{' without --fresh' if fresh else ''} continues the evaluation"


_WORDS = {"search": "episodes with search", "no_search": "episodes without search"}
_AHEAD = 4
"""Episodes that run for each that generates: the others search, or wait for their turn."""


def _window(config: Config, episodes: int, n: int, copies: int) -> int:
    """How many episodes run at the same time; all where their order of admission has to repeat."""
    return episodes if config.rollout.deterministic else _AHEAD * copies * _episodes_at_once(config, n)


def trained_with(config: Config) -> IndexDigests:
    """The indexes that the model's card names; none without a directory."""
    return IndexDigests.read({} if config.model.path is None else read_card(Path(config.model.path)))


def check_samples(n: int, temperature: float) -> None:
    """Raises UserError for several samples at temperature 0, which are all the same."""
    if n > 1 and temperature == 0:
        raise UserError(f"{n} samples at temperature 0 are all the same; type --temperature 1 as well")


def check_failures(report: ModelReport, limit: float) -> None:
    """Raises CheckFailed when the share of episodes, or of searches, lost to faults is above `limit`."""
    for evaluation in report.settings.values():
        episodes, searches = (evaluation.metrics[f"eval/{name}"] for name in _LOST_SHARES)
        if max(episodes, searches) > limit:
            found = evaluation.failed
            raise CheckFailed(
                f"{found.what} failed in {episodes:.1%} of the episodes and {searches:.1%} of the searches, "
                f"more than eval.max_failed={limit:g} ({found.fault})"
            )


_LOST_SHARES = ("failed_share", "env/failed_search_share")


def local_settings(
    model: Path | None,
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    workspace: Workspace,
    note: Note,
    kind: Kind = "eval",
    backend: BackendName = "local",
) -> Config:
    """`settings_of` a model that may have to be fetched or converted first.

    `note` is told what of `flags` and `sets` such a run does not read. A preset or a file is that of the
    training, whose other settings are not meant for it.
    """
    settings = settings_of(model, preset, file, flags, sets)
    local = with_local_models(settings, workspace, note)
    if model is not None and local.model.path != settings.model.path:
        known = settings_of(Path(str(local.model.path)), preset, file, flags, sets)
        local = with_local_models(known, workspace, note)
    typed = typed_keys(flags, sets)
    ignored = unread(local, typed, kind, backend, algorithm_plugin(local.algorithm.name))
    for line in [*unread_lines(ignored), *_not_of_the_file(preset, file, local, typed)]:
        note(f"warning: {line}")
    return local


def _not_of_the_file(
    preset: str | None, file: Path | None, config: Config, typed: Sequence[str]
) -> Iterator[str]:
    """A line for each setting of `file` that the model's card overrides; not for those `typed`."""
    if file is None:
        return
    given = {".".join(setting.path): setting.value for setting in read_layers(preset, file)[-1].settings}
    for key in ("data.template", "rollout.search"):
        asked, used = given.get(key), attrgetter(key)(config)
        if key in given and asked != used and key not in typed:
            yield f"{key} = {plain(asked)} of {file} is not used: the model was trained with {plain(used)}"


def preset_name(model: Path | None, preset: str | None, file: Path | None) -> str:
    """The name of the settings that `settings_of` returns: the preset's, the file's, or the model's run's."""
    if file is not None or preset is not None:
        return preset or Path(str(file)).stem
    run = _run_of(model)
    return RunRecord.read(run).preset if run is not None and (run / RECORD).is_file() else "defaults"


def _run_of(model: Path | None) -> Path | None:
    """The directory of the run whose checkpoint `model` is."""
    folder = None if model is None else model.resolve().parent
    return folder.parent if folder is not None and folder.name == CHECKPOINTS else None


def settings_of(
    model: Path | None,
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
) -> Config:
    """The configuration to measure `model` with: that of `file`, of `preset`, or of the model's own run.

    Without any of these it is the defaults, Search-R1's sizes. Without a `model`, a server's is measured. The
    template is the model's, if its `srl.json` names one. An index or a server in `flags` replaces whatever
    was searched in training. The cassette and the expected digest of the model's run do not apply.
    """
    run = _run_of(model)
    cleared = ["model.lora_rank=0", "model.gradient_checkpointing=false"]
    cleared += [] if model is None else ["model.tokenizer=null"]
    if file is None and preset is None and run is not None and (run / SAVED).is_file():
        file = run / SAVED
        cleared += ["search.cassette=null", "search.digest=null"]
    known = {} if model is None else read_card(model)
    talk = {"data.template": _template_of(known), "rollout.search": known.get("search")}
    given = {key: value for key, value in flags.items() if value is not None}
    if given.keys() & _SEARCHED:
        cleared += ["data.corpus=null", *(f"{key}=null" for key in sorted(_SEARCHED - given.keys()))]
    known_flags = {"model.path": model, **talk, **given}
    return load_config(preset, file, None, known_flags, [*cleared, *sets], trains=False).config


def _template_of(known: Mapping[str, Any]) -> object:
    """The model's template; None for a template file that no longer exists, so that the run's is used."""
    name = known.get("template")
    return None if isinstance(name, str) and name not in TEMPLATES and not Path(name).is_file() else name


_SEARCHED = {"search.index", "search.url"}


def _settings(
    config: Config,
    files: Sequence[str],
    no_search_too: bool,
    no_search_template: str | None,
    baselines: Sequence[str],
) -> dict[str, Config]:
    """The configuration of each setting; files without prompts of their own get the default template."""
    has_prompts = all(Path(file).suffix == ".parquet" for file in files)
    if config.data.template is None and not has_prompts:
        config = config.with_settings({"data.template": load_template(config).name})
    settings = {"search" if config.rollout.search else "no_search": config}
    if no_search_too and config.rollout.search:
        plain = no_search_template or WITHOUT_SEARCH.get(config.data.template or "search-r1", "r1")
        settings["no_search"] = config.with_settings({"rollout.search": False, "data.template": plain})
    return settings | {name: baseline_config(config, name) for name in baselines}


def _same_questions(
    settings: Mapping[str, Config],
    files: Sequence[str],
    read: Sequence[Question] | None,
    codec: Codec,
    note: Note,
    limit: int | None,
) -> dict[str, list[Question]]:
    """The questions of each setting: those that fit in all settings."""
    loaded = {
        name: load_questions(tuple(files), config, codec, note, read=read)
        for name, config in settings.items()
    }
    ids = set.intersection(*({item.id for item in questions} for questions in loaded.values()))
    shared = [item.id for item in next(iter(loaded.values())) if item.id in ids]
    if limit is not None and limit < len(shared):
        shared = random.Random(0).sample(shared, limit)
    check_some_left(shared, files)
    return _only(set(shared), loaded)


def _only(ids: set[str], asked: Mapping[str, Sequence[Question]]) -> dict[str, list[Question]]:
    """Of the questions of each setting those with these ids."""
    return {name: [item for item in questions if item.id in ids] for name, questions in asked.items()}


def _episodes_at_once(config: Config, n: int) -> int:
    """How many episodes generate at the same time."""
    return config.eval.batch_size * n if config.eval.batch_size else config.rollout.max_num_seqs
