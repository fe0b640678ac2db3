"""Golden answers: several stay several, one stays one, in each form that a file may have."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from srl.data.golden_answers import UnclearAnswers, golden_answers


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("Paris", ["Paris"]),
        (["Paris", " Paris ", ""], ["Paris"]),
        ("Sri Lanka<|answer_split|>Ceylon", ["Sri Lanka", "Ceylon"]),
        (["Sri Lanka<|answer_split|>Ceylon"], ["Sri Lanka", "Ceylon"]),
        ({"target": "Sri Lanka<|answer_split|>Ceylon"}, ["Sri Lanka", "Ceylon"]),
        ('{"target": ["Paris"]}', ["Paris"]),
        ('{"ground_truth": {"target": ["Paris", "Lutetia"]}}', ["Paris", "Lutetia"]),
        ("{'target': ['Paris', \"Lutetia's\"]}", ["Paris", "Lutetia's"]),
        ("{'target': 'Paris'}", ["Paris"]),
        ("['Paris']", ["Paris"]),
        ('["a","b"]', ["a", "b"]),
        ("['Sri Lanka' 'Ceylon']", ["Sri Lanka", "Ceylon"]),
        ("['Sri Lanka'\n \"Ceylon's\"]", ["Sri Lanka", "Ceylon's"]),
        (["['Sri Lanka', 'Ceylon']"], ["Sri Lanka", "Ceylon"]),
        ("[1912]", ["1912"]),
        ([1912], ["1912"]),
        (1912, ["1912"]),
        (1912.0, ["1912"]),
        (1912.5, ["1912.5"]),
        (Decimal("1912.00"), ["1912"]),
        (float("nan"), []),
        (None, []),
        ([None, "a"], ["a"]),
        ([], []),
        ("[]", []),
        (True, ["yes", "true"]),
        (False, ["no", "false"]),
        (np.array(["a", "b"], dtype=object), ["a", "b"]),
        (np.array([1912]), ["1912"]),
        (np.float64(3.0), ["3"]),
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        ({"text": ["red", "Red"], "answer_start": [3, 9]}, ["red", "Red"]),
        (
            {"value": "UK", "aliases": ["Britain"], "normalized_aliases": ["uk"], "type": "x"},
            ["UK", "Britain"],
        ),
    ],
)
def test_every_form_of_answers_is_the_answers(value, answers):
    assert golden_answers(value) == tuple(answers)


@pytest.mark.parametrize(
    "answer",
    [
        "Tom & Jerry", "9/11", "a|b", "AC/DC", "Romeo, Juliet", "Smith; Jones", "1 || 2", '"Heroes"',
        "[citation]",
        "[Fe(CN)6]4-", "{x}", "{1, 2}", "f(x) = [x", "<sep>", "[" * 100_000, "true", "nan", "null",
        "Hercule: the (first)",
        "'s-Hertogenbosch", "separate <b> ways", "split > up",
    ],
)  # fmt: skip
def test_an_answer_with_signs_stays_one(answer):
    assert golden_answers(answer) == golden_answers([answer]) == (answer,)


def test_a_town_with_an_apostrophe_in_a_list_is_one_answer():
    assert len(golden_answers("['s-Hertogenbosch']")) == 1
    assert golden_answers(["[0, 1]"]) == ("[0, 1]",)


@pytest.mark.parametrize(
    "value",
    [
        "a ||| b", "a [SEP] b", "a<sep>b", "a <|split|> b", "a<answer_split>b", "a\tb", "['a', 'b'",
        "['a', b]",
        "array(['a'], dtype=object)", '{"question": "a"}', {"question": "a"}, "{'target': array(['a'])}",
        b"a",
        float("inf"), [[[[[["a"]]]]]], "['" * 50_000, "sep" * 50_000 + "\tb", "<|sep" * 50_000 + "\ta",
    ],
)  # fmt: skip
def test_what_looks_joined_and_is_not_understood_is_refused(value):
    with pytest.raises(UnclearAnswers):
        golden_answers(value)
