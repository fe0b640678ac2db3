"""A damaged index, model, run or log is named in one line, wherever it is used, and nothing is made worse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli_mistakes import Shell, cut, edit, place, shell, train
from tests.training import tokenizer

from srl.store import LogWriter, RunInfo

__all__ = ["place", "shell"]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda index: shutil.rmtree(index), "is not a directory of kind 'index': it does not exist"),
        (lambda index: (index / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda index: (index / "manifest.json").write_text("{"), "manifest.json: not JSON in UTF-8"),
        (
            lambda index: (index / "passages" / "text.bin").unlink(),
            "text.bin is missing",
        ),
        (lambda index: cut(index / "passages" / "text.bin"), "text.bin is damaged"),
    ],
)
def test_a_damaged_index_is_named(shell: Shell, place: Path, harm, message) -> None:
    shutil.copytree(place / "index", shell.folder / "mine")
    harm(shell.folder / "mine")
    data = ("--data", place / "test.parquet")
    for command in (
        ("index", "info", "mine"),
        ("index", "search", "mine", "flag"),
        ("serve", "retriever", "--index", "mine", "--port", "0"),
        train(place, "--set", "search.index=mine"),
        ("-q", "eval", "run", place / "model", "--config", place / "small.yaml", "--index", "mine", *data),
    ):
        assert message in shell.refused(*command), command


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda model: shutil.rmtree(model), "no model directory mine; give a directory with config.json"),
        (
            lambda model: (model / "config.json").unlink(),
            "mine is not a model directory: expected a config.json",
        ),
        (lambda model: (model / "config.json").write_text("{"), "mine is not a model directory"),
        (lambda model: (model / "config.json").write_text("[]"), "an object and not a list"),
        (lambda model: edit(model / "config.json", model_type="alien"), "could not be loaded"),
        (
            lambda model: edit(model / "config.json", vocab_size=20),
            "do not have the shapes of its config.json",
        ),
        (
            lambda model: edit(model / "config.json", num_hidden_layers=2),
            "model: `num_hidden_layers` (2) must be equal to the number of `layer_types` (1)",
        ),
        (
            lambda model: edit(model / "config.json", hidden_size="wide"),
            "model: Field 'hidden_size' expected int, got str (value: 'wide')",
        ),
        (lambda model: edit(model / "config.json", hidden_act="bright"), "model: unknown 'bright'"),
        (
            lambda model: (model / "chat_template.jinja").write_text("{{ messages"),
            "mine does not work: TemplateSyntaxError",
        ),
        (
            lambda model: (model / "chat_template.jinja").write_text("{{ raise_exception('no user') }}"),
            "mine does not work: TemplateError: no user",
        ),
        (lambda model: (model / "model.safetensors").unlink(), "mine contains no *.safetensors file"),
        (lambda model: cut(model / "model.safetensors"), "model.safetensors is truncated"),
        (lambda model: (model / "tokenizer.json").unlink(), "contains no tokenizer"),
        (
            lambda model: (model / "tokenizer.json").write_text("{"),
            "contains no tokenizer that can",
        ),
    ],
)
def test_a_damaged_model_is_named(shell: Shell, place: Path, harm, message) -> None:
    shutil.copytree(place / "model", shell.folder / "mine")
    harm(shell.folder / "mine")
    assert message in shell.refused(*train(place, "--model", "mine"))


def test_a_config_that_contradicts_itself_is_named_in_a_plan_too(shell: Shell, place: Path) -> None:
    shutil.copytree(place / "model", shell.folder / "mine")
    edit(shell.folder / "mine" / "config.json", num_hidden_layers=2)
    said = shell.refused(*train(place, "--model", "mine", "--dry-run"))
    assert "`num_hidden_layers` (2) must be equal to the number of `layer_types` (1)" in said


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (("--seed", "99999999999999999999"), "trainer.seed is 99999999999999999999, expected integer ≥ 0"),
        (("--set", "trainer.threads=100000"), "trainer.threads is 100000, expected integer ≥ 1 and ≤ 1,024"),
        (("--set", "retriever.bm25.k1=nan"), "retriever.bm25.k1 is 'nan', expected a number ≤ 100; type:"),
        (("--set", "retriever.bm25.k1=much"), "retriever.bm25.k1 is 'much', expected a number; type:"),
        (("--steps", "x"), "Invalid value for '--steps': 'x', expected an integer; type:"),
        (("--backend", "x"), "Invalid value for '--backend': 'x' is not one of 'local', 'verl'; type:"),
    ],
)
def test_a_value_that_does_not_fit_is_said_in_our_words(shell: Shell, place: Path, typed, line) -> None:
    for more in ((), ("--dry-run",)):
        assert line in shell.refused(*train(place, *typed, *more))


@pytest.mark.parametrize(
    ("lacking", "notes"),
    [
        (
            {"eos_token"},
            ["the tokenizer has no EOS token: a turn ends at a stop string or its token cap only"],
        ),
        ({"pad_token"}, []),
        ({"eos_token", "pad_token"}, ["the tokenizer has no EOS token"]),
    ],
    ids=["eos", "pad", "neither"],
)
def test_a_model_without_eos_pad_token_or_chat_template_trains_and_says_so(
    shell, place, lacking, notes
) -> None:
    model = shell.folder / "mine"
    shutil.copytree(place / "model", model)
    told = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer().chat_template is None
    kept = {name: value for name, value in told.items() if name not in lacking}
    (model / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    ids = {f"{name}_id": None for name in lacking}
    edit(model / "config.json", **ids)
    edit(model / "generation_config.json", **ids)
    quick = ("--steps", "1", "--set", "trainer.val_before_train=false", "--set", "data.val_files=null")
    code, out, err = shell.typed(*train(place, *quick, "--model", "mine")[1:])
    assert code == 0, err
    assert "1 steps in" in out
    for note in [*notes, "the tokenizer has no chat template: prompts are given as plain text"]:
        assert note in err


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run of one step."""
    from srl.cli import main

    folder: Path = tmp_path_factory.mktemp("finished")
    typed = [
        "--workspace",
        str(folder),
        *map(str, train(place, "--steps", "1", "--set", "data.test_files=null")),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SRL_WORKSPACE", str(folder))
        assert main(typed) == 0
    return folder


@pytest.fixture
def run(finished: Path, workspace: Path) -> Path:
    """A copy of that run in this test's own workspace."""
    shutil.copytree(finished, workspace)
    (only,) = (workspace / "runs").iterdir()
    return only


CHECKPOINT = Path("checkpoints", "step-000001")


def older(harm: Callable[[Path], object]) -> Callable[[Path], object]:
    """The same harm to a checkpoint of a version that kept no checksums."""

    def both(run: Path) -> None:
        (run / CHECKPOINT / "manifest.json").unlink()
        edit(run / CHECKPOINT / "srl.json", manifest=False)
        harm(run)

    return both


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda run: (run / "run.json").unlink(), "is not a run: it has no run.json"),
        (lambda run: (run / "run.json").write_text("{"), "run.json: not JSON in UTF-8"),
        (
            lambda run: (run / "run.json").write_text('{"format": 1}'),
            "run.json: ",
        ),
        (lambda run: (run / "config.yaml").write_text("a: ["), "config.yaml:1: not YAML"),
        (lambda run: (run / "config.yaml").unlink(), "config.yaml"),
        (lambda run: (run / CHECKPOINT / "trainer" / "state.json").unlink(), "state.json is missing"),
        (
            older(lambda run: (run / CHECKPOINT / "trainer" / "state.json").write_text("{")),
            "state.json: not JSON in UTF-8",
        ),
        (
            older(lambda run: edit(run / CHECKPOINT / "trainer" / "state.json", format=9)),
            "state.json has format 9",
        ),
        (
            older(lambda run: edit(run / CHECKPOINT / "trainer" / "state.json", odd=9)),
            "state.json: ",
        ),
        (
            older(lambda run: cut(run / CHECKPOINT / "trainer" / "actor-optimiser.pt")),
            "actor-optimiser.pt is damaged: it cannot be read as weights",
        ),
        (
            lambda run: (run / CHECKPOINT / "trainer" / "actor-optimiser.pt").write_bytes(b""),
            "actor-optimiser.pt is damaged: its checksum differs from the recorded one; the checkpoint "
            "before it is none; to resume without it type: mv ",
        ),
        (lambda run: cut(run / CHECKPOINT / "manifest.json"), "manifest.json is damaged: "),
        (lambda run: (run / CHECKPOINT / "manifest.json").write_bytes(b""), "manifest.json is empty; the "),
    ],
)
def test_a_damaged_run_is_named_when_it_is_resumed(shell: Shell, run: Path, harm, message) -> None:
    harm(run)
    before = (run / "log" / "log.duckdb").read_bytes()
    code, out, err = shell.typed("-q", "train", "--resume", "--steps", "2")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert (run / "log" / "log.duckdb").read_bytes() == before


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (older(lambda run: cut(run / CHECKPOINT / "model.safetensors")), "model.safetensors is truncated"),
        (lambda run: cut(run / CHECKPOINT / "model.safetensors"), "model.safetensors is damaged"),
        (lambda run: (run / CHECKPOINT / "srl.json").write_text("{"), "srl.json: not JSON"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint yet; give a model directory"),
    ],
)
def test_a_damaged_checkpoint_is_named_when_it_is_measured(shell, place, run, harm, message) -> None:
    harm(run)
    data = ("--data", place / "test.parquet", "--index", place / "index")
    assert message in shell.refused("-q", "eval", "run", "last", *data)


def test_a_model_that_is_nowhere_is_one_line(shell: Shell, place: Path) -> None:
    data = ("--data", place / "test.parquet", "--index", place / "index")
    assert "no model directory last, and there are no runs in" in shell.refused(
        "-q", "eval", "run", "last", *data
    )
    assert "expected a config.json in it" in shell.refused("-q", "eval", "run", place / "index", *data)
    assert "nothing to search" in shell.refused("-q", "eval", "run", place / "model", *data[:2])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda log: (log / "log.duckdb").write_text("x" * 5000), "not a valid DuckDB database file"),
        (lambda log: (log / "log.duckdb").write_bytes(b""), "not a valid DuckDB database file"),
        (lambda log: (log / "manifest.json").unlink(), "no log in"),
        (lambda log: (log / "manifest.json").write_text("{"), "manifest.json: not JSON in UTF-8"),
        (lambda log: edit(log / "manifest.json", format=9), "manifest.json has format 9"),
    ],
)
def test_a_damaged_log_is_named(shell: Shell, run: Path, harm, message) -> None:
    harm(run / "log")
    for command in ("runs",), ("trajectories",), ("curve",), ("sql", "SELECT 1"):
        assert message in shell.refused("inspect", *command), command


def as_parts(run: Path) -> Path:
    """Make the run one that was killed: its log is parts. Gives the first part."""
    log = LogWriter(run / "log", RunInfo(run.name))
    log.drop_steps_after(99)
    log.close("interrupted")
    return next((run / "log" / "parts").iterdir())


def cut_part(run: Path) -> None:
    part = as_parts(run)
    (part / "trajectories.parquet").write_bytes((part / "trajectories.parquet").read_bytes()[:50])


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        (cut_part, "trajectories.parquet"),
        (lambda run: cut(run / "log" / "log.duckdb"), "log.duckdb"),
        (lambda run: (run / "log" / "manifest.json").write_text("{"), "manifest.json"),
    ],
)
def test_one_damaged_run_takes_no_view_of_the_workspace_down(shell: Shell, run: Path, harm, file) -> None:
    other = run.with_name("20990101T000000Z-tiny-grpo-s1-00aa")
    shutil.copytree(run, other)
    harm(run)
    for command in (
        ("runs", "--json"),
        ("sql", "--run", "all", "--json", "SELECT count(*) FROM trajectories"),
    ):
        code, out, err = shell.typed("inspect", *command)
        assert (code, err.count("\n")) == (0, 1), err
        assert err.startswith(f"warning: run {run.name}: ")
        assert file in err
        assert json.loads(out)
    code, _, err = shell.typed("inspect", "curve", other.name, run.name)
    assert (code, err.count("\n")) == (0, 1), err


def test_a_resumed_run_goes_on_without_a_damaged_part(shell: Shell, run: Path) -> None:
    cut_part(run)
    shutil.rmtree(run / "checkpoints")
    code, _, err = shell.typed("train", "--resume")
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "warning" in line]
    assert "trajectories.parquet" in line
    assert "log/damaged/steps-000000-000001" in line
    _, out, err = shell.typed("inspect", "sql", "--json", "SELECT DISTINCT step FROM trajectories ORDER BY 1")
    assert ([json.loads(one)["step"] for one in out.splitlines()], err) == ([0, 1], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trajectories", "nope"), "no run 'nope' in"),
        (("trajectories", "--steps", "x"), "--steps x: expected a step such as 30"),
        (("trajectories", "--em", "x"), "--em x: expected a number"),
        (("trajectories", "--end", "x"), "no end 'x': there are answered, unanswered, truncated, failed"),
        (("trajectories", "--verdict", "x"), "no verdict 'x': there are correct"),
        (("trajectories", "--sort", "x"), "--sort x: no such column"),
        (("show", "zzz"), "no trajectory 'zzz' in 2"),
        (("curve", "--metric", "val/emm"), "no metric 'val/emm'"),
        (("curve", "--out", "x.doc"), "--out x.doc: expected a name that ends in .png"),
        (("sql", "SELECT * FROM nowhere"), "The tables are runs, steps"),
        (("sql", "DROP TABLE runs"), "expected a query that only reads, found DROP"),
        (("sql", "COPY runs TO 'x.csv'"), "expected a query that only reads, found COPY"),
        (("sql", ""), "expected one query, found 0"),
    ],
)
def test_a_question_to_the_log_that_makes_no_sense_is_one_line(
    shell: Shell, run: Path, arguments, message
) -> None:
    assert message in shell.refused("inspect", *arguments)
