"""The words of an error: its first line, in messages of ours."""

import pytest

from srl.errors import CheckFailed, UserError, first_line, parsing


@pytest.mark.parametrize(
    ("message", "line"),
    [("one line", "one line"), ("\n \n  second \nthird", "second"), ("", "OSError"), (" \n", "OSError")],
)
def test_the_first_line_of_an_error_is_never_empty(message, line):
    assert first_line(OSError(message)) == line


@pytest.mark.parametrize(
    "error",
    [
        OSError(36, "File name too long", "x"), ValueError("odd"), TypeError("odd"), KeyError("name"),
        RuntimeError("odd"), RecursionError("odd"), OverflowError("odd"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_a_library_raises_on_input_names_the_input_in_one_line(error):
    with pytest.raises(UserError, match=r"^my\.json: ") as caught, parsing("my.json"):
        raise error
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [AttributeError("odd"), AssertionError(), CheckFailed("known"), UserError("ours")]
)
def test_a_bug_and_an_error_of_ours_pass_through_while_input_is_parsed(error):
    with pytest.raises(type(error)) as caught, parsing("my.json"):
        raise error
    assert caught.value is error
