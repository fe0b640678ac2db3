"""A process that searched with Lucene: quiet, its environment as it was, and gone when it should be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from srl.errors import UserError
from srl_lucene import java

pytestmark = [pytest.mark.slow, pytest.mark.must_run]


@pytest.fixture(scope="module", autouse=True)
def java_is_there() -> None:
    pytest.importorskip("pyserini")
    try:
        java.find_runtime(os.environ)
    except UserError as error:
        pytest.skip(str(error))


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment, timeout=300
    )


def test_process_stays_quiet_keeps_its_environment_and_ends(tmp_path):
    code = """
import os, sys
from srl.index import build_index, open_index
from srl.trajectory import Passage
before = dict(os.environ)
build_index([Passage("a", "castle"), Passage("b", "river")], sys.argv[1], "lucene")
print(open_index(sys.argv[1]).search(["castles"], 1)[0][0].passage.id)
assert dict(os.environ) == before
assert not {"torch", "openai", "faiss"} & set(sys.modules)
"""
    done = run(code, str(tmp_path / "out"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")


def test_forked_process_gets_a_clear_line_and_the_parent_goes_on(tmp_path):
    code = """
import os, sys
from srl.errors import UserError
from srl.index import build_index, open_index
from srl.trajectory import Passage
build_index([Passage("a", "castle")], sys.argv[1], "lucene")
index = open_index(sys.argv[1])
child = os.fork()
if not child:
    try:
        index.search(["castle"], 1)
    except UserError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(len(index.search(["castle"], 1)[0]))
"""
    done = run(code, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "fork" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1] == "1"
