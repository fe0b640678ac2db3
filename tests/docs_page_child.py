"""Runs commands of the pages in the environment of `make setup`: `python docs_page_child.py PLAN RESULTS`.

The plan is JSON: `names` of the distributions in sight, `pages` with the commands of each, and `place`, the
directory in a copy of which those of a page run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.request import urlopen

TESTS = Path(__file__).parent
SHELL_SIGNS = set("|&;<>$`\n")
OUT = re.compile(r"--out (\S+)")
IN_SIGHT: set[str] = set()
"""The distributions that this process finds; one that a page installs is added."""
STUB = """\
#!{python}
import sys
sys.path.insert(0, {tests!r})
from made_setup import hide_all_but
sys.path.pop(0)
hide_all_but(set({names!r}))
from srl.cli import main
sys.exit(main())
"""


def main(plan_file: str, results_file: str) -> int:
    """Run every page's commands, write `[page, command, exit code, output]` for each."""
    sys.path.insert(0, str(TESTS))
    from made_setup import hide_all_but

    sys.path.pop(0)
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    IN_SIGHT.update(plan["names"])
    hide_all_but(IN_SIGHT)
    results = []
    with tempfile.TemporaryDirectory(dir=Path(plan["place"]).parent) as root:
        write_programs(Path(root, "bin"), plan["names"])
        for number, (page, commands) in enumerate(plan["pages"]):
            copy = Path(root, f"page-{number}")
            shutil.copytree(plan["place"], copy, symlinks=True)
            with in_place(copy, Path(root, "bin")):
                results += [(page, command, *run(command)) for command in commands]
    Path(results_file).write_text(json.dumps(results), encoding="utf-8")
    return 0


def write_programs(folder: Path, names: list[str]) -> None:
    """`srl` for a shell, in the same environment; pytest comes with a new plugin's extra."""
    folder.mkdir(exist_ok=True)
    texts = {
        "srl": STUB.format(python=sys.executable, tests=str(TESTS), names=names),
        "pytest": f"#!{sys.executable}\nimport sys, pytest\nsys.exit(pytest.main())\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)


@contextmanager
def in_place(folder: Path, programs: Path) -> Iterator[None]:
    """The working directory, `PATH` and where a plugin of the page is installed; all undone at the end."""
    here, environment, path = Path.cwd(), dict(os.environ), list(sys.path)
    os.chdir(folder)
    os.environ.pop("SRL_WORKSPACE", None)
    os.environ.update(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(folder / "site"))
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path


def run(command: str) -> tuple[int, str]:
    """The exit code of a command and all that it printed. What `--out` names is made anew."""
    for name in OUT.findall(command):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)
    words = command.split()
    if words[0] == "export":
        return export(command)
    if words[:3] == ["srl", "inspect", "web"] or (words[:2] == ["srl", "serve"] and words[2] != "check"):
        return serve(command)
    if words[0] == "pip":
        return install(shlex.split(command)[-1])
    if words[:2] == ["python", "-c"]:
        exec(shlex.split(command)[2], {"__name__": "__main__"})
        return 0, ""
    if words[0] == "srl" and not set(command) & SHELL_SIGNS:
        return typed(shlex.split(command)[1:])
    return in_shell(command)


def in_shell(command: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def typed(arguments: list[str]) -> tuple[int, str]:
    """`srl` in this process, which has its imports behind it."""
    from srl.cli import main as srl

    with captured() as file:
        code = srl(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        file.seek(0)
        return code, file.read().decode(errors="replace")


@contextmanager
def captured() -> Iterator[IO[bytes]]:
    """Whatever is written to stdout and stderr, by file descriptor."""
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            for number in kept:
                os.close(number)


def export(command: str) -> tuple[int, str]:
    name, _, value = command.removeprefix("export ").partition("=")
    code, os.environ[name] = in_shell(f'printf %s "{value}"')
    return code, ""


def install(source: str) -> tuple[int, str]:
    """A package of this directory, without its dependencies; they are here."""
    from srl.plugins import manager

    folder = source.partition("[")[0]
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", "site", folder]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    IN_SIGHT.add(Path(folder).name)
    sys.path.insert(0, str(Path("site").absolute()))
    manager.forget()
    return done.returncode, done.stdout


def serve(command: str) -> tuple[int, str]:
    """Serve on a free port until the first answer; a server that ctrl-C ends as it should has exit code 0."""
    command = re.sub(r" --port \d+|$", " --port 0", command, count=1)
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            ["bash", "-c", f"exec {command}"], text=True, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if url:
            with urlopen(url.replace("/retrieve", "/healthz")) as answer:
                answer.read()
            process.send_signal(signal.SIGINT)
        code = process.wait()
        errors.seek(0)
        return (0 if url and code == 130 else code or 1), errors.read()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
