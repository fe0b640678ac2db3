"""Whatever a user gets wrong ends in one line that says so, with its exit code, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tests.cli_mistakes import Shell, evaluate, lines, place, put, shell, train
from tests.plugin_site import hook, site

from srl.data.suite import read_recorded
from srl.errors import UserError
from srl.index import build_index
from srl.serve.server import bind
from srl.trajectory import Passage

__all__ = ["place", "shell", "site"]

GOOD = {"id": "a", "contents": '"A"\nred fox'}
ASKED = {"id": "q", "question": "what flag has velmar", "golden_answers": ["red"]}
SHOWN = {**ASKED, "turns": ["<think> I think red </think> <answer> red </answer>"]}

CORPORA = {
    "missing.jsonl": (None, "missing.jsonl: no such file"),
    "folder": ("a directory", "folder"),
    "broken.jsonl": ([GOOD, "{broken"], "broken.jsonl:2: not JSON in UTF-8: Expecting property name"),
    "list.jsonl": ([GOOD, "[1]"], "list.jsonl:2: expected a JSON object"),
    "double.jsonl": (
        [GOOD, {**GOOD, "contents": "other"}],
        "double.jsonl:2: expected an id that no earlier passage",
    ),
    "fields.jsonl": (
        [{"id": "a", "body": "x"}],
        "fields.jsonl:1: expected 'contents', or 'title' and 'text'",
    ),
    "blank.jsonl": ([{"id": "a", "contents": " "}], "blank.jsonl: "),
    "empty.jsonl": ([], "empty.jsonl: expected passages"),
    "latin.jsonl": (b'{"id": "a", "contents": "\xe9"}\n', "latin.jsonl:1: not JSON in UTF-8"),
    "cut.jsonl.gz": (b"\x1f\x8b\x08\x00\x00\x00", "cut.jsonl.gz: broken gzip file"),
}
QUESTIONS = {
    "missing.jsonl": (None, "missing.jsonl: no such file"),
    "broken.jsonl": ([ASKED, "{broken"], "broken.jsonl:2: not JSON in UTF-8"),
    "double.jsonl": ([ASKED, ASKED], "double.jsonl:2: expected an id that no earlier question has"),
    "silent.jsonl": (
        [ASKED, {**ASKED, "id": "r", "question": "  "}],
        "silent.jsonl:2: expected a text in 'question'",
    ),
    "unanswered.jsonl": (
        [{**ASKED, "golden_answers": []}],
        "unanswered.jsonl:1: expected at least one answer",
    ),
    "empty.jsonl": ([], "empty.jsonl: expected "),
    "cut.parquet": (b"PAR1xxxx", "cut.parquet: expected a parquet file"),
    "other.parquet": (
        pa.table({"a": [1]}),
        "other.parquet: ",
    ),
}
DEMONSTRATIONS = {
    "missing.jsonl": (None, "missing.jsonl: no such file"),
    "broken.jsonl": ([SHOWN, "{broken"], "broken.jsonl:2: not JSON in UTF-8"),
    "double.jsonl": ([SHOWN, SHOWN], "double.jsonl:2: expected a demonstration that no earlier"),
    "silent.jsonl": ([{**SHOWN, "question": " "}], "silent.jsonl:1: expected a text in 'question'"),
    "mute.jsonl": ([{**SHOWN, "turns": []}], "mute.jsonl:1: expected a text for each turn in 'turns'"),
    "numbers.jsonl": ([{**SHOWN, "turns": [1]}], "numbers.jsonl:1: expected a text for each turn in 'turns'"),
    "empty.jsonl": ([], "empty.jsonl: expected demonstrations"),
    "long.jsonl": ([{**SHOWN, "question": "what flag " * 50}], "more than data.max_prompt_length=32"),
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_bad_corpus_is_named_with_its_line(shell: Shell, place: Path, name: str) -> None:
    content, message = CORPORA[name]
    put(shell.folder, name, content)
    for command in (
        ("data", "prepare", f"corpus={name}", "--out", "out/deep"),
        ("data", "tokenizer", "--corpus", name, "--out", "out/deep"),
        ("data", "show", name),
        ("-q", "index", "build", "--corpus", name, "--out", "out/deep"),
        ("index", "info", place / "index", "--corpus", name),
    ):
        assert message in shell.refused(*command), command


@pytest.mark.parametrize("name", QUESTIONS)
def test_bad_questions_are_named_with_their_line(shell: Shell, place: Path, name: str) -> None:
    content, message = QUESTIONS[name]
    put(shell.folder, name, content)
    source = "search-r1" if name.endswith(".parquet") else "questions"
    for command in (
        ("data", "prepare", f"{source}={name}", "--out", "out/deep"),
        ("data", "show", name),
        train(place, "--set", f"data.train_files={name}"),
        train(place, "--set", f"data.val_files={name}"),
        evaluate(place, "--data", name),
    ):
        assert message in shell.refused(*command), command


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_bad_demonstrations_are_named_with_their_line(shell: Shell, place: Path, name: str) -> None:
    content, message = DEMONSTRATIONS[name]
    put(shell.folder, name, content)
    assert message in shell.refused(*train(place, "--algo", "sft", "--set", f"sft.train_files={name}"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no template 'odd.txt': there are search-r1, short, r1, closed-book, cot, rag, few-shot"),
        (b"\xff{question}", "odd.txt: "),
        (["no place for it"], "odd.txt: a template must contain {question}"),
    ],
)
def test_a_bad_template_is_named(shell: Shell, place: Path, content: object, message: str) -> None:
    put(shell.folder, "odd.txt", content)
    lines(shell.folder / "q.jsonl", [ASKED])
    prepare = ("data", "prepare", "questions=q.jsonl", "--template", "odd.txt", "--out", "out")
    assert message in shell.refused(*prepare)
    assert message in shell.refused(*train(place, "--set", "data.template=odd.txt"))


def test_a_question_longer_than_its_limit_is_one_line(shell: Shell, place: Path) -> None:
    lines(shell.folder / "long.jsonl", [ASKED, {**ASKED, "id": "long", "question": "what flag " * 50}])
    limit = "1 prompts are longer than data.max_prompt_length=32; the longest, of question long/train/long"
    assert limit in shell.refused(*train(place, "--set", "data.train_files=long.jsonl"))
    assert limit in shell.refused(*evaluate(place, "--data", "long.jsonl"))
    for prompt, message in {
        200: "data.max_prompt_length + data.max_response_length = 328 tokens, and this model's context",
        256: "data.max_prompt_length = 256 tokens leaves no room for an episode, since this model's",
    }.items():
        assert message in shell.refused(*train(place, "--set", f"data.max_prompt_length={prompt}"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--set", "rollout.maxturns=3"),
            "--set: no key 'rollout.maxturns'; did you mean 'rollout.max_turns'?",
        ),
        (("--set", "rollout.n=two"), "--set: rollout.n is 'two', expected integer ≥ 1"),
        (("--set", "rollout.n"), "--set rollout.n: "),
        (("--set", "rollout.n=["), "--set rollout.n=[:1: not YAML"),
        (("--steps", "-1"), "trainer.total_training_steps is -1, expected integer ≥ 0"),
        (("--algo", "grop"), "no algorithm 'grop': installed are cispo, grpo, gspo"),
        (("--set", "retriever.name=bm52"), "no retriever 'bm52': installed are bm25"),
        (
            ("--set", "reward.weights.emm=1"),
            "no reward 'emm': installed are em, evidence, f1, format, judge, rm",
        ),
        (("--set", "reward.format.score=1"), "no option reward.format.score: there are structure_score"),
        (
            ("--set", "trainer.logger=papers"),
            "trainer.logger is 'papers', expected one or several of console",
        ),
        (("--set", "search.url=http://me:secret@host/"), "search.url for host has a password"),
    ],
)
def test_a_mistyped_setting_is_named_before_anything_starts(shell, place, arguments, message) -> None:
    said = shell.refused(*train(place, *arguments))
    assert message in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rollout:\n  n: 2\n  maxturns: 3\n", "mine.yaml:3: no key 'rollout.maxturns'; did you mean"),
        ("rollout:\n  n: [\n", "mine.yaml:3: not YAML"),
        ("rollout: 3\n", "mine.yaml:1: rollout is 3, expected keys under it"),
        ("- a\n", "mine.yaml: expected sections with keys under them, found list"),
        ("format: 99\n", "mine.yaml has format 99, this srl reads up to 1"),
        ("extends: tinny\n", "no preset 'tinny': there are tiny"),
        (None, "mine.yaml: No such file"),
    ],
)
def test_a_mistake_in_a_configuration_file_has_its_line(shell: Shell, content, message) -> None:
    if content is not None:
        (shell.folder / "mine.yaml").write_text(content, encoding="utf-8")
    assert message in shell.refused("train", "--config", "mine.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "No such command 'trian'. Did you mean 'train'?"),
        (("data", "frob"), "No such command 'frob'; type: srl data --help"),
        (("data", "prepare"), "; type: srl data prepare --help"),
        (("data", "prepare", "--zzz"), "No such option: --zzz; type: srl data prepare --help"),
        (("data", "show", "a", "-n", "x"), "'--number'"),
        (("eval", "run"), "Missing option '--data'; type: srl eval run --help"),
        (("serve", "retriever", "--index", "i", "--port", "99999"), "'--port'"),
        (("inspect", "trajectories", "-n", "-3"), "'--limit'"),
        (("plugins", "new", "toy", "x"), "'toy'"),
        (("--workspace",), "'--workspace'"),
        (("train", "--preset", "tinny"), "no preset 'tinny': there are tiny"),
        (("data", "prepare", "squat=a.json"), "no source 'squat': there are nq"),
        (("data", "prepare", "nq:trian=a.json"), "no split 'trian'"),
        (("index", "build", "--corpus", "a", "--out", "i", "--set", "k1=["), "--set k1=[:1: not YAML"),
        (("index", "build", "--corpus", "a", "--out", "i", "--set", "k1=x"), "retriever.bm25.k1"),
        (("index", "build", "--corpus", "a", "--out", "i", "--retriever", "bm52"), "no retriever 'bm52'"),
        (("serve", "check", "ftp://x"), "'ftp://x' is not the URL of a search server"),
        (("plugins", "check", "emm"), "no plugin 'emm'; type: srl plugins list; did you mean 'em'?"),
        (("plugins", "check", "em", "--set", "x"), "--set x: expected KEY=VALUE"),
        (("plugins", "new", "reward", "em"), "is installed already; choose another name"),
        (("plugins", "new", "reward", "Bad Name"), "'Bad Name' cannot name a plugin"),
    ],
)
def test_a_mistyped_command_says_what_to_type(shell: Shell, arguments, message) -> None:
    assert message in shell.refused(*arguments)


def test_a_plugin_that_does_not_load_is_named_where_it_is_used(shell, site, place) -> None:
    site.install("srl-search-odd", "import no_such_module_at_all")
    site.install("srl-search-half", hook("reward", "half", factory="no_such_module:make"))
    assert "no algorithm 'grpo'" in shell.refused(*train(place))
    assert "no_such_module" in shell.refused("plugins", "check", "half")
    code, out, _ = shell.typed("plugins", "list")
    assert code == 0
    assert "no_such_module_at_all" in out


def test_a_port_that_is_taken_is_one_line(shell: Shell, place: Path) -> None:
    with bind(port=0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        said = shell.refused("serve", "retriever", "--index", place / "index", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in said


def test_a_server_that_is_not_there_is_one_line_that_says_how_to_start_it(shell: Shell, place: Path) -> None:
    with bind(port=0) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        searched = ("--set", f"search.url={url}", "--set", "search.index=null")
        for command in (
            ("serve", "check", url),
            train(place, *searched),
            ("-q", "eval", "run", place / "model", "--config", place / "small.yaml", "--url", url,
             "--data", place / "test.parquet"),
        ):  # fmt: skip
            said = shell.refused(*command)
            assert f"no search server answers at {url}/retrieve" in said
            assert "type: srl serve retriever --index DIR" in said


def test_an_index_of_another_corpus_fails_the_check_and_starts_nothing(shell: Shell, place: Path) -> None:
    build_index([Passage("a", '"A"\nred fox')], shell.folder / "other")
    corpus = place / "corpus.jsonl"
    said = f"was not built from {corpus}: expected corpus digest"
    assert said in shell.refused("index", "info", "other", "--corpus", corpus, code=1)
    sets = ("--set", "search.index=other", "--set", f"data.corpus={corpus}")
    assert said in shell.refused(*train(place, *sets), code=1)


@pytest.mark.parametrize(
    "command", [("runs",), ("trajectories",), ("show", "x"), ("curve",), ("sql", "SELECT 1")]
)
def test_without_a_run_one_line_says_how_to_start_one(shell: Shell, command) -> None:
    assert "with `srl train`" in shell.refused("inspect", *command)
    assert "with `srl train`" in shell.refused("train", "--resume")


def test_a_workspace_that_cannot_be_one_is_one_line(shell: Shell, place: Path, monkeypatch) -> None:
    file = lines(shell.folder / "file", ["x"])
    for where, message in ((file, "is a file; name a directory"), (file / "in", str(file))):
        for command in (train(place)[1:], ("data", "world"), ("inspect", "runs"), ("train", "--resume")):
            if where == file or (command[0] in ("data", "train") and command != ("train", "--resume")):
                monkeypatch.setenv("SRL_WORKSPACE", "")
                assert message in shell.refused("-q", "--workspace", where, *command), command


@pytest.mark.parametrize(
    "command",
    [
        ("data", "prepare", "questions=q.jsonl", "--out"),
        ("data", "tokenizer", "--corpus", "corpus.jsonl", "--vocab-size", "300", "--out"),
        ("data", "world", "--out"),
        ("-q", "index", "build", "--corpus", "corpus.jsonl", "--out"),
        ("plugins", "new", "reward", "my-own", "--out"),
    ],
)
def test_what_is_there_is_not_written_over_and_a_file_is_no_folder(shell: Shell, command) -> None:
    lines(shell.folder / "q.jsonl", [ASKED])
    lines(shell.folder / "corpus.jsonl", [GOOD])
    (shell.folder / "taken").mkdir()
    (shell.folder / "taken" / "mine.txt").write_text("keep me")
    assert "taken exists" in shell.refused(*command, "taken")
    assert "q.jsonl/in" in shell.refused(*command, "q.jsonl/in")


def test_letters_that_the_terminal_lacks_are_written_as_their_numbers(shell: Shell, monkeypatch) -> None:
    lines(shell.folder / "c.jsonl", [{"id": "a", "contents": "\u00c6lfric\n\u2192 \u2713"}])
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", screen)
    assert shell.typed("data", "show", "c.jsonl")[0] == 0
    assert screen.buffer.getvalue() == b"a\n\\xc6lfric\n\\u2192 \\u2713\n"


LONG, DIGITS = "n" * 5000, "9" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--set", "trainer.seed=!!bool x", "--print-config"],
        ["train", "--set", f"trainer.seed={DIGITS}", "--print-config"],
        ["train", "--set", "data.mix=" + "[" * 2000, "--print-config"],
        ["train", "--steps", DIGITS],
        ["train", "--config", LONG],
        ["train", "--preset", LONG],
        ["train", "--resume", "--run", LONG],
        ["train", "export", f"x@{DIGITS}", "--out", "out"],
        ["train", "import", LONG],
        ["--workspace", "~nosuchuser/x", "inspect", "runs"],
        ["--workspace", LONG, "inspect", "runs"],
        ["index", "search", LONG, "q"],
        ["index", "build", "--corpus", LONG, "--out", "out"],
        ["eval", "run", LONG, "--data", LONG],
        ["ask", LONG, "q"],
        ["data", "prepare", LONG, "--out", "out"],
        ["inspect", "trajectories", LONG],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_an_odd_input_is_one_line_and_the_users_error(shell: Shell, arguments) -> None:
    assert len(shell.refused(*arguments)) < 2000


def test_a_link_to_itself_is_the_users_error(shell: Shell) -> None:
    (shell.folder / "loop").symlink_to("loop")
    code, _, err = shell.typed("data", "world", "--out", "loop")
    assert (code, err.count("\n")) == (2, 1)


def test_what_is_nested_too_deeply_is_said_in_words_of_yaml_and_not_of_python(shell: Shell) -> None:
    (shell.folder / "deep.yaml").write_text("a: " + "[" * 50_000, encoding="utf-8")
    said = shell.refused("train", "--config", "deep.yaml")
    assert "deep.yaml" in said
    assert "recursion" not in said


def test_a_suite_whose_recorded_digests_are_a_list_is_one_line(tmp_path) -> None:
    (tmp_path / "digests.json").write_text('{"format": 1, "digests": [1]}', encoding="utf-8")
    with pytest.raises(UserError, match=r"digests\.json"):
        read_recorded(tmp_path / "digests.json")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["train", "--set", "rollout.n", "5"], ["rollout.n"]),
        (["index", "build", "--set", "k1", "0.9", "--out", "out"], ["k1"]),
        (["index", "search", "where is velmar", "{index}"], ["srl index search {index} 'where is velmar'"]),
        (["ask", "where is velmar", "{model}"], ["srl ask {model} 'where is velmar'"]),
        (["inspect", "sql", "last", "select 1"], ["--run last"]),
        (["--json", "inspect", "runs"], ["COMMAND --json"]),
        (["--limit=3", "inspect", "runs"], ["COMMAND --limit"]),
        (["train", "--preset", "tiny", "--quiet"], ["srl --quiet train"]),
        (["inspect", "runs", "-v"], ["srl -v inspect"]),
    ],
)
def test_words_in_the_wrong_place_are_told_with_what_to_type(shell, place, arguments, names) -> None:
    there = {"index": place / "index", "model": place / "model"}
    said = shell.refused(*(word.format(**there) for word in arguments))
    for name in names:
        assert name.format(**there) in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workspace", "there", "inspect", "runs"],
        ["inspect", "runs", "--workspace", "there"],
        ["inspect", "--workspace=there", "runs"],
    ],
)
def test_the_workspace_is_named_before_or_after_the_command(shell, monkeypatch, arguments) -> None:
    monkeypatch.setenv("SRL_WORKSPACE", "elsewhere")
    assert "there/runs" in shell.refused(*arguments)


def test_a_word_after_two_dashes_is_no_option(shell, place, monkeypatch) -> None:
    monkeypatch.setenv("SRL_WORKSPACE", "elsewhere")
    code, out, _ = shell.typed("index", "search", place / "index", "--json", "--", "--workspace")
    assert (code, json.loads(out)[0]["query"]) == (0, "--workspace")


def test_python_runs_the_command_as_a_module() -> None:
    command = [sys.executable, "-m", "srl", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("srl ")
