"""Every command, program and setting that the pages tell a reader to type does what it should.

Each runs on small stand-ins, offline. A command that cannot run here is named below with the reason; that
`srl` knows its options is checked for every line.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs_page_lines import PAGES, ROOT, Line, all_lines, blocks_of, lines_of
from tests.docs_page_place import write_place
from tests.live_server import running
from tests.store_builder import log_rows

from srl.cli.app import command
from srl.config import load_config
from srl.index import open_index
from srl.serve.server import create_app

HUB = "it asks the Hugging Face hub; tests/hub.py stands in for it"
DATA = "it wants data of a page or of a hub; bench/real has them"
CANNOT = {
    r"srl index (pull|import) ": DATA,
    r"srl data prepare (squad|search-r1|nq|hotpotqa|2wikimultihopqa)": DATA,
    r"srl data prepare .*data/": DATA,
    r"srl .*rollout.engine=openai": "it asks the server of a model; tests/fake_openai.py stands in for it",
    r"srl data demonstrations .*--from facts": "it wants gold passages; tests/test_fact_demonstrations.py",
    r"srl data demonstrations --from-log": "it wants right episodes; tests/test_teacher.py has some",
    r"srl plugins check mcp ": "it asks an MCP server; the tests of plugins/tools/mcp have some",
    r"srl plugins check judge ": "it asks the server of a model; tests/fake_openai.py stands in for it",
    r"srl eval compare ": "it wants two evaluations; tests/test_eval_compare.py makes them",
    r"srl inspect diff .*@\d+ .*@\d+": "it wants two steps; tests/test_inspect_diff.py has them",
    r"srl inspect export .*em = 1": "it wants right episodes; tests/test_inspect_exchange.py has some",
    r"srl inspect report .*verdict": "it wants episodes of that verdict; tests/test_report.py has them",
    r"srl inspect import ": "it wants a dump of verl; tests/test_inspect_exchange.py writes one",
    r"srl inspect why ": "it wants eight training steps; tests/test_why.py has them",
    r"srl eval run .*--run RUN1": "it wants the runs of two shards; tests/test_evaluation_runs.py makes them",
    r"srl eval run .*search-r1/test": "it wants the seven test sets of Search-R1",
    r"vllm serve ": "it wants a GPU",
    r"srl (eval run|train (?!.*--dry-run).*--model) [A-Z]\w*/\w": HUB,
    r"srl index search (web-index |.*env=)": "it asks a search API; those of the web plugin stand in",
    r"srl index build .*--retriever (lucene|hybrid)": "it wants Java",
    r"srl serve .* search_on=gpu": "it wants a GPU",
    r"srl train --backend verl": "it wants GPUs; tests/test_verl_runs.py has none",
    r"(MODEL|RAY_HEAD)=": "it wants a cluster; tests/test_examples.py reads the scripts",
    r"pip install (?!-e '?\./srl)": "it asks a package index",
    r"(hf|git|source) ": "it asks the network, or is a shell's own",
    r"pytest|srl .*\{\{|pip .*\{\{": "a new plugin's; tests/test_plugin_scaffold.py",
}
"""Commands, by how they begin, that do not run here, and why."""
STAND_INS = {
    "DIRECTORY": "my-model", "0.0.0.0": "127.0.0.1", "KEY=…": "KEY=key",
    "facebook/contriever": "intfloat/e5-base-v2",
    "train_files=facts.jsonl": "train_files=shown.jsonl", "train_files=read.jsonl": "train_files=shown.jsonl",
    "model=DIR ": "model=cross-encoder/ms-marco-MiniLM-L12-v2 ",
    "grpo.yaml --dry-run": "grpo.yaml --print-config",
    "model=my-classifier": "model=cross-encoder/ms-marco-MiniLM-L12-v2",
}  # fmt: skip
"""What stands in for a name that a reader puts in, or that is not on this machine."""
LINES = all_lines()


def reason(line: Line) -> str:
    """Why a command does not run here; nothing where it does."""
    return next((why for start, why in CANNOT.items() if re.match(start, line.text)), "")


def filled(text: str, trajectory: str, port: int) -> str:
    """The command with the names that a reader puts in and this machine's server; short where it trains."""
    hosts = iter(("127.0.0.1", "localhost"))
    text = re.sub(r"http://[\w.]+:8000", lambda _: f"http://{next(hosts)}:{port}", text)
    text = re.sub(r"\bID\b|\b0bdf61\b", trajectory, text)
    for name, stand_in in STAND_INS.items():
        text = text.replace(name, stand_in)
    text = re.sub(r"(--resume .*--steps) \d+", r"\1 3", text)
    if re.match(r"srl train (?!import|init|export|--resume)", text) and "--dry-run" not in text:
        text += " --print-config"
    if text.startswith("srl eval run "):
        text += " --limit 2 --set rollout.max_turns=1 --set rollout.max_turn_tokens=16"
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("pages") / "place")


@pytest.fixture(scope="module")
def port(place: Path) -> Iterator[int]:
    """Of a server of `my-index`."""
    with running(create_app(open_index(place / "my-index"))) as url:
        yield int(url.rpartition(":")[2].partition("/")[0])


@pytest.mark.slow
@pytest.mark.must_run
def test_commands_run(place: Path, port: int) -> None:
    """Training stops once its configuration is read."""
    [(trajectory,)] = log_rows(place / "srl-workspace" / "runs", "SELECT id FROM trajectories LIMIT 1")
    lines = [line for line in LINES if not reason(line) and not line.text.startswith("make ")]
    plan, results = place.parent / "plan.json", place.parent / "results.json"
    plan.write_text(json.dumps([(line.page, filled(line.text, trajectory, port)) for line in lines]))
    child = ROOT / "tests" / "docs_page_child.py"
    subprocess.run([sys.executable, child, place, plan, results], check=True, env=dict(os.environ))
    failed = [
        f"{line}\nexit code {code}\n{output}"
        for line, (code, output) in zip(lines, json.loads(results.read_text()), strict=True)
        if code
    ]
    if failed:
        pytest.fail("\n\n".join(failed), pytrace=False)


def known(text: str) -> tuple[list[str], dict[str, Any]]:
    """The commands that a line names and the options of the last; click exits where one is not known."""
    words = shlex.split(re.split(r" [|&>]|;", text)[0])[1:]
    context, path = command().make_context("srl", list(words)), ["srl"]
    while rest := [*getattr(context, "_protected_args", []), *context.args]:
        name, found, rest = context.command.resolve_command(context, rest)
        context = found.make_context(name, list(rest), parent=context)
        path.append(name)
    return path, context.params


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_srl_knows_the_options_and_the_settings(path: Path) -> None:
    for line in lines_of("", path.read_text(encoding="utf-8")):
        if re.match(r"srl (?!.*\{\{|.*…)", line.text):
            names, params = known(line.text)
            assert len(names) > 1
            sets = params.get("sets") or []
            own = any(":" in each.partition("=")[0] for each in sets) or "my_" in line.text
            if names == ["srl", "train"] and not (params["resume"] or params["config"] or own):
                load_config(params["preset"], None, params["algo"], {}, sets)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_settings_of_a_page_are_read_and_its_links_lead_to_files(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for settings in blocks_of(text, "yaml"):
        if not settings.startswith("format:"):  # a manifest
            (tmp_path / "page.yaml").write_text(settings, encoding="utf-8")
            load_config(file=tmp_path / "page.yaml")
    if path.suffix == ".md":
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
        assert [link for link in links if not (path.parent / link).exists()] == []


PROGRAMS = [
    pytest.param(program, id=f"{path.name}-{number}")
    for path in PAGES
    for number, program in enumerate(blocks_of(path.read_text(encoding="utf-8"), "python"))
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, place: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    run = next((place / "srl-workspace" / "runs").iterdir()).name
    names: dict[str, Any] = {}
    if "Recorder(search" in program:
        from srl.serve.in_process import LocalSearch

        names["search"] = LocalSearch(open_index(place / "my-index"), topk=3)
    exec(
        compile(program.replace("runs/…", f"runs/{run}").replace(":8000", f":{port}"), "page", "exec"), names
    )
