"""Errors that would end a run at its start, found without starting it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from srl.config import Config
from srl.config.sections import NamedRetriever, Search
from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import read_questions
from srl.errors import CheckFailed, UserError
from srl.index import check_index
from srl.index.retriever import load_retriever
from srl.models.hub import HubName
from srl.models.load import check_directory, check_tags
from srl.plugins import manager
from srl.rollout.codec import Codec
from srl.serve.cassette import Replay
from srl.serve.request import retrieve_url
from srl.train.load_components import load_algorithm, load_rewards
from srl.train.load_protocol import is_native, load_codec, load_template, native_glue
from srl.train.make_missing import check_corpus_exists, start_of, unusable_files
from srl.train.questions import check_training_questions, load_split
from srl.train.report import check_loggers
from srl.trajectory import Phase

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def startup_errors(config: Config, *checks: Callable[[], object]) -> list[str]:
    """A line for each error in model, data, prompt, plugins, and what is searched, and for those of `checks`.

    No server is contacted.
    """
    errors = list(unusable_files(config))

    def check(
        what: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result | None:
        try:
            return what(*args, **options)
        except (UserError, CheckFailed) as error:
            errors.append(str(error))
            return None

    model, data, search = config.model, config.data, config.search
    check(check_loggers, config.trainer.logger)
    check(load_algorithm, config)
    for name in config.reward.weights:
        check(manager.load, "reward", name, config.reward.options(name))
    for path in filter(None, (model.path, config.ref.path)):
        if Path(path).is_dir():
            check(check_directory, Path(path), model.trust_remote_code)
    if model.path is None and config.sft.train_files is not None:
        check(read_demonstrations, Path(config.sft.train_files))

    template, start, codec = check(load_template, config), start_of(config), None
    if not HubName.parse(model.tokenizer or start):
        codec = check(load_codec, model.model_copy(update={"path": str(start)}), None, lambda note: None)
    if codec is not None:
        if template is not None:
            check(codec.encode_prompt, template.messages("Who?"))
        if is_native(config):
            check(native_glue, config.with_settings({"model.path": str(start)}))
        else:
            check(check_tags, codec.tokenizer)
    phases: tuple[Phase, ...] = ("train", "val", "test")
    for phase in phases:
        files = getattr(data, f"{phase}_files") or ()
        excluded = (data.exclude_files or ()) if phase == "train" else ()
        if codec is not None and all(Path(file).is_file() for file in (*files, *excluded)):
            check(_check_split, phase, config, codec)
        else:
            for name in filter(lambda file: Path(file).is_file(), files):
                check(read_questions, name)

    mode, file = search.cassette_use or ("", "")
    if config.rollout.search and mode == "replay":
        check(Replay, file, topk=search.topk)
    elif config.rollout.search:
        if mode == "record" and Path(file).exists():
            errors.append(f"{file} already exists; name another file (search.cassette)")
        if data.corpus is not None:
            check(check_corpus_exists, Path(data.corpus))
        if search.url is None and search.index is None:
            check(load_retriever, config.retriever.name, config.retriever.options(config.retriever.name))
        for named in search.retrievers.values():
            if named.retriever is not None:
                check(load_retriever, named.retriever, named.options)
        sources: list[Search | NamedRetriever] = [search, *search.retrievers.values()]
        for source in sources:
            for url in source.url or ():
                check(retrieve_url, url)
            if source.index is not None:
                check(check_index, Path(source.index))
    for further in checks:
        check(further)
    return list(dict.fromkeys(errors))


def _check_split(phase: Phase, config: Config, codec: Codec) -> None:
    """The questions of one phase; there are some to train on, which fit `data.mix`."""
    questions = load_split(phase, config, codec, lambda note: None)
    if phase == "train" and config.data.train_files:
        check_training_questions(questions, config, config.algorithm.name)
        for line in load_rewards(config).without_effect(questions):
            raise UserError(line)
