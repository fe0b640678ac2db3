"""Runs commands of the pages: `python docs_page_child.py PLACE PLAN RESULTS`.

PLAN has pairs of a page and a command, in JSON; those of one page run in a copy of the directory PLACE, one
after the other. RESULTS gets the exit code and the output of each.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from urllib.request import urlopen

OUT = re.compile(r"--out (\S+)")


def main(place: str, plan: str, results: str) -> None:
    found = []
    os.environ.pop("SRL_WORKSPACE", None)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(dir=Path(place).parent) as root:
        for page, commands in groupby(json.loads(Path(plan).read_text(encoding="utf-8")), lambda row: row[0]):
            copy = Path(root, page.replace("/", "-"))
            shutil.copytree(place, copy, symlinks=True)
            os.chdir(copy)
            environment = dict(os.environ)
            os.environ["PYTHONPATH"] = str(copy / "site")
            (copy / "site").mkdir()  # before it is looked into
            sys.path.insert(0, str(copy / "site"))
            found += [run(command) for _, command in commands]
            sys.path.remove(str(copy / "site"))
            os.chdir(root)
            os.environ.clear()
            os.environ.update(environment)
            shutil.rmtree(copy)
    Path(results).write_text(json.dumps(found), encoding="utf-8")


def run(command: str) -> tuple[int, str]:
    """The exit code of a command and all that it printed. What `--out` names is made anew."""
    for name in OUT.findall(command):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)
    words = shlex.split(command)
    if words[0] == "export":
        name, _, value = command.removeprefix("export ").partition("=")
        code, os.environ[name] = shell(f'printf %s "{value}"')
        return code, ""
    if words[0] == "pip":
        return install(words[-1])
    if words[:3] in (["srl", "inspect", "web"], ["srl", "serve", "retriever"], ["srl", "serve", "mcp"]):
        return serve(command)
    if words[0] == "srl" and not set("|&;<>$`") & set(command):
        return typed(words[1:])
    return shell(command)


def shell(command: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout


def typed(arguments: list[str]) -> tuple[int, str]:
    """`srl` in this process, which has its imports behind it; what it prints, by file descriptor."""
    from srl.cli import main as srl

    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            code = srl(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, copy in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        return code, file.read().decode(errors="replace")


def install(source: str) -> tuple[int, str]:
    """A package of this directory into its `site`, without dependencies; they are here."""
    from srl.plugins import manager

    offline = "--quiet --no-deps --no-build-isolation --no-index --target site"
    found = shell(f"{sys.executable} -m pip install {offline} {source.partition('[')[0]}")
    importlib.invalidate_caches()
    manager.forget()
    return found


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
        if url := process.stdout.readline().strip():
            with urlopen(url.replace("/retrieve", "/health")) as answer:
                answer.read()
            process.send_signal(signal.SIGINT)
        code = process.wait()
        errors.seek(0)
        return (0 if url and code == 130 else code or 1), errors.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
