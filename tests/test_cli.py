"""The command `srl`: what it imports, how it ends, and where it writes."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import typer
from tests.plugin_site import hook, site

from srl import __version__
from srl.cli import main, output
from srl.cli.app import COMMANDS
from srl.errors import CheckFailed, UserError
from srl.install import install_default

__all__ = ["site"]


class OutOfMemoryError(RuntimeError):
    """As PyTorch calls it."""


HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "duckdb",
    "pyarrow",
    "fastapi",
    "httpx",
    "pydantic",
    "rich",
    "yaml",
}


def modules_after(*arguments: str) -> set[str]:
    """The top-level modules that one call of the command leaves imported."""
    code = (
        "import sys; from srl.cli import main; main(sys.argv[1:]);"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "a", "--json", "export", "--out", "m"], "--run, --json before export has no effect"),
        (["--seed", "3", "--set", "a=b", "init"], "--seed, --set before init has no effect"),
    ],
)
def test_options_before_a_command_of_train_are_refused(capsys, arguments, said):
    given = [*arguments, "--tokenizer", "t", "--out", "m"] if arguments[-1] == "init" else arguments
    assert main(["train", *given]) == 2
    assert said in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    assert not modules_after("--help") & HEAVY


def test_plugins_list_imports_nothing_heavy_and_not_even_typer():
    modules = modules_after("plugins", "list")
    assert not modules & HEAVY
    assert "typer" not in modules


def test_plugins_list_through_typer_imports_nothing_heavy():
    assert not modules_after("plugins", "list", "--json") & HEAVY


def test_importing_the_command_imports_nothing_but_how_it_ends():
    code = "import sys; before = set(sys.modules); import srl.cli; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("srl")}
    assert ours == {"srl", "srl.cli", "srl.cli.exit_codes", "srl.errors", "srl.process"}


def test_help_names_every_command_and_leaves_the_modules_alone(capsys, monkeypatch):
    for name in COMMANDS:
        monkeypatch.setitem(sys.modules, f"srl.cli.{name}", None)
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"  {name:9}{summary}" in out.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_loads_and_describes_itself_as_the_help_does(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: srl {name} ")
    assert COMMANDS[name] in out


def test_line_of_a_command_in_a_help_is_not_cut(capsys):
    assert main(["plugins", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "new Create a plugin package: small, working and tested." in text
    assert "..." not in text.partition("Commands:")[2]


def test_no_arguments_show_the_help():
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"srl {__version__}\n"


def test_mistyped_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "No such command 'trian'. Did you mean 'train'?" in err


def command(monkeypatch: pytest.MonkeyPatch, function) -> None:
    """Let `srl eval` be `function`."""
    module = ModuleType("srl.cli.eval")
    module.app = typer.Typer()
    module.app.command()(function)
    monkeypatch.setitem(sys.modules, "srl.cli.eval", module)


def ends(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def body() -> None:
        raise error

    command(monkeypatch, body)
    return main(["eval"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no corpus at x; give --corpus"), 2, "srl: no corpus at x; give --corpus\n"),
        (UserError("two\nlines"), 2, "srl: two lines\n"),
        (CheckFailed("2 of 9 checks failed"), 1, "srl: 2 of 9 checks failed\n"),
        (KeyboardInterrupt(), 130, "srl: interrupted\n"),
        (SystemExit(143), 143, ""),
        (SystemExit("said so"), 1, "srl: said so\n"),
        (SystemExit(None), 0, ""),
        (BrokenPipeError(), 141, ""),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/log"),
            2,
            "srl: the disk is full at /x/log; free",
        ),
        (RuntimeError("IO Error: No space left on device"), 2, "srl: the disk is full; free some space"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root"),
            2,
            "srl: Permission denied: /root\n",
        ),
        (
            OutOfMemoryError("CUDA out of memory. Tried.\nx"),
            2,
            "srl: CUDA out of memory. Tried. Free the GPU, or",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 2, "srl: No such file"),
        (typer.BadParameter("too many"), 2, "srl: Invalid value: too many; type: srl eval --help"),
    ],
)
def test_how_a_command_ends_is_its_exit_code_and_one_line(monkeypatch, capsys, error, code, line):
    assert ends(monkeypatch, error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert code != 2 or line.startswith("Usage") or err.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("odd\nvalue"), EOFError("early"), KeyError("x")])
def test_our_bug_ends_with_70_and_a_traceback_in_a_file(monkeypatch, capsys, tmp_path, error):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ends(monkeypatch, error) == 70
    err = capsys.readouterr().err
    (file,) = tmp_path.glob("srl-traceback-*.txt")
    assert err.count("\n") == 1
    assert err.startswith(f"srl: internal error, {type(error).__name__}: ")
    assert err.endswith(f"report it with the traceback in {file}\n")
    text = file.read_text()
    assert "Traceback (most recent call last)" in text
    assert "in body" in text


def test_traceback_that_cannot_be_written_is_printed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert ends(monkeypatch, ValueError("odd")) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_sigterm_unwinds_and_ends_with_143(monkeypatch):
    unwound = []

    def body() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5)
        finally:
            unwound.append(True)

    before = signal.getsignal(signal.SIGTERM)
    command(monkeypatch, body)
    assert main(["eval"]) == 143
    assert unwound == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def ends_writing_to(stdout: int, unbuffered: str) -> tuple[int, bytes]:
    """Exit code and stderr of `srl plugins list` in a process of its own."""
    code = "import sys; from srl.cli import main; sys.exit(main(['plugins', 'list', '--json']))"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_stops_reading_ends_the_command_quietly(unbuffered):
    read, write = os.pipe()
    os.close(read)
    try:
        assert ends_writing_to(write, unbuffered) == (141, b"")
    finally:
        os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_behind_stdout_is_one_line(unbuffered):
    with open("/dev/full", "w") as full:
        code, err = ends_writing_to(full.fileno(), unbuffered)
    assert (code, err) == (2, b"srl: the disk is full; free some space and try again\n")


def test_workspace_option_reaches_the_command(monkeypatch):
    seen = []
    command(monkeypatch, lambda: seen.append(os.environ["SRL_WORKSPACE"]))
    assert main(["--workspace", "some/where", "eval"]) == 0
    assert seen == ["some/where"]


@pytest.mark.parametrize(
    ("flags", "ours", "theirs"),
    [
        ([], logging.INFO, logging.WARNING),
        (["-v"], logging.DEBUG, logging.INFO),
        (["-vv"], logging.DEBUG, logging.DEBUG),
        (["-q"], logging.WARNING, logging.ERROR),
        (["-qq"], logging.ERROR, logging.ERROR),
        (["-v", "-q"], logging.INFO, logging.WARNING),
    ],
)
def test_verbosity_sets_the_levels_of_our_log_and_of_the_libraries(monkeypatch, flags, ours, theirs):
    levels = []

    def body() -> None:
        levels.append(logging.getLogger("srl.train").getEffectiveLevel())
        levels.append(logging.getLogger("httpx").getEffectiveLevel())

    command(monkeypatch, body)
    assert main([*flags, "eval"]) == 0
    assert levels == [ours, theirs]


def test_telemetry_of_the_libraries_is_off_unless_the_user_says_otherwise(monkeypatch):
    for name in ("HF_HUB_DISABLE_TELEMETRY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    main(["--version"])
    names = ("HF_HUB_DISABLE_TELEMETRY", "TOKENIZERS_PARALLELISM", "DO_NOT_TRACK")
    assert [os.environ[name] for name in names] == ["1", "false", "0"]


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--preset", "small"], True),
        (["--preset", "small", "--set", "model.path=ORG/NAME"], False),
        (["--preset", "small", "--algo", "sft"], True),
        (["--preset", "tiny-hard"], False),
        (["--preset", "no-search"], False),
        (["--preset", "one-gpu"], False),
    ],
)
def test_the_demos_model_under_settings_that_are_not_its_own_is_warned_of(
    monkeypatch, capsys, arguments, warned
):
    monkeypatch.setattr("srl.cli.train._runs", lambda: SimpleNamespace(start=lambda *given, **named: None))
    monkeypatch.setattr("srl.cli.train._tell", lambda *given: None)
    assert main(["train", *arguments]) == 0
    said = "warning: small without a model trains the demo's model; give --model" in capsys.readouterr().err
    assert said == warned


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--model", "mine", "--set", "data.train_files=mine.parquet"], True),
        (["--preset", "small", "--model", "mine", "--set", "data.train_files=mine.parquet"], False),
        (["--model", "mine"], False),
        (["--set", "data.train_files=mine.parquet"], False),
    ],
)
def test_the_demos_settings_with_another_model_and_questions_are_warned_of(
    monkeypatch, capsys, tmp_path, arguments, warned
):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("srl.cli.train._runs", lambda: SimpleNamespace(start=lambda *given, **named: None))
    monkeypatch.setattr("srl.cli.train._tell", lambda *given: None)
    assert main(["train", *arguments]) == 0
    assert ("warning: tiny has the demo's prompt" in capsys.readouterr().err) == warned


def test_the_plan_and_the_keys_are_not_printed_together(capsys):
    assert main(["train", "--dry-run", "--print-config"]) == 2
    assert "--dry-run and --print-config exclude each other" in capsys.readouterr().err


def test_options_left_out_keep_their_defaults_and_those_given_are_converted(monkeypatch):
    seen = {}

    def body(
        k: int = 3, path: Path | None = None, share: float = 0.5, loud: bool = False, name: str = ""
    ) -> None:
        seen.update(locals())

    command(monkeypatch, body)
    assert main(["eval"]) == 0
    expected = {"k": 3, "path": None, "share": 0.5, "loud": False, "name": ""}
    assert {key: seen[key] for key in expected} == expected
    assert main(["eval", "--k", "0", "--path", "a/b", "--share", "1", "--loud", "--name", "0"]) == 0
    expected = {"k": 0, "path": Path("a/b"), "share": 1.0, "loud": True, "name": "0"}
    assert {key: seen[key] for key in expected} == expected
    assert main(["eval", "--k", "many"]) == 2


def test_plugins_list_shows_the_broken_and_the_ambiguous(site, capsys):
    site.install("srl-search-one", hook("reward", "same"))
    site.install("srl-search-two", hook("reward", "same", "fine"))
    site.install("srl-search-bad", "import no_such_module_of_anybody")
    assert main(["plugins", "list"]) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=4) for line in out.splitlines()]
    assert lines[0] == ["kind", "name", "package", "version", "summary"]
    assert lines[1] == ["reward", "fine", "srl-search-two", "1.2", "does fine"]
    assert lines[2][4].startswith(
        "error: registered by srl-search-one and srl-search-two; type: pip uninstall"
    )
    assert lines[4] == [
        "unknown",
        "bad",
        "srl-search-bad",
        "1.2",
        "error: ModuleNotFoundError: No module named 'no_such_module_of_anybody'",
    ]
    assert main(["-q", "plugins", "list"]) == 0
    assert capsys.readouterr().out == out


def test_plugins_list_as_json(site, capsys):
    site.install("srl-search-one", hook("algorithm", "x"))
    assert main(["plugins", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "kind": "algorithm",
            "name": "x",
            "package": "srl-search-one",
            "version": "1.2",
            "summary": "does x",
            "error": "",
        }
    ]


def test_plugins_list_without_plugins_says_what_to_type(site, capsys):
    assert main(["plugins", "list"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert install_default() in err


REWARD = """
from srl.plugins import hookimpl
from srl.trajectory import Score
from pydantic import BaseModel

class Options(BaseModel):
    everywhere: bool = False

class Reward:
    def __init__(self, options):
        self.everywhere = options.everywhere

    def score(self, trajectories):
        return [Score(float("<answer>Genoa" in self.text(one))) for one in trajectories]

    def text(self, one):
        return "".join(segment.text for segment in one.segments if self.everywhere or segment.is_policy)

@hookimpl
def srl_rewards(register):
    register("words", "srl_words:Reward", "looks for words", options="srl_words:Options")
"""


def test_plugins_check_prints_every_check_and_ends_with_1_where_one_fails(site, capsys):
    site.install("srl-search-words", REWARD)
    assert main(["plugins", "check", "words"]) == 0
    good = capsys.readouterr().out.splitlines()[1:]
    assert {line.split()[0] for line in good} == {"ok"}
    assert main(["plugins", "check", "words", "--set", "everywhere=true"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == len(good) + 1
    assert "FAILED  a passage with the answer earns nothing: the score of an episode" in out
    assert err.startswith(
        "srl: reward 'words' fails 3 of 12 checks: a passage with the answer earns nothing ("
    )


def test_plugins_check_as_json(site, capsys):
    site.install("srl-search-words", REWARD)
    assert main(["plugins", "check", "words", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["package"], len(result["checks"])) == ("reward", "srl-search-words", 12)
    assert result["checks"][0] == {
        "name": "gives one score for each trajectory",
        "passed": True,
        "detail": "",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["word"], "srl: no plugin 'word'; type: srl plugins list; did you mean 'words'?"),
        (["words", "--kind", "retriever"], "srl: no retriever 'words': no retriever is installed"),
        (["words", "--set", "everywhere"], "srl: --set everywhere: "),
        (["words", "--set", "every=1"], "srl: no option reward.words.every: there are everywhere"),
        (["both"], "type: srl plugins check both --kind retriever"),
        (["bad"], "ModuleNotFoundError: No module named 'no_such_module_of_anybody'"),
    ],
)
def test_plugins_check_refuses_in_one_line(site, capsys, arguments, message):
    site.install("srl-search-words", REWARD)
    site.install("srl-search-bad", "import no_such_module_of_anybody")
    site.install("srl-search-both", hook("reward", "both") + "\n" + hook("retriever", "both"))
    if arguments[-1] == "retriever":
        site.install("srl-search-both", hook("reward", "both"), version="1.1")
    assert main(["plugins", "check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@dataclass
class Point:
    x: float
    where: Path


def test_json_takes_data_classes_paths_numpy_and_nan(capsys):
    given = [Point(float("nan"), Path("a")), {1: np.float32(0.5), "b": np.arange(2)}, {"é"}, None, True, (1,)]
    output.print_json(given)
    assert json.loads(capsys.readouterr().out) == [
        {"x": None, "where": "a"},
        {"1": 0.5, "b": [0, 1]},
        ["é"],
        None,
        True,
        [1],
    ]


def test_console_in_a_pipe_prints_text_as_it_is(capsys):
    line = "[bold]not markup[/bold] :smile: " + "x" * 300
    output.stdout().print(line)
    output.stderr().print(line)
    assert capsys.readouterr() == (line + "\n", line + "\n")


def test_notes_and_progress_are_one_line_on_stderr_and_nothing_when_quiet(capsys):
    for level, expected in ((0, "done\nindexing: 1,200 of 1,200\n"), (-1, "")):
        output.set_verbosity(level)
        output.note("done")
        with output.progress("indexing", 1200) as update:
            update(600)
            update(1200)
        assert capsys.readouterr() == ("", expected)
    output.set_verbosity(0)


def test_skip_of_a_test_that_must_run_is_a_failure_in_ci_only(tmp_path):
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.must_run\n"
        "def test_needed(): pytest.skip('no verl here')\n"
        "@pytest.mark.must_run\n"
        "@pytest.mark.skipif(True, reason='not today')\n"
        "def test_also_needed(): pass\n"
        "def test_optional(): pytest.skip('no data here')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, tmp_path]
    for ci, code, told in (("true", 1, b"1 failed, 1 skipped, 1 error"), ("", 0, b"3 skipped")):
        environment = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode == code
        assert told in done.stdout
