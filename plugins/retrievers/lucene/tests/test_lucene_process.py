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
