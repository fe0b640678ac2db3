"""The questions of a run as verl's data loader takes them, in the order of the local backend."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from srl.config import Config, load_saved
from srl.train.loading import load_codec
from srl.train.question_order import QuestionOrder
from srl.train.questions import load_split
from srl.train.verl.job import RUN_VARIABLE
from srl.trajectory import Phase, Question

TRAIN: Phase = "train"


class Questions(Dataset[dict[str, Any]]):
    """The questions of one phase, which verl names where it would name a file: train, val or test.

    Those of training come in the order of `QuestionOrder`, all steps of the run one after the other.
    """

    def __init__(self, data_files: str | Sequence[str], **ignored: Any) -> None:
        phase = data_files if isinstance(data_files, str) else data_files[0]
        config = load_saved(Path(os.environ[RUN_VARIABLE]))
        self.phase: Phase = phase  # type: ignore[assignment]
        self.questions = asked(config, self.phase)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return row(self.questions[position], self.phase, position)


def asked(config: Config, phase: Phase) -> list[Question]:
    """Every question of `phase` in the order it is asked; one of training where a phase has none.

    verl wants a loader for validation also where nothing is validated.
    """

    def load(phase: Phase) -> list[Question]:
        return load_split(phase, config, codec, lambda text: None)

    codec = load_codec(config.model, None, lambda text: None)
    if phase != TRAIN:
        return load(phase) or load(TRAIN)[:1]
    return in_order(config, load(TRAIN))


def in_order(config: Config, questions: Sequence[Question]) -> list[Question]:
    """The questions of all training steps, step after step."""
    data, trainer = config.data, config.trainer
    order = QuestionOrder(questions, data.train_batch_size, trainer.seed, data.shuffle)
    steps = range(1, trainer.total_training_steps + 1)
    return [question for step in steps for question in order.batch(step)]


def row(question: Question, phase: Phase, position: int) -> dict[str, Any]:
    """What verl carries with a question to the agent loop: its own columns, and ours as text."""
    return {
        "raw_prompt": [dict(message) for message in question.prompt],
        "index": position,
        "data_source": question.data_source,
        "reward_model": {"ground_truth": {"target": list(question.golden_answers)}},
        "srl": json.dumps({"phase": phase, "question": asdict(question)}),
    }


def read_row(text: str) -> tuple[Question, Phase]:
    """The question and the phase of a row's column `srl`."""
    found = json.loads(text)
    fields = found["question"]
    fields["golden_answers"] = tuple(fields["golden_answers"])
    fields["prompt"] = tuple(fields["prompt"])
    return Question(**fields), found["phase"]
