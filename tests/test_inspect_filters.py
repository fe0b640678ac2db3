"""The options that choose trajectories: every condition has one, and a command gets those that it names."""

from __future__ import annotations

from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from srl.browse.trajectories import Filter
from srl.cli.inspect.filters import Filters, filtered
from srl.cli.inspect.shared import Phase

EACH = {
    "steps": "1:2", "phase": "val", "source": "nq", "hops": 2, "question": "q1", "em": "<1", "reward": "0",
    "end": "answered", "verdict": "reader", "min_searches": 1, "max_searches": 3, "contains": "rome",
    "failed": True,
}  # fmt: skip


def given(names: tuple[str, ...], *typed: str) -> tuple[int, list[Filters]]:
    """The exit code of a command with these options, and the filters that it got."""
    got: list[Filters] = []
    app = typer.Typer()

    @app.command()
    @filtered(*names)
    def command(run: str = "last", *, filters: Filters) -> None:
        got.append(filters)

    return CliRunner().invoke(app, list(typed)).exit_code, got


def test_every_condition_is_an_option():
    assert [option.name for option in fields(Filters)] == [condition.name for condition in fields(Filter)]
    options = Filters(**EACH | {"phase": Phase.val})
    assert options.condition() == Filter(**EACH)
    assert Filters().condition() == Filter()


@pytest.mark.parametrize("name", EACH)
def test_an_option_is_given_by_its_name(name):
    value = [] if name == "failed" else [str(EACH[name])]
    code, got = given((), f"--{name.replace('_', '-')}", *value)
    assert code == 0
    assert got == [Filters(**{name: EACH[name]})]


def test_a_command_has_only_the_options_that_it_names():
    assert given(("steps", "em"), "--em", "1", "--steps", "3") == (0, [Filters(steps="3", em="1")])
    assert given(("steps", "em"), "--phase", "val") == (2, [])
