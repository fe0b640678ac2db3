"""Errors that would end a run at its start, found without starting it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from srl.config import Config
from srl.config.sections import NamedRetriever, Search
from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import read_questions
from srl.errors import CheckFailed, UserError
from srl.index import check_index
from srl.index.retriever import load_retriever
from srl.models.hub import HubName
from srl.models.load import check_directory, check_tags, load_tokenizer
from srl.plugins import manager
from srl.rollout.codec import Codec
from srl.serve.cassette import Replay
from srl.serve.request import retrieve_url
from srl.train.load_components import load_algorithm, load_rewards
from srl.train.load_protocol import choose_template, is_native, load_codec, load_template, native_glue
from srl.train.make_missing import check_corpus_exists, start_of, unusable_files
from srl.train.questions import check_training_questions, load_split
from srl.train.report import check_loggers
from srl.trajectory import Phase

Check = Callable[[], object]


def startup_errors(config: Config, *checks: Check) -> Iterator[str]:
    """A line for each error in model, data, prompt, plugins, and what is searched, and for those of `checks`.

    No server is contacted.
    """
    errors = list(unusable_files(config))
    for check in (*_of_model(config), *_of_questions(config), *_of_search(config), *checks):
        try:
            check()
        except (UserError, CheckFailed) as error:
            errors.append(str(error))
    yield from dict.fromkeys(errors)


def _of_model(config: Config) -> Iterator[Check]:
    model = config.model
    yield partial(check_loggers, config.trainer.logger)
    yield partial(load_algorithm, config)
    for path in filter(None, (model.path, config.ref.path)):
        if Path(path).is_dir():
            yield partial(check_directory, Path(path), model.trust_remote_code)
    if model.tokenizer is not None and not HubName.parse(model.tokenizer):
        yield partial(load_tokenizer, model.tokenizer, model.trust_remote_code)
    for name in config.reward.weights:
        yield partial(manager.load, "reward", name, config.reward.options(name))


def _of_questions(config: Config) -> Iterator[Check]:
    """The questions and the length of their prompts; the files alone if no tokenizer can be loaded."""
    yield partial(load_template, config)
    if config.model.path is None and config.sft.train_files is not None:
        yield partial(read_demonstrations, Path(config.sft.train_files))
    codec: Codec | None = None
    with suppress(UserError):  # another check reports it
        section = config.model.model_copy(update={"path": str(start_of(config))})
        codec = load_codec(section, None, lambda note: None)
        yield partial(codec.encode_prompt, choose_template(config).messages("Who?"))
        if is_native(config):
            yield partial(native_glue, config.with_settings({"model.path": str(start_of(config))}))
        else:
            yield partial(check_tags, codec.tokenizer)
    for phase in ("train", "val", "test"):
        files = getattr(config.data, f"{phase}_files") or ()
        excluded = (config.data.exclude_files or ()) if phase == "train" else ()
        if codec is not None and all(Path(file).is_file() for file in (*files, *excluded)):
            yield partial(_check_split, phase, config, codec)
        else:
            yield from (partial(read_questions, file) for file in files if Path(file).is_file())


def _check_split(phase: Phase, config: Config, codec: Codec) -> None:
    """The questions of one phase; there are some to train on, which fit `data.mix`."""
    questions = load_split(phase, config, codec, lambda note: None)
    if phase == "train" and config.data.train_files:
        check_training_questions(questions, config, config.algorithm.name)
        for line in load_rewards(config).without_effect(questions):
            raise UserError(line)


def _of_search(config: Config) -> Iterator[Check]:
    """A cassette to replay must match the search settings; one to record must not exist yet. Retrievers are
    made of their options."""
    if not config.rollout.search:
        return
    search, (mode, file) = config.search, config.search.cassette_use or ("", "")
    if mode == "replay":
        yield partial(Replay, file, topk=search.topk)
        return
    if mode == "record" and Path(file).exists():
        yield partial(_raise, UserError(f"{file} already exists; name another file", key="search.cassette"))
    if config.data.corpus is not None:
        yield partial(check_corpus_exists, Path(config.data.corpus))
    if search.url is None and search.index is None:
        yield partial(load_retriever, config.retriever.name, config.retriever.options(config.retriever.name))
    for retriever in search.retrievers.values():
        if retriever.retriever is not None:
            yield partial(load_retriever, retriever.retriever, retriever.options)
    sources: list[Search | NamedRetriever] = [search, *search.retrievers.values()]
    for source in sources:
        yield from (partial(retrieve_url, url) for url in source.url or ())
        if source.index is not None:
            yield partial(check_index, Path(source.index))


def _raise(error: Exception) -> None:
    raise error
