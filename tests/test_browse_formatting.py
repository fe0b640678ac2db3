"""Text, numbers and rows made safe and short."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from srl.browse.formatting import csv_text, duration, json_line, number
from srl.safe import one_line


def _acts(letter: str) -> bool:
    import unicodedata

    return unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_json_line_says_the_same_and_prints(value):
    line = json_line(value)
    assert json.loads(line) == value
    assert not any(_acts(letter) for letter in line if letter not in "\u200c\u200d")


def test_json_line_has_no_nan():
    assert json_line({"a": [float("nan"), float("inf"), 1.5]}) == '{"a": [null, null, 1.5]}'


def test_numbers_and_times_for_people():
    assert [number(value) for value in (None, 3, 0.5, 0.0, -1.23456, 1e-5)] == [
        "",
        "3",
        "0.500",
        "0.000",
        "-1.235",
        "1e-05",
    ]
    assert [duration(value) for value in (None, 5.4, 200, 3725)] == ["", "5s", "3m 20s", "1h 02m"]
    assert one_line(" a\n b\tc ", 4) == "a b…"


def test_csv_keeps_values_and_writes_lists_as_json():
    text = csv_text(["a", "b"], [(1, None), ('say "hi"', ["x", "ü"])])
    assert text == 'a,b\n1,\n"say ""hi""","[""x"", ""ü""]"\n'
