"""The contract of errors: a mistake is exit code 2 and one line that names it, and nothing is left behind.

The tables hold what a user types or has, and what the line must name: a file, a key, an option, a name. How
it says so is free.
"""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.cli_mistakes import Shell, cut, edit, lines, place, put, shell, train

from srl.index import build_index
from srl.serve.server import bind
from srl.trajectory import Passage

__all__ = ["place", "shell"]

TRAIN = "-q train --config {place}/small.yaml"
EVAL = "-q eval run {place}/model --config {place}/small.yaml --index {place}/index"

TYPED = [
    ("trian", "'train'"),
    ("data show a -n x", "--number"),
    ("eval run", "--data"),
    ("serve retriever --index i --port 99999", "--port"),
    ("--workspace", "--workspace"),
    ("train --preset tinny", "tinny"),
    ("train --set rollout.n 5", "rollout.n"),
    ("train --resume --seed 3", "--seed"),
    ("train --run a", "--run"),
    ("train --algo sft --backend verl", "--backend"),
    ("train import nowhere.yaml", "nowhere.yaml"),
    (f"{TRAIN} --set rollout.maxturns=3", "'rollout.max_turns'"),
    (f"{TRAIN} --set rollout.n=two", "rollout.n"),
    (f"{TRAIN} --algo grop", "'grop'"),
    (f"{TRAIN} --set retriever.name=bm52", "'bm52'"),
    (f"{TRAIN} --set model=here --set model.lora_rank=8", "model is 'here'"),
    (
        f"{TRAIN} --set rollout.n=2 --set algorithm.filter_groups.enable=true "
        "--set algorithm.filter_groups.metric=emm",
        "algorithm.filter_groups.metric",
    ),
    (f"{TRAIN} --set reward.weights.emm=1", "'emm'"),
    (f"{TRAIN} --set reward.format.score=1", "reward.format.score"),
    (f"{TRAIN} --set search.url=http://me:hush@host/", "search.url"),
    (f"{TRAIN} --set data.max_prompt_length=200", "data.max_prompt_length"),
    (f"{TRAIN} --model nowhere", "nowhere"),
    ("data prepare squat=a.json --out out", "'squat'"),
    ("data prepare questions={place}/test.parquet --where em=1 --out out", "--from-log"),
    ("index build --corpus a --out i --set k1=x", "retriever.bm25.k1"),
    ("index build --corpus a --out i --retriever bm52", "'bm52'"),
    ("index search nowhere q", "nowhere"),
    ("index search {place}/index ' '", "query"),
    ("index eval {place}/index --against {place}/index --questions {place}/test.parquet", "--against"),
    ("index eval ftp://x --questions {place}/test.parquet", "ftp://x"),
    ("serve check ftp://x", "ftp://x"),
    ("eval run nowhere --data {place}/test.parquet --index {place}/index", "nowhere"),
    ("eval run {place}/model --data {place}/test.parquet", "--index"),
    (f"{EVAL} --data {{place}}/test.parquet --template nowhere", "nowhere"),
    ("plugins new reward em", "'em'"),
    ("plugins new reward 'Bad Name'", "Bad Name"),
    ("plugins check emm", "'em'"),
    ("plugins check em --set x", "x"),
    ("inspect runs", "srl train"),
    ("train --resume", "srl train"),
    ("--workspace ~nosuchuser/x inspect runs", "~nosuchuser"),
]


@pytest.mark.parametrize(("command", "named"), TYPED, ids=[command for command, _ in TYPED])
def test_a_mistyped_command_names_what_is_wrong(shell: Shell, place: Path, command: str, named: str) -> None:
    said = shell.refused(*shlex.split(command.format(place=place)))
    assert named in said
    assert "hush" not in said


LONG, DIGITS = "n" * 5000, "9" * 5000


@pytest.mark.parametrize(
    "command",
    [
        "train --set 'trainer.seed=!!bool x' --print-config",
        f"train --set trainer.seed={DIGITS} --print-config",
        f"train --set data.mix={'[' * 2000} --print-config",
        f"train --config {LONG}",
        f"train --resume --run {LONG}",
        f"train export x@{DIGITS} --out out",
        f"--workspace {LONG} inspect runs",
        f"index search {LONG} q",
        f"data prepare {LONG} --out out",
    ],
    ids=lambda command: command[:30],
)
def test_however_odd_what_is_typed_it_is_one_line(shell: Shell, command: str) -> None:
    shell.refused(*shlex.split(command))


GOOD = {"id": "a", "contents": '"A"\nred fox'}
ASKED = {"id": "q", "question": "what flag has velmar", "golden_answers": ["red"]}
SHOWN = {**ASKED, "turns": ["<think> I think red </think> <answer> red </answer>"]}
LENGTHY = {"question": "what flag " * 50}

READ_BY = {
    "corpus": [
        "data prepare corpus={file} --out out/deep",
        "data show {file}",
        "-q index build --corpus {file} --out out/deep",
    ],
    "questions": [
        "data prepare questions={file} --out out/deep",
        "data show {file}",
        f"{TRAIN} --set data.train_files={{file}}",
        f"{TRAIN} --set data.val_files={{file}}",
        f"{EVAL} --data {{file}}",
    ],
    "long questions": [f"{TRAIN} --set data.train_files={{file}}", f"{EVAL} --data {{file}}"],
    "rows": ["data show {file}", f"{EVAL} --data {{file}}"],
    "demonstrations": [f"{TRAIN} --algo sft --set sft.train_files={{file}}"],
    "template": [f"{TRAIN} --set data.template={{file}}"],
    "config": ["train --config {file}"],
}
"""The commands that read each kind of file."""

FILES = [
    ("corpus", "missing.jsonl", None, ""),
    ("corpus", "broken.jsonl", [GOOD, "{broken"], ":2"),
    ("corpus", "double.jsonl", [GOOD, {**GOOD, "contents": "other"}], ":2"),
    ("corpus", "fields.jsonl", [{"id": "a", "body": "x"}], ":1"),
    ("corpus", "blank.jsonl", [{"id": "a", "contents": " "}], ""),
    ("corpus", "cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00", ""),
    ("questions", "double.jsonl", [ASKED, ASKED], ":2"),
    ("questions", "silent.jsonl", [ASKED, {**ASKED, "id": "r", "question": "  "}], ":2"),
    ("questions", "unanswered.jsonl", [{**ASKED, "golden_answers": []}], ":1"),
    ("questions", "empty.jsonl", [], ""),
    ("long questions", "lengthy.jsonl", [ASKED, {**ASKED, "id": "r", **LENGTHY}], None),
    ("rows", "cut.parquet", b"PAR1xxxx", ""),
    ("rows", "other.parquet", pa.table({"a": [1]}), ""),
    ("demonstrations", "double.jsonl", [SHOWN, SHOWN], ":2"),
    ("demonstrations", "mute.jsonl", [{**SHOWN, "turns": []}], ":1"),
    ("demonstrations", "lengthy.jsonl", [{**SHOWN, **LENGTHY}], None),
    ("template", "missing.txt", None, ""),
    ("template", "bytes.txt", b"\xff{question}", ""),
    ("template", "placeless.txt", ["no place for it"], ""),
    ("config", "key.yaml", b"rollout:\n  n: 2\n  maxturns: 3\n", ":3"),
    ("config", "format.yaml", b"format: 99\n", ""),
    ("config", "deep.yaml", b"a: " + b"[" * 50_000, ""),
]
"""Kind, name and content of a file, and the line that is named after it; None: the limit is named."""


@pytest.mark.parametrize(("kind", "name", "content", "line"), FILES, ids=[f"{x[0]}-{x[1]}" for x in FILES])
def test_a_bad_file_is_named_with_its_line(shell: Shell, place: Path, kind, name, content, line) -> None:
    put(shell.folder, name, content)
    for command in READ_BY[kind]:
        said = shell.refused(*shlex.split(command.format(place=place, file=name)))
        assert (f"{name}{line}" if line is not None else "data.max_prompt_length") in said, command


MODEL = [
    ("", lambda model: shutil.rmtree(model)),
    ("config.json", lambda model: (model / "config.json").unlink()),
    ("", lambda model: edit(model / "config.json", model_type="alien")),
    ("num_hidden_layers", lambda model: edit(model / "config.json", num_hidden_layers=2)),
    ("Template", lambda model: (model / "chat_template.jinja").write_text("{{ messages")),
    ("no user", lambda model: (model / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")),
    ("safetensors", lambda model: (model / "model.safetensors").unlink()),
    ("model.safetensors", lambda model: cut(model / "model.safetensors")),
    ("tokenizer", lambda model: (model / "tokenizer.json").write_text("{")),
    (
        "eos_token_id",
        lambda model: (model / "generation_config.json").write_text('{"eos_token_id": "<eos>"}'),
    ),
]
INDEX = [
    ("manifest.json", lambda index: (index / "manifest.json").unlink()),
    ("text.bin", lambda index: cut(index / "passages" / "text.bin")),
]
"""What the line names beside the directory, and the damage."""


@pytest.mark.parametrize(("named", "harm"), MODEL)
def test_a_damaged_model_is_named(
    shell: Shell, place: Path, named: str, harm: Callable[[Path], object]
) -> None:
    shutil.copytree(place / "model", shell.folder / "mine")
    harm(shell.folder / "mine")
    said = shell.refused(*train(place, "--model", "mine"))
    assert "mine" in said
    assert named in said


@pytest.mark.parametrize(("named", "harm"), INDEX)
def test_a_damaged_index_is_named(
    shell: Shell, place: Path, named: str, harm: Callable[[Path], object]
) -> None:
    shutil.copytree(place / "index", shell.folder / "mine")
    harm(shell.folder / "mine")
    for command in (
        "index info mine",
        "index search mine flag",
        "serve retriever --index mine --port 0",
        f"{TRAIN} --set search.index=mine",
        "-q eval run {place}/model --config {place}/small.yaml --index mine --data {place}/test.parquet",
    ):
        said = shell.refused(*shlex.split(command.format(place=place)))
        assert "mine" in said, command
        assert named in said, command


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run of one step."""
    from srl.cli import main

    folder: Path = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SRL_WORKSPACE", str(folder))
        assert main([*map(str, train(place, "--steps", "1", "--set", "data.test_files=null"))]) == 0
    return folder


@pytest.fixture
def run(finished: Path, workspace: Path) -> Path:
    """A copy of that run in this test's own workspace."""
    shutil.copytree(finished, workspace)
    (only,) = (workspace / "runs").iterdir()
    return only


CHECKPOINT = "checkpoints/step-000001"
RUN = [
    ("run.json", lambda run: (run / "run.json").unlink()),
    ("run.json", lambda run: (run / "run.json").write_text('{"format": 1}')),
    ("config.yaml:1", lambda run: (run / "config.yaml").write_text("a: [")),
    ("state.json", lambda run: (run / CHECKPOINT / "trainer" / "state.json").unlink()),
    ("optimiser.pt", lambda run: cut(run / CHECKPOINT / "trainer" / "actor-optimiser.pt")),
    ("manifest.json", lambda run: cut(run / CHECKPOINT / "manifest.json")),
]
CHECKPOINTS = [
    ("model.safetensors", lambda run: cut(run / CHECKPOINT / "model.safetensors")),
    ("srl.json", lambda run: (run / CHECKPOINT / "srl.json").write_text("{")),
    ("checkpoint", lambda run: shutil.rmtree(run / "checkpoints")),
]


@pytest.mark.parametrize(("named", "harm"), RUN)
def test_a_damaged_run_is_named_when_it_is_resumed_and_keeps_what_it_has(shell, run, named, harm) -> None:
    harm(run)
    checkpoints = {name: facts for name, facts in shell.left().items() if "checkpoints" in name}
    code, out, err = shell.typed("-q", "train", "--resume", "--steps", "2")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert named in err
    assert checkpoints.items() <= shell.left().items()
    assert any((run / "log").iterdir())


@pytest.mark.parametrize(("named", "harm"), CHECKPOINTS)
def test_a_damaged_checkpoint_is_named_when_it_is_measured(shell, place, run, named, harm) -> None:
    harm(run)
    data = ("--data", place / "test.parquet", "--index", place / "index")
    assert named in shell.refused("-q", "eval", "run", "last", *data)


def test_a_server_that_is_not_there_is_one_line_that_says_how_to_start_it(shell: Shell, place: Path) -> None:
    with bind(port=0) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for command in (
            f"serve check {url}",
            f"{TRAIN} --set search.url={url} --set search.index=null",
            f"{EVAL.partition(' --index')[0]} --url {url} --data {{place}}/test.parquet",
        ):
            said = shell.refused(*shlex.split(command.format(place=place)))
            assert url in said
            assert "srl serve retriever" in said


def test_an_index_of_another_corpus_fails_the_check_and_starts_nothing(shell: Shell, place: Path) -> None:
    build_index([Passage("a", '"A"\nred fox')], shell.folder / "other")
    corpus = place / "corpus.jsonl"
    assert str(corpus) in shell.refused("index", "info", "other", "--corpus", corpus, code=1)
    sets = ("--set", "search.index=other", "--set", f"data.corpus={corpus}")
    assert str(corpus) in shell.refused(*train(place, *sets), code=1)


@pytest.mark.parametrize(
    "command",
    [
        "data prepare questions=q.jsonl --out",
        "data world --out",
        "-q index build --corpus corpus.jsonl --out",
        "plugins new reward my-own --out",
    ],
)
def test_what_is_there_is_not_written_over_and_a_file_is_no_folder(shell: Shell, command: str) -> None:
    lines(shell.folder / "q.jsonl", [ASKED])
    lines(shell.folder / "corpus.jsonl", [GOOD])
    (shell.folder / "taken").mkdir()
    (shell.folder / "taken" / "mine.txt").write_text("keep me")
    for out in ("taken", "q.jsonl/in"):
        assert out in shell.refused(*shlex.split(command), out)
    (shell.folder / "loop").symlink_to("loop")
    code, _, err = shell.typed(*shlex.split(command), "loop")
    assert (code, err.count("\n")) == (2, 1)


def test_a_command_does_not_overwrite_what_it_reads(shell: Shell) -> None:
    lines(shell.folder / "q.jsonl", [ASKED])
    lines(shell.folder / "c.jsonl", [GOOD])
    assert shell.typed("data", "prepare", "questions:train=q.jsonl", "corpus=c.jsonl", "--out", "own")[0] == 0
    assert shell.typed("index", "build", "--corpus", "c.jsonl", "--out", "index")[0] == 0
    Path("link.parquet").symlink_to("own/train.parquet")
    shown = ("data", "demonstrations", "--from", "facts", "--data", "own/train.parquet", "--index", "index")
    typed = [
        (*shown, "--out", "own/train.parquet"),
        (*shown, "--out", "link.parquet"),
        (*shown, "--out", "index/manifest.json"),
        ("data", "prepare", "questions:train=own/train.parquet", "--out", "own"),
        ("index", "build", "--corpus", "index/passages.jsonl", "--out", "index"),
    ]
    files = [path for path in shell.folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for command in typed:
        code, _, err = shell.typed(*command, "--overwrite")
        assert (code, err.count("\n")) == (2, 1), command
    assert before == {path: path.read_bytes() for path in shell.folder.rglob("*") if path.is_file()}
