"""`srl data demonstrations`: a teacher answers questions, and its right episodes become demonstrations.

The teacher is any engine: a model behind a server, or one of this machine. What it has answered is kept in a
file beside the output, so that an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from srl import interrupts
from srl.answers import exact_match
from srl.config import Config
from srl.data.demonstration_file import write_demonstrations
from srl.errors import CheckFailed, UserError
from srl.files import json_object
from srl.progress import counted
from srl.protocol import STOP_STRINGS
from srl.rollout.episode import EpisodeOptions
from srl.rollout.many_episodes import rollout
from srl.serve.named_retrievers import aclose, connect
from srl.train.load_components import Generation, episode_options, load_generation
from srl.train.make_missing import Note
from srl.train.questions import load_questions, load_template
from srl.train.search import load_search
from srl.trajectory import Question, SearchTool, Trajectory, failed_episodes
from srl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Written:
    """The number of questions, and of those with a demonstration. `usage` is a server's, of this call."""

    file: Path
    teacher: str
    questions: int
    demonstrations: int
    usage: Mapping[str, float]


@dataclass(slots=True)
class Journal:
    """What a teacher has answered so far, in a file of JSON lines that each episode appends to.

    `turns` are those of the right answers, by question; `asked` are all (question, attempt) that completed.
    """

    path: Path
    header: dict[str, Any]
    turns: dict[str, list[str]] = field(default_factory=dict)
    asked: set[tuple[str, int]] = field(default_factory=set)

    def open(self) -> IO[str]:
        """Read what is there, and open the file to append. Raises UserError for another teacher's answers.

        A last line that was cut off is left out.
        """
        data = self.path.read_bytes() if self.path.is_file() else b""
        whole = data[: data.rfind(b"\n") + 1]
        rows = [json_object(line, f"{self.path}:{n}") for n, line in enumerate(whole.splitlines(), start=1)]
        if rows and rows[0] != self.header:
            changed = sorted(key for key in self.header if rows[0].get(key) != self.header[key])
            raise UserError(
                f"{self.path} has answers of another teacher or setting ({', '.join(changed)}); remove it to "
                "start over, or give another --out"
            )
        for row in rows[1:]:
            self._keep(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a", encoding="utf-8")
        file.truncate(len(whole))
        if not rows:
            _write(file, self.header)
        return file

    def _keep(self, row: Mapping[str, Any]) -> None:
        self.asked.add((row["id"], row["attempt"]))
        if row["turns"] is not None:
            self.turns[row["id"]] = row["turns"]

    def add(self, file: IO[str], trajectory: Trajectory, attempt: int) -> None:
        """Keep an episode; a failed one is asked again by the next call."""
        if trajectory.valid:
            turns = turns_of(trajectory) if is_right(trajectory) else None
            row = {"id": trajectory.question.id, "attempt": attempt, "turns": turns}
            self._keep(row)
            _write(file, row)


def _write(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def is_right(trajectory: Trajectory) -> bool:
    """Whether the episode ended with an answer that matches a golden one."""
    return trajectory.end == "answered" and bool(
        exact_match(trajectory.answer, trajectory.question.golden_answers)
    )


def turns_of(trajectory: Trajectory) -> list[str]:
    """The text of each turn through its closing tag, without what the last token wrote after it."""
    texts = (segment.text for segment in trajectory.segments if segment.is_policy)
    return [text[: _end(text)] for text in texts]


def _end(text: str) -> int:
    ends = [text.index(stop) + len(stop) for stop in STOP_STRINGS if stop in text]
    return min(ends, default=len(text))


def write_right_episodes(
    config: Config,
    files: Sequence[str],
    out: Path,
    workspace: Workspace,
    *,
    attempts: int = 1,
    limit: int | None = None,
    note: Note = lambda text: None,
) -> Written:
    """Ask each question until its answer is right, `attempts` times at most, and write the right episodes.

    Raises UserError, and CheckFailed where more than `eval.max_failed` of the episodes were lost to faults or
    no answer was right; what was answered until then is kept for the next call.
    """
    teacher = load_generation(config, note)
    questions = load_questions(tuple(files), config, teacher.codec, note, limit)
    journal = Journal(out.with_name(f"{out.name}.partial"), _header(config, teacher))
    options = episode_options(config).for_evaluation(config.eval.temperature)
    lost: list[Trajectory] = []
    with journal.open() as file, closing(teacher.engine):
        if journal.asked:
            note(f"{len(journal.asked):,} episodes of an earlier call are kept")
        search = load_search(config, workspace, note)
        for attempt in range(attempts):
            left = [item for item in questions if item.id not in journal.turns]
            left = [item for item in left if (item.id, attempt) not in journal.asked]
            done = _ask(config, teacher, search, left, options, attempt, journal, file)
            lost += [trajectory for trajectory in done if not trajectory.valid]
    _check(journal, lost, len(questions), config.eval.max_failed)
    shown = [replace(item, metadata={"turns": journal.turns[item.id]}) for item in questions
             if item.id in journal.turns]  # fmt: skip
    write_demonstrations(out, shown)
    journal.path.unlink()
    return Written(out, teacher.name, len(questions), len(shown), teacher.usage())


def _header(config: Config, teacher: Generation) -> dict[str, Any]:
    """What the answers in a journal depend on most."""
    return {
        "format": 1,
        "teacher": teacher.name,
        "temperature": config.eval.temperature,
        "template": load_template(config).name,
        "max_turns": config.rollout.max_turns,
        "search": config.rollout.search,
    }


def _ask(
    config: Config,
    teacher: Generation,
    search: SearchTool | None,
    questions: Sequence[Question],
    options: EpisodeOptions,
    attempt: int,
    journal: Journal,
    file: IO[str],
) -> list[Trajectory]:
    """One episode for each question; each is kept as it ends."""
    done = itertools.count(1)

    async def ask() -> list[Trajectory]:
        try:
            await connect(search)
            return await rollout(
                questions, teacher.engine, search, codec=teacher.codec, template=load_template(config),
                options=options, seed=config.trainer.seed, step=attempt, phase="eval", on_done=keep,
            )  # fmt: skip
        finally:
            await aclose(search)

    with counted(f"episodes, attempt {attempt + 1}", len(questions)) as count:

        def keep(trajectory: Trajectory) -> None:
            journal.add(file, trajectory, attempt)
            count(next(done))

        return interrupts.run(ask()) if questions else []


def _check(journal: Journal, lost: Sequence[Trajectory], questions: int, limit: float) -> None:
    """Raises CheckFailed for too many lost episodes, and where nothing can be written."""
    if len(lost) > limit * questions:
        found = failed_episodes(lost)
        raise CheckFailed(
            f"{found.what} failed in {found.failed} episodes, more than eval.max_failed={limit:g} "
            f"({found.fault}); type the same command again to ask only what is missing"
        )
    if not journal.turns:
        journal.path.unlink()
        raise CheckFailed(
            f"none of {questions} answers was right, so there is nothing to learn from; try --temperature 1 "
            "with more --attempts, or another teacher"
        )
