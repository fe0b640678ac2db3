"""Loads the questions of a run, with their prompts; leaves out those that do not fit."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from srl.config import Config
from srl.data.demonstration_file import are_demonstrations, read_demonstrations
from srl.data.parquet import read_questions
from srl.data.published_rows import is_parquet
from srl.data.splits import check_sources, proportional
from srl.errors import UserError
from srl.progress import counted
from srl.protocol import (
    NO_INFORMATION,
    WITHOUT_SEARCH,
    Template,
    read_examples,
    template,
)
from srl.rollout.codec import Codec
from srl.rollout.observation import LEAST_INFORMATION
from srl.train.episodes import Splits
from srl.train.make_missing import Note
from srl.train.question_order import order_of
from srl.train.run_directory import RFT, SFT
from srl.train.tools import declared_tools
from srl.trajectory import Phase, Question

SPLITS: tuple[Phase, ...] = ("train", "val", "test")
"""The phases that have questions of their own, in the order of `Splits`."""


def load_splits(config: Config, codec: Codec, note: Note, algo: str) -> Splits:
    """The questions of a run. Raises UserError if there is none to train on, or `data.mix` does not fit."""
    splits = Splits(*(load_split(phase, config, codec, note) for phase in SPLITS))
    check_training_questions(splits.train, config, algo)
    warn_about_unlisted_retrievers(splits.train, config, note)
    return splits


def check_training_questions(questions: Sequence[Question], config: Config, algo: str) -> None:
    """Raises UserError where there is none, or `data.mix` does not fit them; `--algo sft` asks none."""
    if not questions:
        raise UserError(
            "no training question is left; set data.train_files, exclude fewer with data.exclude_files, or "
            "raise data.max_prompt_length"
        )
    if algo != SFT:
        order_of(questions, config.data, config.trainer.seed, config.rft if algo == RFT else None)


def load_split(phase: Phase, config: Config, codec: Codec, note: Note) -> list[Question]:
    """The questions of one phase: train, val or test. Raises UserError where `data.exclude_files` names none
    of those to train on: its ids are of other data."""
    limits: dict[Phase, int | None] = {"val": config.eval.val_questions, "test": config.eval.test_questions}
    files: tuple[str, ...] = getattr(config.data, f"{phase}_files") or ()
    questions = [question for file in files for question in read_questions(file)]
    id_files = config.data.exclude_files
    if phase == "train" and id_files and questions:
        excluded = {question.id for file in id_files for question in _questions_of(Path(file))}
        remaining = [question for question in questions if question.id not in excluded]
        if len(remaining) == len(questions):
            raise UserError(
                f"data.exclude_files={', '.join(id_files)}: none of the {len(excluded):,} ids is that of a "
                f"question of data.train_files, such as {questions[0].id!r}"
            )
        note(
            f"left out {len(questions) - len(remaining):,} training questions that are in data.exclude_files"
        )
        questions = remaining
    return load_questions(files, config, codec, note, limits.get(phase), questions)


def _questions_of(path: Path) -> list[Question]:
    """The questions, or demonstrations, of a file."""
    demonstrations = not is_parquet(path) and are_demonstrations(path)
    return read_demonstrations(path) if demonstrations else read_questions(path)


def load_questions(
    files: tuple[str, ...] | None,
    config: Config,
    codec: Codec,
    note: Note,
    limit: int | Mapping[str, int] | None = None,
    questions_read: Sequence[Question] | None = None,
) -> list[Question]:
    """The questions of `files`, or a sample of `limit` of them: the same each time, and of every data source
    in proportion, or as many as `limit` has for it by name. `questions_read` are the questions where the
    caller has read the files.

    A question without a prompt of its own gets that of the template. Raises UserError for an id that occurs
    twice, for a data source in `limit` that no question has, and for a prompt longer than
    `data.max_prompt_length` unless `data.filter_overlong_prompts`; one that retrieves needs room for a word
    of a passage.
    """
    as_written, prompting = takes_written_prompts(config), choose_template(config)
    prompt_of = prompts(prompting, codec)
    if questions_read is None:
        questions_read = [question for file in files or () for question in read_questions(file)]
    by_id: dict[str, Question] = {}
    for question in questions_read:
        if question.id in by_id:
            raise UserError(f"question id {question.id!r} is in {', '.join(files or ())} twice")
        is_ready = as_written and question.prompt
        by_id[question.id] = question if is_ready else replace(question, prompt=prompt_of(question.text))
    questions = list(by_id.values())
    if limit is not None:
        questions = stratified(questions, limit)
    room = len(codec.encode_text(LEAST_INFORMATION)) if prompting.retrieves else 0
    tools = declared_tools(config) if is_native(config) else []
    longest, lengths = config.data.max_prompt_length, list[int]()
    with counted("reading prompts", len(questions)) as count:
        for number, question in enumerate(questions, start=1):
            prompt = question.prompt
            if prompting.retrieves:
                prompt = prompting.messages(question.text, NO_INFORMATION)
            lengths.append(len(codec.encode_prompt(prompt, tools)[0]) + room)
            count(number)
    fitting = [question for question, length in zip(questions, lengths, strict=True) if length <= longest]
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


def check_some_left(questions: Sequence[object], files: Sequence[str]) -> None:
    """Raises UserError where no question of `files` is left, since all prompts are too long."""
    if not questions:
        raise UserError(f"no question is left of {', '.join(files)}; raise data.max_prompt_length")


def stratified(questions: Sequence[Question], size: int | Mapping[str, int]) -> list[Question]:
    """A sample of at most `size` of the questions, in their order: the same each time, and in proportion to
    the data sources, or so many of each source by name; one that is not named gives none. What is drawn of a
    source depends on its own questions and its share only. Raises UserError for a name that no question has.
    """
    strata: dict[str, list[int]] = defaultdict(list)
    for position, question in enumerate(questions):
        strata[question.data_source].append(position)
    sizes = {source: len(positions) for source, positions in strata.items()}
    if isinstance(size, Mapping):
        check_sources(size, sizes, "--limit")
        shares = {source: min(size.get(source, 0), count) for source, count in sizes.items()}
    else:
        shares = proportional(sizes, min(size, len(questions)))
    places = [
        position
        for source, positions in strata.items()
        for position in random.Random("the same questions each time").sample(positions, shares[source])
    ]
    return [questions[position] for position in sorted(places)]


def prompts(template: Template, codec: Codec) -> Callable[[str], tuple[dict[str, str], ...]]:
    """What makes the prompt of a question's text: the template's messages, or their text as one where the
    chat template would drop a part of them, as some do of <think>."""
    if codec.keeps(template.messages("Who?")):
        return template.messages
    return lambda text: (
        {"role": "user", "content": "\n".join(message["content"] for message in template.messages(text))},
    )


def is_native(config: Config) -> bool:
    """Whether the policy calls tools in the model's own way; not where there is nothing to call."""
    return config.rollout.protocol == "native" and config.rollout.search


def load_template(config: Config) -> Template:
    """The template, checked. Raises UserError if it searches and `rollout.search` is off, or the reverse; or
    if it asks for tags, and the policy calls tools."""
    prompting = choose_template(config)
    if is_native(config):
        if prompting.retrieves or "<search>" in prompting.prompt:
            raise UserError(
                f"data.template={prompting.name} is not for calls of tools, and rollout.protocol is native",
                key="data.template", hint="use tools, tools-tagged or a text of your own",
            )  # fmt: skip
        return replace(prompting, searches=True)
    if prompting.searches != config.rollout.search:
        advice = "one without search such as r1" if prompting.searches else "one with it such as search-r1"
        raise UserError(
            f"rollout.search={str(config.rollout.search).lower()} and data.template={prompting.name} do not "
            f"go together: use {advice}"
        )
    return prompting


def choose_template(config: Config) -> Template:
    """The template `template_name`, with `data.examples` and the named retrievers filled in."""
    prompting = template(template_name(config))
    if config.data.examples is not None:
        prompting = prompting.with_examples(read_examples(config.data.examples))
    retrievers = config.search.retrievers if config.rollout.search else {}
    return prompting.naming({name: retriever.description for name, retriever in retrievers.items()})


def template_name(config: Config) -> str:
    """`data.template`, by default that for calls of tools or Search-R1's prompt; if search is off, the
    counterpart without search."""
    name = config.data.template or ("tools" if is_native(config) else "search-r1")
    return name if config.rollout.search else WITHOUT_SEARCH.get(name, name)


def warn_about_unlisted_retrievers(questions: Sequence[Question], config: Config, note: Note) -> None:
    """Warn of prompts that leave out a named retriever: the policy would never use it."""
    retrievers = config.search.retrievers if config.rollout.search and not is_native(config) else ()
    names = [re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])") for name in retrievers]
    texts = ["\n".join(message["content"] for message in question.prompt) for question in questions]
    unlisted = sum(not all(name.search(text) for name in names) for text in texts)
    if unlisted:
        note(
            f"warning: {unlisted:,} of {len(texts):,} prompts do not name every retriever of "
            "search.retrievers, so the policy does not know them; set data.template=search-r1, or a file "
            "with {retrievers} in it"
        )


def takes_written_prompts(config: Config) -> bool:
    """Whether a question that has a prompt in its file keeps it."""
    return config.data.template is None and config.rollout.search and not is_native(config)
