"""`srl data demonstrations`: a teacher answers questions, and the episodes that are accepted are written.

The teacher is any engine: a model behind a server, or one of this machine. What it has answered is kept in a
file beside the output, so that an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from srl import process
from srl.config import Config
from srl.data.demonstration_file import write_demonstrations
from srl.errors import CheckFailed, UserError, parsing
from srl.evaluate.episode_results import EpisodeResult
from srl.files import digest_text, json_object, lock
from srl.progress import Count, counted
from srl.protocol import STOP_STRINGS
from srl.reward import RewardMix
from srl.rollout.environment import Environment, Key
from srl.serve.named_retrievers import aclose, connect
from srl.train.load_components import Generation, episode_options, load_generation, load_rewards
from srl.train.make_missing import Note
from srl.train.questions import check_some_left, load_questions, load_template
from srl.train.search import IndexDigests, load_search
from srl.trajectory import Question, SearchTool, Trajectory, failed_episodes
from srl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Which of a teacher's episodes become demonstrations.

    An episode is accepted if each turn is a search or the answer, no query is repeated, and its answer is
    right: an exact match, or a reward (`reward.weights`) of `min_reward` at least. With `evidence`, all
    gold passages of the question were shown. `per_question` episodes of a question are accepted at
    most, and no two of them have the same queries, but for case and spaces.
    """

    min_reward: float | None = None
    evidence: bool = False
    per_question: int = 1

    def reason_against(self, trajectory: Trajectory, reward: float) -> str | None:
        """Why the episode is not accepted, looked at by itself."""
        found = EpisodeResult.of(trajectory)
        if trajectory.end != "answered":
            return "no answer"
        if not (found.em if self.min_reward is None else reward >= self.min_reward):
            return "a wrong answer" if self.min_reward is None else f"a reward below {self.min_reward:g}"
        if trajectory.valid_actions < trajectory.turns:
            return "a turn without a search or an answer"
        queries = queries_of(search.query for search in trajectory.searches)
        if len(set(queries)) < len(queries):
            return "a repeated query"
        if self.evidence and found.evidence_recall != 1:
            return "gold passages not shown"
        return None


def queries_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Queries as they are compared: without case and additional spaces."""
    return tuple(" ".join(text.casefold().split()) for text in texts)


@dataclass(frozen=True, slots=True)
class Written:
    """The number of questions, of those with a demonstration, and of demonstrations.

    `rejected` are the episodes that were not accepted, by reason, also of earlier calls; `tokens` are those
    that the teacher wrote, and `usage` a server's count, both of this call.
    """

    file: Path
    teacher: str
    questions: int
    answered: int
    demonstrations: int
    rejected: Mapping[str, int]
    tokens: int
    usage: Mapping[str, float]


@dataclass(slots=True)
class Journal:
    """What a teacher has answered so far, in a file of JSON lines that each episode appends to.

    A question is known by its text and answers (`key_of`), since ids may name other questions once the data
    were prepared anew. `turns` are those of the accepted episodes by question, `queries` their queries;
    `asked` are all (question, attempt) that completed, `rejected` why those were not accepted that were not.
    `tokens` are those that the policy wrote in the episodes of this call.
    """

    path: Path
    header: dict[str, Any]
    acceptance: Acceptance
    turns: dict[str, list[list[str]]] = field(default_factory=dict)
    queries: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    asked: set[tuple[str, int]] = field(default_factory=set)
    rejected: dict[str, list[str]] = field(default_factory=dict)
    tokens: int = 0

    def open(self) -> IO[str]:
        """Read what is there, and open the file to append.

        Raises UserError for another teacher's answers, a damaged line, and a file that cannot be written or
        that another process writes. A last line that was cut off is left out.
        """
        file = self._locked()
        try:
            size = self._read()
            file.truncate(size)
            if not size:
                _write(file, self.header)
        except BaseException:
            file.close()
            raise
        return file

    def _read(self) -> int:
        """Read the whole lines of the file, and return their size in bytes."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        rows = [json_object(line, f"{self.path}:{n}") for n, line in enumerate(whole.splitlines(), start=1)]
        if rows and rows[0] != self.header:
            changed = sorted(key for key in self.header if rows[0].get(key) != self.header[key])
            raise UserError(
                f"{self.path} has answers of another teacher or setting ({', '.join(changed)}); remove it to "
                "start over, or give another --out"
            )
        for number, row in enumerate(rows[1:], start=2):
            with parsing(f"{self.path}:{number} is damaged, remove the line"):
                self._keep(row)
        return len(whole)

    def _locked(self) -> IO[str]:
        """The file to append to, locked as long as it is open, where the file system has locks."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a", encoding="utf-8")
        lock(file, f"another process writes {self.path}; wait for it to end, or give another --out")
        return file

    def _keep(self, row: Mapping[str, Any]) -> None:
        key = row["question"]
        self.asked.add((key, row["attempt"]))
        if row["rejected"] is not None:
            self.rejected.setdefault(key, []).append(row["rejected"])
            return
        self.turns.setdefault(key, []).append(row["turns"])
        self.queries.setdefault(key, set()).add(tuple(row["queries"]))

    def is_to_ask(self, question: Question, attempt: int) -> bool:
        """Whether the question may have more demonstrations, and was not asked in this attempt."""
        key = key_of(question)
        return (
            len(self.turns.get(key, ())) < self.acceptance.per_question and (key, attempt) not in self.asked
        )

    def reasons(self, questions: Iterable[Question]) -> Counter[str]:
        """Why episodes of these questions were not accepted."""
        keys = dict.fromkeys(map(key_of, questions))
        return Counter(reason for key in keys for reason in self.rejected.get(key, ()))

    def has_others(self, questions: Iterable[Question]) -> bool:
        """Whether there are answers to other questions too."""
        return not {key for key, _ in self.asked} <= set(map(key_of, questions))

    def add(self, file: IO[str], trajectory: Trajectory, reward: float, attempt: int) -> None:
        """Keep an episode; a failed one is asked again by the next call."""
        self.tokens += trajectory.policy_tokens
        if not trajectory.valid:
            return
        queries = queries_of(search.query for search in trajectory.searches)
        reason = self.acceptance.reason_against(trajectory, reward)
        key = key_of(trajectory.question)
        if reason is None and queries in self.queries.get(key, ()):
            reason = "the queries of another demonstration"
        kept = {"queries": queries, "turns": turns_of(trajectory)} if reason is None else {}
        row = {"question": key, "attempt": attempt, "rejected": reason, **kept}
        self._keep(row)
        _write(file, row)


def key_of(question: Question) -> str:
    """32 hex digits of a question's text and answers."""
    return digest_text(question.text, *question.golden_answers)


def _write(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def turns_of(trajectory: Trajectory) -> list[str]:
    """The text of each turn through its closing tag, without what the last token wrote after it."""
    texts = (segment.text for segment in trajectory.segments if segment.is_policy)
    return [text[: _end(text)] for text in texts]


def _end(text: str) -> int:
    ends = [text.index(stop) + len(stop) for stop in STOP_STRINGS if stop in text]
    return min(ends, default=len(text))


def write_accepted_episodes(
    config: Config,
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    acceptance: Acceptance = Acceptance(),
    attempts: int = 1,
    limit: int | Mapping[str, int] | None = None,
    note: Note = lambda text: None,
) -> Written:
    """Ask each question until it has its demonstrations, `attempts` times at most, and write them.

    Raises UserError, and CheckFailed where faults left more than `eval.max_failed` of the questions without
    an episode or none was accepted; what was answered until then is kept for the next call.
    """
    if out.is_dir():
        raise UserError(f"{out} is a directory, expected a file: give another --out")
    teacher = load_generation(config, note)
    questions = load_questions(tuple(files), config, teacher.codec, note, limit)
    check_some_left(questions, files)
    search = load_search(config, workspace, note)
    header = _header(config, teacher, acceptance, search)
    journal = Journal(out.with_name(f"{out.name}.partial"), header, acceptance)
    lost: dict[str, Trajectory] = {}  # by question
    with journal.open() as file, closing(teacher.engine):
        if journal.asked:
            note(f"{len(journal.asked):,} episodes of an earlier call are kept")
        rewards = None if acceptance.min_reward is None else load_rewards(config)
        asking = _Asking(config, teacher, search, rewards, journal, file)
        for attempt in range(attempts):
            left = {key_of(item): item for item in questions if journal.is_to_ask(item, attempt)}
            for trajectory in asking.ask([*left.values()], attempt):
                if not trajectory.valid:
                    lost[key_of(trajectory.question)] = trajectory
    unanswered = [lost[key] for key in lost.keys() - {key for key, _ in journal.asked}]
    shown, rejected = list(_demonstrations(questions, journal)), journal.reasons(questions)
    _check(journal, unanswered, len(questions), config.eval.max_failed, shown, rejected)
    write_demonstrations(out, shown)
    if journal.has_others(questions):
        note(f"{journal.path} is kept: it has answers to other questions")
    elif unanswered:
        note(
            f"{journal.path} is kept: every attempt failed for {len(unanswered):,} of {len(questions):,} "
            "questions; the same command with --overwrite asks them again"
        )
    else:
        journal.path.unlink()
    answered = sum(key_of(item) in journal.turns for item in questions)
    return Written(
        out, teacher.name, len(questions), answered, len(shown), dict(rejected.most_common()),
        journal.tokens, teacher.usage(),
    )  # fmt: skip


def _demonstrations(questions: Sequence[Question], journal: Journal) -> Iterator[Question]:
    """The accepted episodes in the order of the questions; further ones of a question as `ID#2`, …

    Questions with the same text and answers count as one, the first.
    """
    first: dict[str, Question] = {}
    for question in questions:
        first.setdefault(key_of(question), question)
    for key, question in first.items():
        for number, turns in enumerate(journal.turns.get(key, ()), start=1):
            name = question.id if number == 1 else f"{question.id}#{number}"
            yield replace(question, id=name, metadata={**question.metadata, "turns": turns})


def _header(
    config: Config, teacher: Generation, acceptance: Acceptance, search: SearchTool | None
) -> dict[str, Any]:
    """What the answers in a journal depend on most."""
    weights = {} if acceptance.min_reward is None else config.reward.weights
    return {
        "format": 4,
        "teacher": teacher.name,
        "temperature": config.eval.temperature,
        "template": load_template(config).name,
        "max_turns": config.rollout.max_turns,
        "search": config.rollout.search,
        "index": IndexDigests.of(search).as_fields(),
        "acceptance": {**asdict(acceptance), "weights": weights},
    }


@dataclass(frozen=True, slots=True)
class _Asking:
    """What the teacher is asked with, and where its episodes are kept."""

    config: Config
    teacher: Generation
    search: SearchTool | None
    rewards: RewardMix | None
    journal: Journal
    file: IO[str]

    def ask(self, questions: Sequence[Question], attempt: int) -> list[Trajectory]:
        """One episode for each question; each is scored and kept as it ends."""
        if not questions:
            return []
        with counted(f"episodes, attempt {attempt + 1}", len(questions)) as count:
            return process.run_async(self._ask(questions, attempt, count))

    async def _ask(self, questions: Sequence[Question], attempt: int, count: Count) -> list[Trajectory]:
        config, done, kept = self.config, itertools.count(1), list[asyncio.Task[None]]()
        failed = list[Exception]()

        async def keep(trajectory: Trajectory) -> None:
            try:
                self.journal.add(self.file, trajectory, await self._reward(trajectory), attempt)
            except Exception as error:
                failed.append(error)
                raise
            count(next(done))

        def ended(trajectory: Trajectory) -> None:
            if failed:  # ask no more, since nothing is kept
                raise failed[0]
            kept.append(asyncio.ensure_future(keep(trajectory)))

        try:
            await connect(self.search)
            options = episode_options(config).for_evaluation(config.eval.temperature)
            environment = Environment(self.teacher.codec, load_template(config), options, self.search)
            key = Key(config.trainer.seed, "eval", attempt)
            found = await environment.play_all(self.teacher.engine, questions, key, on_done=ended)
            await asyncio.gather(*kept)
            return found
        finally:
            await asyncio.gather(*kept, return_exceptions=True)
            await aclose(self.search)

    async def _reward(self, trajectory: Trajectory) -> float:
        """The reward of the settings, where acceptance asks for it. An episode without a score, such as one
        whose judge is down, fails: it is neither accepted nor rejected."""
        if self.rewards is None:
            return 0.0
        (score,) = await self.rewards.score([trajectory])
        if score.error:
            trajectory.end, trajectory.error = "failed", score.error
        return score.value


def _check(
    journal: Journal, lost: Sequence[Trajectory], questions: int, limit: float, shown: Sequence[Question],
    rejected: Counter[str],
) -> None:  # fmt: skip
    """Raises CheckFailed where too many questions have no episode but those `lost`, one for each, and where
    nothing can be written."""
    if len(lost) > limit * questions:
        found = failed_episodes(lost)
        raise CheckFailed(
            f"{found.what} failed for {found.failed} of {questions} questions, more than "
            f"eval.max_failed={limit:g} ({found.fault}); type the same command again to ask only what is "
            "missing"
        )
    if not shown:
        more = f"try more --attempts, which go on from {journal.path}, or another teacher"
        if not journal.header["temperature"]:
            more = f"remove {journal.path} and try --attempts 4 --temperature 1, or another teacher"
        raise CheckFailed(
            f"no episode of {questions} questions was accepted, so there is nothing to learn from "
            f"({_counts(rejected)}; {journal.tokens:,} tokens); {more}"
        )


def _counts(rejected: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in rejected.most_common())
