"""The command `srl`: what it imports, how it ends, what it prints where, and how much there is of it."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import typer
from tests.plugin_site import site

from srl.cli import main
from srl.cli.app import command
from srl.errors import CheckFailed, UserError

__all__ = ["site"]

MOST_OPTIONS = 170
HEAVY = {"torch", "transformers", "numpy", "duckdb", "pyarrow", "fastapi", "httpx", "rich", "yaml"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["plugins", "list"]], ids=" ".join)
def test_help_and_plugins_list_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from srl.cli import main; main(sys.argv[1:]);"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.splitlines()[-1].split()) & HEAVY


def options_of(command: Any) -> Iterator[tuple[str, int]]:
    """Each command below `command` that does something, with the number of its options."""
    context = command.context_class(command, info_name=command.name)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    for name in names:
        yield from options_of(command.get_command(context, name))
    if not names or command.invoke_without_command:
        options = [one for one in command.params if one.param_type_name == "option"]
        yield str(command.name), len(options)


def test_there_are_no_more_commands_and_options_than_one_can_know() -> None:
    counts = list(options_of(command()))
    assert len(counts) <= 40, counts
    assert sum(count for _, count in counts) <= MOST_OPTIONS, counts


def replace_eval(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Let `srl eval` be `function`."""
    module: Any = ModuleType("srl.cli.eval")
    module.app = typer.Typer()
    module.app.command()(function)
    monkeypatch.setitem(sys.modules, "srl.cli.eval", module)


def ends(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def body() -> None:
        raise error

    replace_eval(monkeypatch, body)
    return main(["eval"])


class OutOfMemoryError(RuntimeError):
    """As PyTorch calls it."""


@pytest.mark.parametrize(
    ("error", "code", "named"),
    [
        (UserError("no corpus at x", hint="give --corpus"), 2, "no corpus at x; give --corpus"),
        (UserError("two\nlines"), 2, "two lines"),
        (CheckFailed("2 of 9 checks failed"), 1, "2 of 9 checks failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, None),
        (SystemExit("said so"), 1, "said so"),
        (SystemExit(None), 0, None),
        (BrokenPipeError(), 141, None),
        (OSError(errno.ENOSPC, "No space left on device", "/x/log"), 2, "/x/log"),
        (RuntimeError("IO Error: No space left on device"), 2, "disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/root"), 2, "/root"),
        (OutOfMemoryError("CUDA out of memory. Tried.\nx"), 2, "rollout.max_num_seqs"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 2, "No such file"),
        (typer.BadParameter("too many"), 2, "srl eval --help"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_how_a_command_ends_is_its_exit_code_and_one_line(monkeypatch, capsys, error, code, named) -> None:
    assert ends(monkeypatch, error) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 0 if named is None else 1)
    assert err.startswith("srl: ") == (named is not None)
    assert (named or "") in err


@pytest.mark.parametrize("error", [ValueError("odd\nvalue"), EOFError("early"), KeyError("x")])
def test_our_bug_ends_with_70_and_a_traceback_in_a_file(monkeypatch, capsys, tmp_path, error) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ends(monkeypatch, error) == 70
    err = capsys.readouterr().err
    (file,) = tmp_path.glob("srl-traceback-*.txt")
    assert err.count("\n") == 1
    assert str(file) in err
    assert "in body" in file.read_text()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert ends(monkeypatch, error) == 70
    assert "in body" in capsys.readouterr().err


def test_sigterm_unwinds_and_ends_with_143(monkeypatch) -> None:
    unwound = []

    def body() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5)
        finally:
            unwound.append(True)

    before = signal.getsignal(signal.SIGTERM)
    replace_eval(monkeypatch, body)
    assert main(["eval"]) == 143
    assert unwound == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_reader_that_stops_reading_ends_the_command_quietly() -> None:
    code = "import sys; from srl.cli import main; sys.exit(main(['plugins', 'list', '--json']))"
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (141, b"")
    finally:
        os.close(write)


@pytest.mark.parametrize(
    ("flags", "ours", "theirs"),
    [
        ([], logging.INFO, logging.WARNING),
        (["-vv"], logging.DEBUG, logging.DEBUG),
        (["-qq"], logging.ERROR, logging.ERROR),
        (["-v", "-q"], logging.INFO, logging.WARNING),
    ],
)
def test_global_options_reach_the_command(monkeypatch, flags, ours, theirs) -> None:
    seen = []

    def body() -> None:
        seen.append(logging.getLogger("srl.train").getEffectiveLevel())
        seen.append(logging.getLogger("httpx").getEffectiveLevel())
        seen.append(os.environ["SRL_WORKSPACE"])

    replace_eval(monkeypatch, body)
    assert main([*flags, "eval", "--workspace", "some/where"]) == 0
    assert seen == [ours, theirs, "some/where"]


def test_plugins_check_ends_with_1_where_a_plugin_breaks_a_promise(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lost.py").write_text(
        "class Lost:\n    def score(self, trajectories): return []\n\nclass NoPlugin: ...\n"
    )
    assert main(["plugins", "check", "lost:Lost", "--kind", "reward"]) == 1
    assert main(["plugins", "check", "lost:NoPlugin"]) == 2
    assert main(["plugins", "check", "lost:Lost"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["plugins", "check", "lost:Lost", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["kind"] == "reward"
    assert not all(check["passed"] for check in result["checks"])


def test_telemetry_of_the_libraries_is_off_unless_the_user_says_otherwise(monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY")
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    assert main(["--version"]) == 0
    assert [os.environ[name] for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")] == ["1", "0"]
