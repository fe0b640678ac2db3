"""The questions of a run, with their prompts, less those that do not fit, and the order of the steps."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import floor
from pathlib import Path

from srl.config import Config
from srl.config.sections import Data, Rft
from srl.data.demonstration_file import are_demonstrations, read_demonstrations
from srl.data.parquet import read_questions
from srl.data.published_rows import is_parquet
from srl.data.splits import proportional
from srl.errors import UserError, nearest
from srl.progress import Note, counted
from srl.protocol import NO_INFORMATION
from srl.rollout.codec import Codec
from srl.rollout.observation import LEAST_INFORMATION
from srl.train.load_protocol import (
    choose_template,
    declared_tools,
    is_native,
    prompts,
    takes_written_prompts,
)
from srl.train.run_directory import RFT, SFT
from srl.trajectory import Phase, Question


@dataclass(slots=True)
class Splits:
    """The questions of a run by phase."""

    train: list[Question]
    val: list[Question] = field(default_factory=list)
    test: list[Question] = field(default_factory=list)


def load_splits(config: Config, codec: Codec, note: Note, algo: str) -> Splits:
    """The questions of a run. Raises UserError if none is left of a file, or `data.mix` does not fit them."""
    splits = Splits(*(load_split(phase, config, codec, note) for phase in ("train", "val", "test")))
    if algo != SFT:  # which asks none
        order_of(splits.train, config.data, config.trainer.seed, config.rft if algo == RFT else None)
    return splits


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
    limit: int | None = None,
    questions_read: Sequence[Question] | None = None,
) -> list[Question]:
    """The questions of `files`, or a sample of `limit` of them: the same each time, and of every data source
    in proportion. `questions_read` are the questions where the caller has read the files.

    A question without a prompt of its own gets that of the template. Raises UserError for an id that occurs
    twice, where none is left, and for a prompt longer than `data.max_prompt_length` unless
    `data.filter_overlong_prompts`; one that retrieves needs room for a word of a passage.
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
    if files and not fitting:
        hint = "raise data.max_prompt_length, or exclude fewer with data.exclude_files"
        raise UserError(f"no question is left of {', '.join(files)}", key="data.max_prompt_length", hint=hint)
    return fitting


def stratified(questions: Sequence[Question], size: int) -> list[Question]:
    """A sample of at most `size` of the questions, in their order: the same each time, and in proportion to
    the data sources. What is drawn of a source depends on its own questions and its share only."""
    strata: dict[str, list[int]] = defaultdict(list)
    for position, question in enumerate(questions):
        strata[question.data_source].append(position)
    sizes = {source: len(positions) for source, positions in strata.items()}
    shares = proportional(sizes, min(size, len(questions)))
    places = [
        position
        for source, positions in strata.items()
        for position in random.Random("the same questions each time").sample(positions, shares[source])
    ]
    return [questions[position] for position in sorted(places)]


class QuestionOrder:
    """The questions that a run asks, one after the other, in batches; a function of questions and seed alone,
    so a resumed run needs no state of it.

    Questions at the end of an epoch that do not fill a batch are left out. A data set smaller than a batch
    makes smaller batches. With a `mix` a batch has shares of data sources or hops (`_mixed`). Raises
    UserError where that does not fit the questions.

    With dynamic sampling a training step may ask for more than a batch (`further`), and the next one goes on
    after that: a batch of this order is then not a step of training.
    """

    def __init__(
        self, questions: Sequence[Question], batch_size: int, seed: int,
        mix: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        pools, shares = _pools(questions, mix, batch_size) if mix else ([list(questions)], [])
        self.questions = [question for pool in pools for question in pool]
        self.batch_size = min(batch_size, len(self.questions))
        self._questions_so_far: list[Question] = []
        if mix:
            self._batches = _mixed(pools, shares, self.batch_size, seed)
        else:
            self._batches = _shuffled(self.questions, self.batch_size, seed)

    def batch(self, step: int) -> list[Question]:
        """The questions of a step, counted from 1."""
        start, end = (step - 1) * self.batch_size, step * self.batch_size
        while len(self._questions_so_far) < end:
            self._questions_so_far += next(self._batches)
        return self._questions_so_far[start:end]

    def further(
        self, position: int, count: int, asked_ids: Container[str] = ()
    ) -> tuple[list[Question], int]:
        """The next `count` questions from `position` on, counted from 0, and the position after them.

        Those with an id in `asked_ids` are passed over, since a step asks no question twice. Where too few
        others come within two epochs it is those.
        """
        questions: dict[str, Question] = {}
        for place in range(position, position + 2 * len(self.questions)):
            if len(questions) == count:
                break
            step, index = divmod(place, self.batch_size)
            position, question = place + 1, self.batch(step + 1)[index]
            if question.id not in asked_ids:
                questions.setdefault(question.id, question)
        return list(questions.values()), position


def order_of(
    questions: Sequence[Question], data: Data, seed: int, rounds: Rft | None = None
) -> QuestionOrder:
    """The order in which a run asks its training questions, `data.train_batch_size` a step, or in `rounds` of
    fine-tuning.

    Raises UserError where `data.mix` does not fit them.
    """
    size = (rounds.questions or len(questions)) if rounds else data.train_batch_size
    return QuestionOrder(questions, size, seed, data.mix)


def _epochs(questions: Sequence[Question], seed: int) -> Iterator[list[Question]]:
    """The questions, shuffled anew in each epoch."""
    for epoch in count():
        yield random.Random(f"order {seed} {epoch}").sample(questions, len(questions))


def _shuffled(questions: Sequence[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """The whole batches of each epoch, an epoch at a time."""
    for epoch in _epochs(questions, seed):
        yield epoch[: len(epoch) - len(epoch) % size]


def _mixed(
    pools: Sequence[Sequence[Question]], shares: Sequence[float], size: int, seed: int
) -> Iterator[list[Question]]:
    """Batches mixed of pools of questions: one of each data source, or number of hops.

    Each place of a batch goes to the pool that is furthest below its share of all places so far, the first
    of several. Of n pools none is ever more than 1/2 + … + 1/n questions below its share, or 1 above. A pool
    is shuffled anew when it has too few questions left for a batch, so pools have epochs of their own.
    """
    epochs = [_epochs(pool, seed) for pool in pools]
    queues = [iter(next(epoch)) for epoch in epochs]
    unasked = [len(pool) for pool in pools]
    counts = [0] * len(pools)
    for start in count(step=size):
        slots = list[int]()
        for total in range(start + 1, start + size + 1):
            shortfalls = [share * total - filled for share, filled in zip(shares, counts, strict=True)]
            slots.append(shortfalls.index(max(shortfalls)))
            counts[slots[-1]] += 1
        for number, pool in enumerate(pools):
            if (uses := slots.count(number)) > unasked[number]:
                queues[number], unasked[number] = iter(next(epochs[number])), len(pool)
            unasked[number] -= uses
        yield [next(queues[number]) for number in slots]


def _pools(
    questions: Sequence[Question], mix: Mapping[str, float], size: int
) -> tuple[list[list[Question]], list[float]]:
    """The questions of each name in `mix` that has a share, in its order: of each number of hops where the
    names are numbers (`unknown` may be among them, and alone is a data source), else of each data source. And
    the shares.

    A pool needs questions for its share of a batch and for what can come on top (`_mixed`): 1/2 + … + 1/n
    from below before it, and 1 − 1/n above after it. Raises UserError.
    """
    words = {name for name in mix if not name.isdecimal()}
    by_hops = len(words) < len(mix) and words <= {"unknown"}
    kind = "number of hops" if by_hops else "data source"
    pools: dict[str, list[Question]] = {name: [] for name in mix}
    for question in questions:
        hops = "unknown" if question.hops is None else str(question.hops)
        name = hops if by_hops else question.data_source
        if name not in pools:
            raise UserError(
                f"data.mix has no share for the {kind} {name!r} of question {question.id}; add it, with 0 to "
                f"leave such questions out{nearest(name, list(mix))}"
            )
        pools[name].append(question)
    pools = {name: pool for name, pool in pools.items() if mix[name]}
    if not pools:
        raise UserError("data.mix has only shares of 0; give a share to what is to be trained on")
    shares = [mix[name] / sum(mix[name] for name in pools) for name in pools]
    most_on_top = sum(1 / place for place in range(1, len(pools) + 1)) - 1 / len(pools)
    for (name, pool), share in zip(pools.items(), shares, strict=True):
        if len(pool) < (smallest := max(1, floor(share * size + most_on_top))):
            raise UserError(
                f"data.mix needs at least {smallest} questions of the {kind} {name!r} for batches of {size}, "
                f"and there are {len(pool)}: lower its share or the size of batches"
            )
    return list(pools.values()), shares
