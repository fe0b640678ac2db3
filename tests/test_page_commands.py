"""Every command, program and setting that the pages and the helps tell a reader to type does what it should.

Each runs on small stand-ins, offline, with nothing in sight but what `make setup` installs. A command that
cannot run here is named below with the reason, and `srl` must still know its options.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.docs_page_lines import (
    PAGES,
    ROOT,
    Line,
    all_lines,
    lines_of,
    mentions_of,
    programs_of,
    settings_of,
)
from tests.docs_page_place import write_place
from tests.live_server import running
from tests.made_setup import names_for

import srl.store
from srl.cli import command
from srl.config import load_config
from srl.index import open_index
from srl.serve.server import create_app

HUB = "it asks the Hugging Face hub; tests/hub.py stands in for it"
PUBLISHED = "it is pyserini's, or 65 GB; tests/test_published_import.py has small ones"
MODEL_SERVER = "it asks the server of a model; tests/fake_openai.py stands in for it"
CANNOT = {
    r"srl index pull ": HUB,
    r"srl data prepare search-r1": HUB,
    r"srl (eval run|data demonstrations) .*rollout.engine=openai": MODEL_SERVER,
    r"srl eval compare ": "it wants two evaluations; tests/test_eval_compare.py makes them",
    r"srl plugins check judge ": MODEL_SERVER,
    r"srl inspect diff .*@\d+ .*@\d+": "it wants two steps; tests/test_inspect_diff.py has them",
    r"srl inspect export .*--em 1 ": "it wants right episodes; tests/test_inspect_exchange.py has some",
    r"srl inspect export .*inspect-eval ": "it wants inspect_ai; tests/test_inspect_eval.py has it",
    r"srl inspect prune ": "it wants a finished run of training; tests/test_log_care.py has them",
    r"srl inspect merge ": "it wants several workspaces; tests/test_log_care.py has them",
    r"srl inspect report .*--verdict ": "it wants episodes of that verdict; tests/test_report.py has them",
    r"srl inspect import ": "it wants a dump of verl; tests/test_inspect_exchange.py writes one",
    r"srl inspect why ": "it wants eight training steps; tests/test_why.py has them",
    r"hf download ": HUB,
    r"srl eval run .*--backend verl": "it wants verl; tests/test_verl_evaluation.py has it",
    r"srl eval run .*--suite search-r1": "it wants the seven test sets of Search-R1, 51,713 questions",
    r"srl (eval run|train (?!.*--dry-run).*--model) [A-Z]\w*/\w": HUB,
    r"srl train .*\.gguf": "it wants a GGUF file; tests/test_convert_gguf.py writes one",
    r"srl index import (wiki18-e5/|e5/)?e5_Flat.index ": PUBLISHED,
    r"srl index import (bm25|bm25/bm25|wiki-18-bm25) ": PUBLISHED,
    r"srl index search web-index ": "it asks a search API; plugins/retrievers/web/tests stand in for it",
    r"srl serve .* search_on=gpu": "it wants a GPU",
    r"srl train --backend verl (?!.*--dry-run)": "it wants eight GPUs; tests/test_verl_runs.py has none",
    r"MODEL=|RAY_HEAD=": "it wants a cluster; tests/test_examples.py reads the scripts",
    r"pip install (?!-e '?\./)": "it asks a package index; its extras are looked up",
    r"source \.venv/bin/activate": "a shell's own; CI has run `make` just before",
    r"pip install -e '\.\[test\]'|pytest$|srl .*\{\{": "a new plugin's; tests/test_plugin_scaffold.py",
}
"""Commands, by how they begin, that do not run here, and why."""
SLOW = r".*: srl serve .*--replicas|.*: srl train --backend verl|plugins/retrievers/lucene/"
"""What takes long, or more than `make setup` installs."""
SMALL = (
    "trainer.total_training_steps=1", "data.train_batch_size=2", "rollout.n=2", "rollout.max_turns=1",
    "rollout.max_turn_tokens=16", "actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2",
    "eval.val_questions=2", "eval.test_questions=2", "trainer.threads=1", "trainer.critic_warmup=0",
)  # fmt: skip
"""What makes any training run one of seconds."""
STAND_INS = {
    "DIRECTORY": "my-model",
    "train_files=facts.jsonl": "train_files=shown.jsonl",
    "train_files=read.jsonl": "train_files=shown.jsonl",
    "model=DIR ": "model=cross-encoder/ms-marco-MiniLM-L12-v2 ",
    "model=my-classifier": "model=cross-encoder/ms-marco-MiniLM-L12-v2",
    "facebook/contriever": "intfloat/e5-base-v2",
    "0.0.0.0": "127.0.0.1",
    "KEY=…": "KEY=key",
}
"""What stands in for a name that a reader puts in, or that is not on this machine."""
LINES = all_lines()


def reason(line: Line) -> str:
    """Why a command does not run here; nothing where it does."""
    return next((why for start, why in CANNOT.items() if re.match(start, line.text)), "")


def is_training(text: str) -> bool:
    return bool(re.match(r"srl train (?!import|init|export|--resume)", text))


def filled(text: str, trajectory: str, port: int) -> str:
    """The command with the names that a reader puts in, and with this machine's server."""
    hosts = iter(("127.0.0.1", "localhost"))
    text = re.sub(r"http://[\w.]+:8000", lambda _: f"http://{next(hosts)}:{port}", text)
    text = re.sub(r"\bID\b|\b0bdf61\b", trajectory, text)
    for named, here in STAND_INS.items():
        text = text.replace(named, here)
    return re.sub(r"--replicas \d+", "--replicas 2", text)


def configured(text: str) -> str:
    """A training command that stops once its configuration is read, and an evaluation of one question."""
    if text.startswith("srl eval run "):
        drawn = "--budget 2" if "--budget" in text or "--suite" in text else "--limit 1"
        return f"{text} {drawn} --set rollout.max_turns=1 --set rollout.max_turn_tokens=16"
    return f"{text.replace(' --dry-run', '')} --print-config" if is_training(text) else text


def small(text: str) -> str:
    """A training command made small."""
    if not is_training(text) or "--dry-run" in text:
        return text
    model = "" if "--model" in text else " --model made/model"
    return text + model + "".join(f" --set {setting}" for setting in SMALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("pages") / "place")


@pytest.fixture(scope="module")
def port(place: Path) -> Iterator[int]:
    """Of a server of `my-index`."""
    with running(create_app({"my-index": open_index(place / "my-index")})) as url:
        yield int(url.rpartition(":")[2].partition("/")[0])


def outcomes(
    place: Path, port: int, lines: Sequence[Line], change: Any, *more: str
) -> dict[Line, tuple[int, str]]:
    """Exit code and output of each line, `change`d, with what `make setup` and `more` install."""
    with srl.store.open(place / "srl-workspace" / "runs") as log:
        [(trajectory,)] = log.execute("SELECT id FROM trajectories LIMIT 1").fetchall()
    pages: dict[str, list[Line]] = {}
    for line in lines:
        pages.setdefault(line.page, []).append(line)
    plan = {
        "names": sorted(names_for(*more)),
        "place": str(place),
        "pages": [
            (page, [change(filled(line.text, trajectory, port)) for line in found])
            for page, found in pages.items()
        ],
    }
    files = place.parent / "plan.json", place.parent / "results.json"
    files[0].write_text(json.dumps(plan), encoding="utf-8")
    child = [sys.executable, str(ROOT / "tests" / "docs_page_child.py"), *map(str, files)]
    subprocess.run(child, check=True, env={**os.environ, "PYTHONPATH": ""})
    results = json.loads(files[1].read_text(encoding="utf-8"))
    found = [line for lines in pages.values() for line in lines]
    return {line: (code, output) for line, (_, _, code, output) in zip(found, results, strict=True)}


def check(found: dict[Line, tuple[int, str]]) -> None:
    """Name the lines that ended with another exit code than 0, with what they printed."""
    failed = [(line, code, output) for line, (code, output) in found.items() if code]
    if failed:
        texts = (f"{line}\nexit code {code}\n{output}" for line, code, output in failed)
        pytest.fail("\n\n".join(texts), pytrace=False)


RUN = [line for line in LINES if not reason(line) and not line.text.startswith("make ")]
_SERVE = {line.text: line for line in RUN if line.text.startswith("srl serve retriever ")}
"""Three pages start the same server; one of them does here."""
FAST = [line for line in RUN if not re.match(SLOW, str(line)) and _SERVE.get(line.text, line) == line]
LONG = [line for line in RUN if re.match(SLOW, str(line)) or is_training(line.text)]


def test_command_runs_with_what_make_setup_installs(place, port):
    """Training stops once its configuration is read; the slow tests take it further."""
    check(outcomes(place, port, FAST, configured))


@pytest.mark.slow
@pytest.mark.must_run
def test_slow_command_runs_with_what_its_page_installs(place, port):
    more = "srl-search[verl]", "srl-search-lucene[jdk]"
    check(outcomes(place, port, LONG, small, *more))


@pytest.mark.parametrize("line", [line for line in LINES if line.text.startswith("make ")], ids=str)
def test_make_knows_the_target(line):
    done = subprocess.run(
        [*shlex.split(line.text), "-n"], cwd=ROOT, text=True, capture_output=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def known(line: Line) -> tuple[list[str], dict[str, Any]]:
    """The commands that a line names and the options of the last; click exits where one is not known."""
    words = shlex.split(line.text)[1:]
    context, path = command().make_context("srl", list(words)), ["srl"]
    while rest := [*getattr(context, "_protected_args", []), *context.args]:
        name, found, rest = context.command.resolve_command(context, rest)
        context = found.make_context(name, list(rest), parent=context)
        path.append(name)
    return path, context.params


@pytest.mark.parametrize(
    "line", [line for line in LINES if reason(line) and re.match(r"srl (?!.*\{\{)", line.text)], ids=str
)
def test_srl_knows_the_options_of_a_command_that_cannot_run_here(line):
    path, params = known(line)
    assert len(path) > 1
    if path == ["srl", "train"]:
        assert load_config(
            params["preset"], params["config"], params["algo"], {}, params["sets"] or []
        ).config


def test_extras_that_the_pages_install_exist():
    asked = [
        found
        for page in PAGES
        for found in re.findall(r"-e '(\.|plugins/[\w/]+)\[([\w,]+)\]'", page.read_text(encoding="utf-8"))
    ]
    assert {folder for folder, _ in asked} >= {".", "plugins/retrievers/e5", "plugins/retrievers/lucene"}
    for folder, extras in asked:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert {*extras.split(",")} - {"test"} <= project["optional-dependencies"].keys()


def test_reason_not_to_run_a_command_is_one_of_a_command():
    unused = [start for start in CANNOT if not any(re.match(start, line.text) for line in LINES)]
    assert unused == []


def check_mention(mention: str) -> None:
    """Whether the commands and options that a text mentions exist; arguments may be missing."""
    words, place = iter(mention.split()[1:]), command()
    for word in words:
        options = {name: option for option in place.params for name in (*option.opts, *option.secondary_opts)}
        if word.startswith("-") and word != "--help":
            assert word in options, f"{mention}: no {word}"
            if not options[word].is_flag:
                next(words, "")
        elif hasattr(place, "get_command") and not word.startswith("-"):
            place = place.get_command(place.context_class(place), word)
            assert place is not None, f"{mention}: no {word}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_in_running_text_is_one_of_srl(path):
    for mention in mentions_of(path.read_text(encoding="utf-8")):
        check_mention(mention)


@pytest.mark.parametrize("mention", ["srl serve retriver", "srl train --resum", "srl --workspace W trian"])
def test_mention_of_what_is_not_there_is_found(mention):
    with pytest.raises(AssertionError):
        check_mention(mention)


PROGRAMS = [(path, program) for path in PAGES for program in programs_of(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("path", "program"), PROGRAMS, ids=[f"{path.name}-{number}" for number, (path, _) in enumerate(PROGRAMS)]
)
def test_program_runs(path, program, place, port, monkeypatch):
    monkeypatch.chdir(place)
    run = next((place / "srl-workspace" / "runs").iterdir()).name
    program = program.replace("runs/…", f"runs/{run}").replace(":8000", f":{port}")
    names: dict[str, Any] = {}
    if "Recorder(search" in program:
        from srl.serve.in_process import LocalSearch

        names["search"] = LocalSearch(open_index(place / "my-index"), topk=3)
    exec(compile(program, str(path), "exec"), names)


SETTINGS = [(path, text) for path in PAGES for text in settings_of(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("path", "text"), SETTINGS, ids=[f"{path.name}-{number}" for number, (path, _) in enumerate(SETTINGS)]
)
def test_settings_are_known(path, text, tmp_path):
    (tmp_path / "given.yaml").write_text(text, encoding="utf-8")
    load_config(file=tmp_path / "given.yaml")


def test_new_line_of_a_page_is_seen():
    page = "Text.\n\n    srl index pull x --out y   # a comment\n    output\n\n```sh\ndocker run srl\n```\n"
    page += "```console\n$ srl eval run \\\n  my-model\nEM 1\n```\n"
    texts = [line.text for line in lines_of("README.md", page)]
    assert texts == ["srl index pull x --out y", "docker run srl", "srl eval run my-model"]
    assert known(Line("README.md", "srl index info my-index"))[0] == ["srl", "index", "info"]
    with pytest.raises(Exception, match="No such option"):
        known(Line("README.md", "srl index info my-index --corpse x"))
