"""`data.exclude_files`: training questions that are not asked, by their ids in files of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.training import config, questions, tokenizer, train, write_setting

from srl.data.demonstration_file import write_demonstrations
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.rollout.codec import Codec
from srl.train.questions import load_splits
from srl.train.startup_errors import startup_errors


@pytest.fixture
def place(tmp_path):
    write_setting(tmp_path)
    return tmp_path


def shown(path, *numbers):
    """A file of demonstrations of these training questions, of the first one twice."""
    found = {item.id: item for item in questions("train", 8)}
    chosen = [found[f"towns/train/{number}"] for number in (numbers[0], *numbers)]
    write_demonstrations(path, [
        replace(item, metadata={"turns": [f"<answer> {way} </answer>"]}) for way, item in enumerate(chosen)
    ])  # fmt: skip
    return str(path)


def trained_on(folder, excluded, said=None):
    chosen = config(folder, data__exclude_files=excluded)
    splits = load_splits(chosen, Codec(tokenizer()), ([] if said is None else said).append, "grpo")
    return [item.id.rpartition("/")[2] for item in splits.train], splits


def test_questions_of_demonstrations_and_of_question_files_are_not_asked(place):
    whole, before = trained_on(place, None)
    write_questions(place / "others.parquet", questions("train", 2))
    said: list[str] = []
    files = [shown(place / "shown.jsonl", 2, 5), str(place / "others.parquet")]
    asked, after = trained_on(place, files, said)
    assert asked == [number for number in whole if number not in {"0", "1", "2", "5"}]
    assert (after.val, after.test) == (before.val, before.test), "what is measured stays"
    assert said == ["left out 4 training questions that are in data.exclude_files"]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            range(8),
            "no training question is left; set data.train_files, exclude fewer with data.exclude_files",
        ),
        ((), "none of the 1 ids is that of a question of data.train_files, such as 'towns/train/0'"),
    ],
)
def test_files_that_exclude_all_or_nothing_are_refused_by_run_and_plan(place, numbers, message):
    write_demonstrations(place / "other.jsonl", [
        replace(item, id="towers/7", metadata={"turns": ["<answer> red </answer>"]})
        for item in questions("train", 1)
    ])  # fmt: skip
    file = shown(place / "shown.jsonl", *numbers) if numbers else str(place / "other.jsonl")
    chosen = config(place, data__exclude_files=file)
    with pytest.raises(UserError, match=message):
        train(chosen, place / "work")
    assert any(message in error for error in startup_errors(chosen))
