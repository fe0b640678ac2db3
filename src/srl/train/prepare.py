"""What a run needs before it can start: world, corpus, index, questions, model, made where absent."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.config.sections import Model
from srl.data.parquet import read_questions
from srl.errors import UserError
from srl.files import digest_file, digest_text
from srl.index import build_index, load_retriever
from srl.index.build import build_parameters
from srl.inputs import check_input
from srl.progress import counted, counted_stages
from srl.protocol import WITHOUT_SEARCH, Template, template
from srl.rollout.codec import Codec
from srl.trajectory import Question
from srl.workspace import Workspace

Note = Callable[[str], None]
WORLD_SEED = 0
NOTHING_TO_SEARCH = (
    "nothing to search: set search.index (a directory made by `srl index build`), search.url (a server), or "
    "data.corpus (a JSONL file); or rollout.search=false"
)
BASE_MODEL = Path(__file__).parent.parent / "presets" / "base"


def world(workspace: Workspace, note: Note) -> Path:
    """The embedded world's directory, written first where it is not there."""
    from srl.data.world import write_world

    def write(path: Path) -> None:
        note(f"writing the world to {path}")
        write_world(path, WORLD_SEED)

    return make_if_missing(workspace.worlds / f"world-s{WORLD_SEED}", write)


def make_if_missing(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made where it is not there; another run that began at the same time may be the first."""
    if path.is_dir():
        return path
    try:
        make(path)
    except UserError:
        if not path.is_dir():
            raise
    return path


def with_data(config: Config, workspace: Workspace, note: Note) -> Config:
    """`config` with the world's files in place of the training, validation, test and corpus left out.

    Files of the user's own are never mixed with the world's: with `data.train_files` set, nothing is
    filled in, and `data.corpus` alone is an error.
    """
    check_data(config)
    for complaint in unusable_files(config):
        raise UserError(complaint)
    if config.data.train_files is not None:
        return config
    if config.search.index is not None or config.search.url is not None:
        note("data.train_files is not set: the questions are the made-up world's, about its own pages")
    folder = world(workspace, note)
    files = {"train_files": "train", "val_files": "validation", "test_files": "test"}
    data: dict[str, Any] = {key: (str(folder / f"{name}.parquet"),) for key, name in files.items()}
    if config.search.index is None and config.search.url is None:
        data["corpus"] = str(folder / "corpus.jsonl")
    given = config.data.model_dump(exclude_none=True)
    return config.model_copy(update={"data": config.data.model_copy(update={**data, **given})})


def check_data(config: Config) -> None:
    """Raises UserError where the world's questions would be asked of a corpus of the user's own, or where
    the user's own questions have nothing to be searched in."""
    data, search = config.data, config.search
    if data.train_files is None and data.corpus is not None:
        raise UserError(
            f"data.corpus={data.corpus} without data.train_files: the made-up world's questions are not "
            "about that corpus; set data.train_files too, or leave both out"
        )
    named = (data.corpus, search.index, search.url)
    if data.train_files is not None and config.rollout.search and not any(named) and not search.replays:
        raise UserError(NOTHING_TO_SEARCH)


def unusable_files(config: Config) -> Iterator[str]:
    """A line for each file of questions that is not there, and each pipe, which `--resume` could not read."""
    data = config.data
    for file in filter(None, (data.corpus, config.sft.train_files)):
        yield from _unreadable(Path(file))
    for key in ("train_files", "val_files", "test_files"):
        for file in getattr(data, key) or ():
            yield from _unreadable(Path(file))
            folder = Path(file).parent
            if not Path(file).exists():
                yield (
                    f"{file}: no such file (data.{key}); `srl data prepare SOURCE --val 512 --out "
                    f"{folder / 'my-data' if folder.exists() else folder}` writes train.parquet and "
                    "validation.parquet there; `srl data list` names the sources"
                )


def _unreadable(path: Path) -> Iterator[str]:
    """What keeps something that is there from being read more than once."""
    try:
        if path.exists():
            check_input(path, regular=True)
    except UserError as error:
        yield str(error)


def index_of(config: Config, workspace: Workspace, note: Note) -> Path:
    """The index directory to search: the one configured, or that of the corpus, built where absent."""
    if config.search.index is not None:
        return Path(config.search.index)
    if config.data.corpus is None:
        raise UserError(NOTHING_TO_SEARCH)
    corpus, name = Path(config.data.corpus), config.retriever.name
    if not corpus.exists():
        raise UserError(f"no corpus at {corpus}; set data.corpus to a JSONL file of {{id, contents}}")
    check_input(corpus, regular=True)
    options = config.retriever.options(name)
    identity = dict(load_retriever(name, options).identity())
    shaping = json.dumps([build_parameters(name, options), identity], sort_keys=True)
    key = digest_text(digest_file(corpus), name, shaping)[:8]

    def build(path: Path) -> None:
        note(f"building the index {path}")
        with counted_stages("passages") as progress:
            build_index(corpus, path, name, options, progress)

    return make_if_missing(workspace.indexes / f"{corpus.resolve().parent.name}-{name}-{key}", build)


def load_questions(
    files: tuple[str, ...] | None, config: Config, codec: Codec, note: Note, limit: int | None = None
) -> list[Question]:
    """The questions of `files`, or `limit` of them drawn the same way each time, ids unique across files.

    A question without a prompt of its own gets the default template's. Raises UserError for a prompt
    that does not fit, unless `data.filter_overlong_prompts`.
    """
    as_written = config.data.template is None and config.rollout.search
    asking = choose_template(config)
    questions = [item for file in files or () for item in read_questions(file)]
    questions = [
        item if as_written and item.prompt else replace(item, prompt=asking.messages(item.text))
        for item in questions
    ]
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(f"question id {question.id!r} is in {', '.join(files or ())} twice")
        seen.add(question.id)
    if limit is not None and limit < len(questions):
        drawn = sorted(random.Random("the same questions each time").sample(range(len(questions)), limit))
        questions = [questions[position] for position in drawn]
    return _that_fit(questions, config, codec, note)


def choose_template(config: Config) -> Template:
    """The template of `template_name`, which tells of the named retrievers."""
    return template(template_name(config)).naming(retriever_descriptions(config))


def retriever_descriptions(config: Config) -> dict[str, str]:
    """What is said of each named retriever; nothing where search is off."""
    retrievers = config.search.retrievers if config.rollout.search else {}
    return {name: retriever.description for name, retriever in retrievers.items()}


def warn_about_unlisted_retrievers(questions: Sequence[Question], config: Config, note: Note) -> None:
    """Say how many prompts leave out a retriever: a policy does not ask what it was not told of."""
    names = [re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])") for name in retriever_descriptions(config)]
    texts = ["\n".join(message["content"] for message in item.prompt) for item in questions]
    untold = sum(not all(name.search(text) for name in names) for text in texts)
    if untold:
        note(
            f"warning: {untold:,} of {len(texts):,} prompts do not name every retriever of "
            "search.retrievers, and nothing else tells the policy; set data.template=search-r1, or a file "
            "with {retrievers} in it"
        )


def template_name(config: Config) -> str:
    """`data.template` or Search-R1's prompt; where search is off, the one that asks the same without."""
    name = config.data.template or "search-r1"
    return name if config.rollout.search else WITHOUT_SEARCH.get(name, name)


def _that_fit(questions: list[Question], config: Config, codec: Codec, note: Note) -> list[Question]:
    longest = config.data.max_prompt_length
    with counted("reading prompts", len(questions)) as count:
        lengths = []
        for done, question in enumerate(questions, start=1):
            lengths.append(len(codec.encode_prompt(question.prompt)[0]))
            count(done)
    fitting = [item for item, length in zip(questions, lengths, strict=True) if length <= longest]
    dropped = len(questions) - len(fitting)
    if dropped and not config.data.filter_overlong_prompts:
        worst = max(range(len(questions)), key=lengths.__getitem__)
        raise UserError(
            f"{dropped} prompts are longer than data.max_prompt_length={longest}; the longest, of question "
            f"{questions[worst].id}, has {lengths[worst]} tokens: raise the limit, or set "
            "data.filter_overlong_prompts=true"
        )
    if dropped:
        note(f"left out {dropped} questions whose prompt is longer than {longest} tokens")
    return fitting


def model_options(section: Model) -> dict[str, Any]:
    """`srl.model.load_model`'s keywords from the section `model`."""
    names = ("dtype", "device", "attn_implementation", "trust_remote_code", "gradient_checkpointing",
             "lora_rank", "lora_alpha", "lora_target_modules")  # fmt: skip
    return {name: getattr(section, name) for name in names}
