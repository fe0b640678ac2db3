"""What a start would refuse, found out without starting: `srl train --dry-run` says it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from srl.config import Config
from srl.config.acting import Engine, Search
from srl.data.parquet import read_questions
from srl.errors import CheckFailed, UserError
from srl.index.opened import check_index
from srl.model import check_directory, load_tokenizer
from srl.serve.cassette import Replay
from srl.serve.client.request import retrieve_url
from srl.train.materials import absent_questions
from srl.train.report import check_loggers
from srl.train.setup import load_template


def refusals(config: Config) -> Iterator[str]:
    """A line for each: model, files of questions, template, and what is searched. No server is asked."""
    yield from absent_questions(config)
    for check in _checks(config):
        try:
            check()
        except (UserError, CheckFailed) as error:
            yield str(error)


def _checks(config: Config) -> Iterator[Callable[[], object]]:
    data, model = config.data, config.model
    yield partial(check_loggers, config.trainer.logger)
    for path in filter(None, (model.path, config.ref.path)):
        if Path(path).is_dir():
            yield partial(check_directory, Path(path), model.trust_remote_code)
    if model.tokenizer is not None:
        yield partial(load_tokenizer, model.tokenizer, model.trust_remote_code)
    for file in [*(data.train_files or ()), *(data.val_files or ()), *(data.test_files or ())]:
        if Path(file).exists():
            yield partial(read_questions, file)
    yield partial(load_template, config)
    if config.rollout.search:
        yield partial(_check_tape, config)
    if config.rollout.search and not config.search.replays:
        yield from _searched(config)


def _searched(config: Config) -> Iterator[Callable[[], object]]:
    search, corpus = config.search, config.data.corpus
    if corpus is not None:
        yield partial(_check_corpus, Path(corpus))
    places: list[Search | Engine] = [search, *search.engines.values()]
    for place in places:
        yield from (partial(retrieve_url, url) for url in place.url or ())
        if place.index is not None:
            yield partial(check_index, place.index)


def _check_corpus(corpus: Path) -> None:
    if not corpus.is_file():
        raise UserError(f"no corpus at {corpus}; set data.corpus to a JSONL file of {{id, contents}}")


def _check_tape(config: Config) -> None:
    """A tape that is replayed is one of these searches, and one that is recorded is not there."""
    mode, file = config.search.tape or ("", "")
    if mode == "replay":
        Replay(file, topk=config.search.topk)
    if mode == "record" and Path(file).exists():
        raise UserError(f"search.cassette: the tape {file} is there already; name another file")
