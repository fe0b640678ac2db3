"""What a run does on any backend: its directory, its record, its summary, its end."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.training import Said, only_run

from srl.config import Config, load_config, load_saved
from srl.errors import UserError
from srl.files import CHECKPOINT, write_manifest
from srl.store import RunInfo
from srl.train import run as runs
from srl.train.run_directory import LOG, Progress, RunRecord, checkpoint_path
from srl.train.search import as_inputs
from srl.workspace import Workspace

BACKENDS = ("local", "verl")
INPUTS = as_inputs({"": "abc", "papers": "def"}) | {"glue": "012", "reference": "123"}


@dataclass
class FakeBackend:
    """A backend and its trainer in one, which saves a checkpoint and keeps what it is given."""

    name: str
    ends_with: BaseException | None = None
    log_begins: bool = True
    questions: int = 7
    inputs: dict[str, str] = field(default_factory=INPUTS.copy)
    trained: list[tuple[RunInfo, int | None]] = field(default_factory=list)
    where: str = "on nothing"

    def check(self, config: Config) -> None:
        """Nothing to check."""

    def prepare(self, config, algo, workspace, terminal) -> "FakeBackend":
        return self

    def train(self, run: Path, info: RunInfo, resumed_from: int | None) -> Progress:
        self.trained.append((info, resumed_from))
        if self.log_begins:
            (run / LOG).mkdir(exist_ok=True)
        if self.ends_with is not None:
            raise self.ends_with
        folder = checkpoint_path(run, 2, self.name)
        (folder / "actor").mkdir(parents=True, exist_ok=True)
        write_manifest(folder, CHECKPOINT, {"files": {}})
        return Progress(2, 1.5, {2: 0.3}, {0: 0.1, 2: 0.2})


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> FakeBackend:
    fake = FakeBackend(request.param)
    monkeypatch.setattr(runs, "load_backend", lambda name: fake)
    monkeypatch.setattr(runs, "with_paths", lambda config, *rest: config)
    return fake


def started(backend: FakeBackend, workspace: Path, said: Said | None = None) -> runs.Summary:
    config = load_config("tiny", None, "grpo", {"trainer.total_training_steps": 4}).config
    return runs.start(
        config, preset="tiny", algo="grpo", workspace=Workspace(workspace), terminal=said or Said(),
        backend=backend.name,
    )  # fmt: skip


def test_a_run_is_recorded_and_summed_up_alike_on_each_backend(backend, tmp_path):
    said = Said()
    summary = started(backend, tmp_path, said)
    run = only_run(tmp_path)
    assert summary == runs.Summary(
        run.name, "grpo", 0, 2, 1.5, 0.1, 0.2, 0.3, str(checkpoint_path(run, 2, backend.name))
    )
    record = RunRecord.read(run)
    assert record.backend == backend.name
    assert record.inputs.items() >= {"index": "abc", "index of papers": "def", "reference": "123"}.items()
    ((info, resumed_from),) = backend.trained
    assert (info.run_id, info.index_digest, resumed_from) == (run.name, "abc", None)
    assert "7 questions, on nothing, set up in" in said.out.getvalue()


def test_a_resumed_run_takes_more_steps_and_other_memory_and_keeps_what_is_learned(backend, tmp_path):
    started(backend, tmp_path)
    run, said = only_run(tmp_path), Said()
    before = load_saved(run)
    less = ["actor.ppo_max_token_len=512", "trainer.max_ckpt_to_keep=1", "search.timeout_s=30.0"]
    runs.resume(run, workspace=Workspace(tmp_path), terminal=said, steps=5, sets=less)
    assert backend.trained[-1][1] == 2
    now = load_saved(run)
    changed = {change["key"]: (change["at"], change["after"]) for change in RunRecord.read(run).changed}
    assert changed == {
        "trainer.total_training_steps": (2, 5), "actor.ppo_max_token_len": (2, 512),
        "trainer.max_ckpt_to_keep": (2, 1),
    }  # fmt: skip
    same = {key: after for key, (_, after) in changed.items()} | {"model.dtype": now.model.dtype}
    assert now == before.with_settings(same)
    assert f"is 512 from here on, not {before.actor.ppo_max_token_len}" in said.text
    assert "timeout_s is 30" not in said.text, "it has not changed"


@pytest.mark.parametrize(
    "text",
    [
        "search.url=http://127.0.0.1:1/retrieve", "actor.optim.lr=1e-3", "actor.ppo_max_token_len=none",
        "actor.po_max_token_len=1",
    ],
)  # fmt: skip
def test_a_resumed_run_refuses_other_changes_and_stays_as_it_was(backend, tmp_path, text):
    started(backend, tmp_path)
    run = only_run(tmp_path)
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError):
        runs.resume(run, workspace=Workspace(tmp_path), terminal=Said(), sets=[text])
    assert (run / "config.yaml").read_text() == before


def test_a_run_that_ends_before_its_log_begins_leaves_no_directory(backend, tmp_path):
    backend.ends_with, backend.log_begins = KeyboardInterrupt(), False
    with pytest.raises(KeyboardInterrupt):
        started(backend, tmp_path)
    assert Workspace(tmp_path).all_runs() == []


def test_another_reference_index_or_chat_template_is_noticed_on_resume(backend, tmp_path):
    started(backend, tmp_path)
    run, said = only_run(tmp_path), Said()
    backend.inputs |= as_inputs({"": "xyz", "papers": "uvw"}) | {"glue": "345"}
    runs.resume(run, workspace=Workspace(tmp_path), terminal=said)
    assert f"warning: {run.name} started with another index (abc)" in said.out.getvalue()
    assert "started with another index of papers (def)" in said.out.getvalue()
    assert sum("chat template" in line for line in said.out.getvalue().splitlines()) == 1
    backend.inputs["reference"] = "456"
    with pytest.raises(UserError, match=r"expected digest 123, found 456"):
        runs.resume(run, workspace=Workspace(tmp_path), terminal=Said())
