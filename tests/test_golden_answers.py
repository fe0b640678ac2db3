"""Golden answers: several stay several, one stays one, in each form that a file may have."""

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
        ("('a', 'b')", ["a", "b"]),
        ('("a","b")', ["a", "b"]),
        ("('a',)", ["a"]),
        ("{'b', 'a', 'c'}", ["b", "a", "c"]),
        ("[1912, '1912']", ["1912"]),
        ("[None, 'Paris']", ["Paris"]),
        ("[True, 'a']", ["yes", "true", "a"]),
        ("[u'a', u'b']", ["a", "b"]),
        ("[['a','b']]", ["a", "b"]),
        ("[{'text':'a'}]", ["a"]),
        ("['a', 'b'], ['c']", ["a", "b", "c"]),
        (r'"[\"a\", \"b\"]"', ["a", "b"]),
        ("\"['a', 'b']\"", ["a", "b"]),
        ("{'text': ['a','b']}", ["a", "b"]),
        ("{'answers': ['a']}", ["a"]),
        ("{'target': ['a'], 'style': 'rule'}", ["a"]),
        ("[" + "'ab', " * 20_000 + "]", ["ab"]),
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
        "'s-Hertogenbosch", "separate <b> ways", "split > up", "(1994)", "(0, 1)", "[0, 1] or [2, 3]",
        "(Sittin' On) The Dock of the Bay", "('Til) I Kissed You", "{}", "f(x)", "M*A*S*H", "U.S. (1776)",
        "[10 - 20]", "(a) and (b)", "'Tis'", '"Low", "Heroes"', "(1+2j)", "f([x])", "[a, b]",
        "[" * 9_999 + "]" * 9_999, "(" + "-" * 9_999 + "1)", "(" + "a" * 30_000 + ")",
        "[" + "1 " * 50_000 + "x]",
        "('" * 50_000, "a(" * 50_000, "(0, 1), (2, 3)", "[0, 1], [2, 3]",
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
        "a ||| b", "a [SEP] b", "a<|endoftext|>b", "a<br>b", "a\u2028b",
        "a<sep>b", "a <|split|> b", "a<answer_split>b", "a\tb", "['a', 'b'",
        "['a', b]",
        "array(['a'], dtype=object)", '{"question": "a"}', {"question": "a"}, "{'target': array(['a'])}",
        b"a",
        float("inf"), [("a", 1), ("b", 2)], "frozenset({'a','b'})", "np.array(['a'])", "Index(['a'])",
        "[array(['a'], dtype=object)]", "[list(['a', 'b'])]", "OrderedDict([('target', 'a')])",
        "[b'a', b'b']", "[b'a' b'b']", "[1912.0 1913.0]", "[1912 1913]", "[1912. nan]", "[‘a’, ‘b’]",
        "[None 'a']", "[1912 'a']", "['a' None]", "['a', 'b', None", "[['a' 'b']]", "('a' 'b')",
        "{'target': ['a' 'b']}", "('a', b)", "a</s>b", "a [OR] b", "a<OR>b", "a\x1fb", "a\nb", "- a\n- b",
        "a\rb", "{'question': 'a'}", "[" + "'a', " * 20_000 + "1]",
        "[" * 900 + "]" * 900, [[[[[["a"]]]]]], r"['a', '\x']",
        "['" * 50_000, "sep" * 50_000 + "\tb", "<|sep" * 50_000 + "\ta",
    ],
)  # fmt: skip
def test_what_looks_joined_and_is_not_understood_is_refused(value):
    with pytest.raises(UnclearAnswers):
        golden_answers(value)
