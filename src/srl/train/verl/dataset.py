"""The questions of a run as verl's data loader takes them, in the order of the local backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.utils.data import Dataset

from srl.config import Config
from srl.train.questions import Splits, order_of
from srl.trajectory import Phase, Question

TRAIN: Phase = "train"


class Questions(Dataset[dict[str, Any]]):
    """The questions of one phase, in the order in which they are asked."""

    def __init__(self, questions: Sequence[Question], phase: Phase) -> None:
        self.questions, self.phase = questions, phase

    @classmethod
    def of(cls, splits: Splits, phase: Phase, config: Config) -> Questions:
        """All questions of `phase`; for training, those of all steps, one step after the other."""
        questions = getattr(splits, phase)
        if phase == TRAIN:
            order = order_of(questions, config.data, config.trainer.seed)
            steps = range(1, config.trainer.total_training_steps + 1)
            questions = [question for step in steps for question in order.batch(step)]
        return cls(questions, phase)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return row(self.questions[position], self.phase, position)


def row(question: Question, phase: Phase, position: int) -> dict[str, Any]:
    """The row that verl carries to the agent loop: its own columns, and `srl` with the question as JSON."""
    return {
        "raw_prompt": [dict(message) for message in question.prompt],
        "index": position,
        "data_source": question.data_source,
        "reward_model": {"ground_truth": {"target": list(question.golden_answers)}},
        "srl": json.dumps({"phase": phase, "question": asdict(question)}),
    }


def read_row(text: str) -> tuple[Question, Phase]:
    """The question and the phase in a row's column `srl`."""
    fields = json.loads(text)
    question = fields["question"]
    for name in ("golden_answers", "prompt"):
        question[name] = tuple(question[name])
    return Question(**question), fields["phase"]
