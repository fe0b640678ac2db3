"""The examples start as they are, and `srl` takes every line that they have for it."""

import asyncio
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live_server import running
from tests.test_page_commands import known

from srl.config import load_config
from srl.index import build_index, open_index
from srl.reward import RewardMix
from srl.serve.server import create_app
from srl.testing import check_reward
from srl.trajectory import Passage, Question, Trajectory

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".sbatch"))
_VARIABLE = re.compile(r"\$\(\([^)]*\)\)|\$\{(?P<braced>\w+)[^}]*\}|\$(?P<plain>\w+)")
GIVEN = {"PRESET": "search-r1-32b", "ALGO": "grpo", "SEARCH": "http://10.0.0.9:8000/retrieve"}
"""What a variable holds that must be more than a number."""


def commands(path: Path) -> Iterator[str]:
    """The commands of `srl` in a script, variables filled in."""
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        found = re.search(r"(?:^|\s)srl (?P<words>[a-z-].*)", line)
        if found and not line.lstrip().startswith(("#", "pip ")):
            filled = _VARIABLE.sub(
                lambda name: GIVEN.get(name["braced"] or name["plain"] or "", "1"), found["words"]
            )
            yield f"srl {filled.partition(' &')[0]}"


LINES = [(path.name, line) for path in SCRIPTS for line in commands(path)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_without_its_variables_says_which(script):
    """Nothing is started: the first thing that a script does is to ask for what it needs."""
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    bare = {"PATH": os.environ["PATH"]}
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, env=bare)
    assert ran.returncode == 1
    assert ": give the" in ran.stderr


@pytest.mark.parametrize(("name", "line"), LINES, ids=[f"{name}-{line[4:30]}" for name, line in LINES])
def test_srl_takes_the_line(name, line):
    path, params = known(line)
    assert len(path) > 1
    if path == ["srl", "train"] and not params["resume"]:
        flags = {"model.path": params["model"], "trainer.seed": params["seed"]}
        load_config(params["preset"], params["config"], params["algo"], flags, params["sets"] or [])


OWN = ROOT / "examples" / "own_documents"


def loaded(path: Path) -> dict[str, Any]:
    return runpy.run_path(str(path), run_name="example")


def run(path: Path, *arguments: object, folder: Path) -> str:
    command = [sys.executable, str(path), *map(str, arguments)]
    environment = {**os.environ, "SRL_WORKSPACE": str(folder / "srl-workspace")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reward_of_the_example_conforms_and_counts_searches(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    check_reward("custom_reward:FewSearches", {"free": 0})
    reward = loaded(ROOT / "examples" / "custom_reward.py")
    question = Question("q", "Where?", ("Genoa",))
    episodes = [Trajectory(question, answer=answer, valid_searches=2) for answer in ("Genoa", None)]
    found = reward["FewSearches"](reward["Options"]()).score(episodes)
    assert [score.value for score in found] == [0.5, 0.0]


def test_client_of_the_example_reads_passages_from_our_server(tmp_path):
    passages = [Passage("a", "Genoa\nThe Lanterna stands in Genoa."), Passage("b", "Rome\nA city.")]
    build_index(passages, tmp_path / "index")
    client = loaded(ROOT / "examples" / "search_client.py")
    with running(create_app(open_index(tmp_path / "index"))) as url:
        found = client["search"](url, ["the Lanterna", "nothing like it"])
    assert found == ["Doc 1(Title: Genoa) The Lanterna stands in Genoa.", ""]


def test_classifier_and_judge_of_the_example_score_answers(tmp_path):
    example = loaded(ROOT / "examples" / "model_rewards.py")
    example["make_classifier"](tmp_path / "classifier")
    with example["running"]() as url:
        options = {"rm": {"model": str(tmp_path / "classifier")}, "judge": {"url": url, "cache": None}}
        mix = RewardMix({"judge": 1.0, "rm": 0.0}, options)
        batch = [
            Trajectory(Question(answer, "Where?", ("Genoa",)), answer=answer) for answer in ("Genoa", "Rome")
        ]
        scores = asyncio.run(mix.score(batch))
    assert [(score.value, score.error) for score in scores] == [(1.0, ""), (0.0, "")]
    assert all({"rm", "judge/asked"} <= score.parts.keys() for score in scores)


@pytest.mark.slow
@pytest.mark.must_run
def test_own_documents_become_a_trained_searcher_whose_log_is_read(tmp_path):
    printed = run(OWN / "train.py", "--steps", 1, folder=tmp_path)
    assert "$ srl train --algo grpo" in printed
    figures = run(ROOT / "examples" / "read_log.py", tmp_path / "srl-workspace" / "runs", folder=tmp_path)
    assert "questions that no sample answered (train)" in figures
    assert re.search(r"^  20\S+ \| 1 \| ", figures, re.MULTILINE)
