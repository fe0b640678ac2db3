"""`srl inspect` as a user types it, also while a run writes."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest
from tests.store_builder import BERN, episode, new_log, question, record, write_step

from srl import store
from srl.cli import main
from srl.trajectory import Passage

GRPO, PPO = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"
EVIL = "[bold red]x[/] \x1b[31mred\x1b]0;title\x07\x9b2J\u202e"


@pytest.fixture
def srl(capsys):
    """Runs `srl inspect`; gives exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["inspect", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A finished run, and a later one that is being written; with the ids of its second step."""
    runs = tmp_path_factory.mktemp("written") / "runs"
    with new_log(runs / GRPO) as log:
        for step in (1, 2, 3):
            write_step(log, step, "val")
    log = new_log(runs / PPO)
    write_step(log, 1)
    episodes = [
        episode(0, step=2, answer="Münchenbuchsee"),
        episode(1, step=2, answer="Bern", asked=question(1, hops=3)),
        episode(2, step=2, answer=None, passages=(BERN,)),
        episode(3, step=2, answer=EVIL, passages=(Passage(EVIL, f'"{EVIL}"\n{EVIL}'),)),
    ]
    log.write(2, "train", [record(made) for made in episodes], {"train/em": 0.25, "timing_s/step": 1.5})
    return runs, [made.id for made in episodes]


@pytest.fixture
def logs(workspace, written):
    """The two runs in the workspace of this test; gives the ids of the later one's second step."""
    runs, ids = written
    shutil.copytree(runs, workspace / "runs")
    return ids


@pytest.mark.parametrize(
    "arguments",
    [("runs",), ("trajectories",), ("show", "ab"), ("verdicts",), ("curve",), ("sql", "FROM runs")],
)
def test_without_a_run_one_line_says_what_to_type(srl, arguments):
    code, out, err = srl(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "with `srl train`" in err


def test_run_that_has_no_log_yet_is_said_in_one_line(srl, workspace):
    (workspace / "runs" / GRPO).mkdir(parents=True)
    code, _, err = srl("trajectories")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected a run or a folder of runs" in err


def test_runs_are_listed_with_how_they_stand(srl, logs):
    code, out, _ = srl("runs")
    heads, first, second = out.splitlines()
    assert code == 0
    assert heads.split()[:8] == ["run", "status", "step", "score", "val", "em", "at", "step"]
    assert first.split()[:6] == [GRPO, "finished", "3", "0.150", "3", "0.150"]
    assert second.split()[:3] == [PPO, "running", "2"]


def test_runs_for_a_program(srl, logs):
    rows = [json.loads(line) for line in srl("runs", "--json")[1].splitlines()]
    assert [(row["run_id"], row["status"], row["val_em"]) for row in rows] == [
        (GRPO, "finished", 0.15),
        (PPO, "running", None),
    ]


def test_trajectories_of_the_last_run_the_latest_first(srl, logs):
    code, out, err = srl("trajectories", "-n", 5)
    heads, *rows = out.splitlines()
    assert code == 0
    assert heads.split()[:3] == ["id", "step", "phase"]
    assert [row.split()[0] for row in rows[:4]] == logs
    assert "srl inspect show ID" in err


def test_trajectories_by_conditions_of_a_run_by_its_end(srl, logs):
    _, out, _ = srl("trajectories", "01ab", "--steps", "2", "--em", "<1", "--sort", "-hops", "--json")
    assert [json.loads(line)["id"] for line in out.splitlines()] == [logs[1], logs[2], logs[3]]
    code, out, err = srl("trajectories", GRPO, "--phase", "test")
    assert (code, out, err) == (0, "", "no matching trajectory; try fewer filters\n")


GOLDEN = {
    "run_id": PPO, "step": 2, "phase": "train", "sample": 0, "question_id": "nq-1", "data_source": "nq",
    "hops": 3, "question": "where was painter 1 born?", "golden_answers": ["Münchenbuchsee"],
    "answer": "Bern", "end": "answered", "em": 0.0, "f1": 0.0, "reward": 0.125, "turns": 2, "searches": 1,
    "tokens": 9, "gold_in_passages": True, "verdict": "reader",
}  # fmt: skip


def test_trajectory_for_a_program_is_one_line_of_json(srl, logs):
    _, out, err = srl("trajectories", "--verdict", "reader", "--steps", "2", "--hops", "3", "--json")
    assert (err, out.count("\n")) == ("", 1)
    assert json.loads(out) == {"id": logs[1]} | GOLDEN


def test_show_by_the_beginning_of_an_id(srl, logs):
    code, out, _ = srl("show", logs[1][:7].upper())
    assert code == 0
    assert out.startswith(f"trajectory {logs[1]} of {PPO}, train step 2, sample 0\n")
    assert "┃ <think>so</think> <answer> Bern </answer>\n" in out
    assert "mask 0, ids 0 1" in srl("show", logs[1], "--tokens")[1]


def test_a_newer_run_with_a_damaged_log_does_not_hide_the_trajectories_of_older_ones(srl, logs, workspace):
    with store.open(workspace / "runs" / GRPO) as log:
        [(older,)] = log.execute("SELECT id FROM trajectories LIMIT 1").fetchall()
    (workspace / "runs" / PPO / "log" / "manifest.json").write_text("{")
    code, out, err = srl("show", older)
    assert code == 0
    assert out.startswith(f"trajectory {older} of {GRPO}")
    assert err.startswith(f"warning: {PPO} is left out: ")
    assert srl("show", older, "--run", PPO)[0] == 2


def test_show_for_a_program_has_everything(srl, logs):
    shown = json.loads(srl("show", logs[1], "--json")[1])
    assert shown["verdict"] == "reader"
    assert [segment["mask"] for segment in shown["segments"]] == [0, 1, 0, 1]
    assert shown["segments"][1]["token_ids"] == [100, 101, 102, 103, 104]
    assert shown["segments"][1]["advantages"] == [0.5] * 5
    assert [hit["id"] for hit in shown["search_results"][0]["hits"]] == ["p1", "p2"]
    assert shown["metadata"] == {"hops": 3}


@pytest.mark.parametrize(
    "typed",
    [
        ("why", "--json", "--out", "why.json"), ("why", "--json", "--format", "html"),
        ("sql", "SELECT 1", "--csv", "--json"), ("curve", "--json", "--out", "f.svg"),
        ("report", "--group", "0", "--limit", "3"), ("report", "--group", "0", "--sort", "step"),
        ("searches", "--failed", "--by", "source"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused(srl, logs, typed):
    code, out, err = srl(*typed)
    first, second = (word for word in typed if word.startswith("--"))
    assert (code, out) == (2, "")
    assert all(name in err for name in (first, second, "exclude each other"))


def test_show_of_an_id_that_is_none_or_several(srl, logs):
    code, _, err = srl("show", "xyz")
    assert (code, err) == (
        2,
        "srl: no trajectory 'xyz' in any run of this workspace; `srl inspect trajectories RUN` lists those "
        "of a run\n",
    )
    code, _, err = srl("show", "")
    assert code == 2
    assert "'' matches 6 trajectories: " in err


def test_verdicts_are_counted(srl, logs):
    _, out, _ = srl("verdicts", "--by", "step")
    heads, first, second = out.splitlines()
    assert heads.split()[:4] == ["step", "correct", "reader", "retriever"]
    assert first.split() == ["1", "0", "2", "0", "0", "0", "0", "0", "0", "2"]
    assert second.split() == ["2", "1", "1", "1", "0", "1", "0", "0", "0", "4"]
    rows = [json.loads(line) for line in srl("verdicts", "--by", "source", "--json")[1].splitlines()]
    assert [(row["data_source"], row["total"]) for row in rows] == [("nq", 6)]
    assert srl("verdicts", "--hops", 9)[1] == ""


def test_curve_is_drawn_in_the_terminal(srl, logs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = srl("curve", "00aa")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].strip() == "val/em"
    assert sum(line.count("●") for line in lines[:-1]) == 3
    assert lines[-1].endswith("● tiny-grpo-s1-00aa: 0.15 at step 3, highest 0.15 at step 3")
    assert all(len(line) <= 60 for line in lines[:-1])


def test_curves_of_several_runs_and_metrics(srl, logs):
    _, out, _ = srl("curve", "00aa", "01ab", "--metric", "critic/score/mean", "--metric", "val/em")
    assert [line.strip() for line in out.splitlines() if line.strip().endswith(("mean", "/em"))] == [
        "critic/score/mean",
        "val/em",
    ]
    rows = [json.loads(line) for line in srl("curve", "00aa", "--json")[1].splitlines()]
    assert rows == [
        {
            "run_id": GRPO,
            "phase": "val",
            "metric": "val/em",
            "steps": [1, 2, 3],
            "values": [0.05, 0.1, 0.15],
            "watches": {},
        }
    ]


def test_curve_without_unicode_is_drawn_in_ascii(logs, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    assert main(["inspect", "curve", "00aa"]) == 0
    assert b"* tiny-grpo-s1-00aa" in raw.getvalue()


@pytest.mark.parametrize(("name", "start"), [("c.png", b"\x89PNG"), ("c.svg", b"<?xml")])
def test_curve_is_written_as_a_picture(srl, logs, tmp_path, name, start):
    code, out, _ = srl("curve", "00aa", "--out", tmp_path / name)
    assert (code, out) == (0, f"{tmp_path / name}\n")
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("typed", "start"),
    [
        (("curve", "00aa", "--out", "mine.svg"), b"<?xml"), (("export", "-o", "mine.parquet"), b"PAR1"),
    ],
)  # fmt: skip
def test_an_existing_file_is_replaced_only_when_told(srl, logs, tmp_path, monkeypatch, typed, start):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / typed[-1]
    file.write_text("mine")
    code, out, err = srl(*typed)
    assert (code, out) == (2, "")
    assert err == f"srl: {file.name} exists; give another --out, or --overwrite\n"
    assert file.read_text() == "mine"
    assert srl(*typed, "--overwrite")[0] == 0
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    "typed", [("curve", "00aa", "--out"), ("export", "-o"), ("why", "-o"), ("report", "-o")]
)
def test_no_output_goes_into_a_run(srl, logs, workspace, typed):
    (run,) = workspace.glob("runs/*00aa")
    file = run / "log" / "manifest.json"
    before = file.read_bytes()
    for out in (file, run / "new.svg", run):
        assert srl(*typed, out, "--overwrite")[:2] == (2, "")
    assert (file.read_bytes(), (run / "new.svg").exists()) == (before, False)


def test_what_writes_a_new_directory_takes_no_overwrite(srl, logs):
    code, _, err = srl("export", "--format", "inspect-eval", "--overwrite")
    assert code == 2
    assert "--format inspect-eval and --overwrite exclude each other" in err


def test_unknown_metric_is_one_line_with_the_nearest(srl, logs):
    code, out, err = srl("curve", "00aa", "--metric", "val/me")
    assert (code, out) == (2, "")
    assert err == "srl: no metric 'val/me': there are critic/score/mean, val/em; did you mean 'val/em'?\n"


def test_sql_of_one_run_and_of_all(srl, logs):
    assert srl("sql", "SELECT count(*) AS n FROM trajectories")[1] == "n\n6\n"
    query = "SELECT run_id, count(*) AS n FROM trajectories GROUP BY ALL ORDER BY ALL"
    rows = [json.loads(line) for line in srl("sql", query, "--run", "all", "--json")[1].splitlines()]
    assert rows == [{"run_id": GRPO, "n": 6}, {"run_id": PPO, "n": 6}]
    assert srl("sql", query, "--run", "00aa", "--csv")[1] == f"run_id,n\n{GRPO},6\n"
    assert srl("sql", "SELECT 1/3 AS third, [1, 2] AS two, NULL AS no")[1].split() == [
        "third", "two", "no", "0.333333", "[1,", "2]",
    ]  # fmt: skip
    assert "─" in srl("sql", "EXPLAIN FROM runs")[1]


@pytest.mark.parametrize("variable", ["MY_PUBLIC_KEY", "SRL_SEARCH_TOKEN"])
def test_what_sql_prints_does_not_depend_on_the_environment(srl, logs, monkeypatch, variable):
    monkeypatch.setenv(variable, "painter 0 born")
    query = "SELECT 'is the painter 0 born' AS said, ['painter 0 born'] AS listed"
    for form in ("--csv", "--json", "--wide"):
        assert srl("sql", query, form)[1].count("painter 0 born") == 2


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELEC 1", "Parser Error"),
        ("SELECT emm FROM steps", 'column "emm" not found'),
        ("DELETE FROM runs", "a query that only reads"),
        ("FROM read_csv('/no/such/file')", "/no/such/file"),
    ],
)
def test_bad_query_is_one_line_and_exit_code_2(srl, logs, query, words):
    code, out, err = srl("sql", query)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    "query",
    [
        "FROM read_text('{secret}')",
        "FROM read_blob('{secret}')",
        "FROM read_csv('{secret}')",
        "FROM '{secret}'",
        "FROM glob('{folder}/*')",
        "SELECT (SELECT content FROM read_text('{secret}'))",
        "EXPLAIN ANALYZE FROM read_text('{secret}')",
        "COPY (SELECT 42) TO '{folder}/written'",
        "EXPLAIN (ANALYZE /*) SELECT 1 -- */) COPY (SELECT 42) TO '{folder}/written'",
        "EXPLAIN ANALYZE COPY (SELECT 42) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)",
        "COPY (SELECT 42) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)",
        "WITH a AS (COPY (SELECT 42) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)) FROM a",
        "WITH a AS (COPY (SELECT 42) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)) "
        "PIVOT steps ON phase USING max(step)",
        "EXPLAIN ANALYZE COPY (SELECT 42) TO '{finished}' (USE_TMP_FILE false)",
        "WITH a AS (INSERT INTO log0.raw.steps SELECT * FROM log0.raw.steps RETURNING *) FROM a",
        "ATTACH '{folder}/written'",
        "EXPORT DATABASE '{folder}/written'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA database_list",
    ],
)
def test_sql_opens_and_writes_nothing_but_reads_the_log(srl, logs, workspace, tmp_path, query):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "secret").write_text("a,b\n1,hunter2\n")
    part = next((workspace / "runs" / PPO / "log" / "parts").glob("*/trajectories.parquet"))
    finished = workspace / "runs" / GRPO / "log" / "log.duckdb"
    before = part.read_bytes(), finished.read_bytes()
    typed = query.format(secret=folder / "secret", folder=folder, part=part, finished=finished)
    code, out, err = srl("sql", "--run", "all", typed)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "hunter2" not in err
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert (part.read_bytes(), finished.read_bytes()) == before
    assert srl("sql", "--run", "all", "SELECT count(*) FROM steps")[0] == 0


def test_sql_reads_nothing_below_dot_tmp_of_the_current_directory(srl, logs, tmp_path, monkeypatch):
    """Which is DuckDB's own temporary directory unless another one is set."""
    (tmp_path / "here" / ".tmp").mkdir(parents=True)
    (tmp_path / "here" / ".tmp" / "secret").write_text("hunter2")
    monkeypatch.chdir(tmp_path / "here")
    code, out, err = srl("sql", "FROM read_text('.tmp/secret')")
    assert (code, out, "hunter2" in err) == (2, "", False)
    assert "add --unsafe" in err


def test_unsafe_sql_reads_and_writes_other_files(srl, logs, tmp_path):
    target = tmp_path / "steps.csv"
    assert srl("sql", "--unsafe", f"COPY (SELECT step FROM steps ORDER BY step) TO '{target}'")[0] == 0
    assert target.read_text() == "step\n1\n2\n"
    assert srl("sql", "--unsafe", "--csv", f"SELECT max(step) AS last FROM '{target}'")[1] == "last\n2\n"


VALUES = {
    "DATE '2020-01-02'": ("2020-01-02", "2020-01-02"),
    "TIME '01:02:03.5'": ("01:02:03.500000", "01:02:03.500000"),
    "TIMETZ '01:02:03+05'": ("01:02:03+05", "01:02:03+05"),
    "TIMESTAMP '2020-01-02 03:04:05'": ("2020-01-02 03:04:05", "2020-01-02T03:04:05"),
    "TIMESTAMP_NS '2020-01-02 03:04:05.123456789'": ("2020-01-02 03:04:05.123456789",) * 2,
    "TIMESTAMPTZ '2020-01-02 03:04:05+00' = TIMESTAMPTZ '2020-01-02 04:04:05+01'": ("True", True),
    "INTERVAL '1 month 2 days 3 hours'": ("1 month 2 days 03:00:00",) * 2,
    "170141183460469231731687303715884105727::HUGEINT": (
        "170141183460469231731687303715884105727",
        170141183460469231731687303715884105727,
    ),
    "1.50::DECIMAL(10, 2)": ("1.50", "1.50"),
    "'6542f9d2-5aa5-4527-b50b-a60ef9590dd6'::UUID": ("6542f9d2-5aa5-4527-b50b-a60ef9590dd6",) * 2,
    r"'\xAA\x00b'::BLOB": (r"\xAA\x00b",) * 2,
    "{'a': 1, 'b': [true]}": ('{"a": 1, "b": [true]}', {"a": 1, "b": [True]}),
    "[INTERVAL '1 day']": ("[1 day]",) * 2,
    "MAP {'k': 1}": ('{"k": 1}', {"k": 1}),
    "[1, 2, NULL]": ("[1, 2, null]", [1, 2, None]),
    "'a'::ENUM('a', 'b')": ("a", "a"),
    "'0101'::BIT": ("0101", "0101"),
    "'nan'::DOUBLE": ("nan", None),
    "'inf'::DOUBLE": ("inf", None),
    "NULL": ("", None),
    "true": ("True", True),
    "2.5::DOUBLE": ("2.5", 2.5),
}


@pytest.mark.parametrize("value", VALUES)
def test_sql_prints_values_of_every_type(srl, logs, value):
    text, known = VALUES[value]
    query = f"SELECT 0 AS zero, {value} AS v"
    assert srl("sql", query)[1].splitlines()[1].removeprefix("0").strip() == text
    assert json.loads(srl("sql", "--json", query)[1]) == {"zero": 0, "v": known}
    (_, row) = csv.reader(srl("sql", "--csv", query)[1].splitlines())
    assert row == ["0", text]


@pytest.mark.parametrize("value", ["now()", "[now()]", "{'at': now()}", "TIMESTAMPTZ 'infinity'"])
def test_times_with_a_zone_print_without_pytz(srl, logs, monkeypatch, value):
    monkeypatch.setitem(sys.modules, "pytz", None)
    for option in ([], ["--json"], ["--csv"]):
        code, out, err = srl("sql", f"SELECT {value} AS at", *option)
        assert (code, err) == (0, "")
        assert re.search(r"20\d\d-\d\d-\d\d|infinity", out)


def test_text_of_others_acts_in_no_output(srl, logs):
    outputs = [
        srl("trajectories"),
        srl("trajectories", "--json"),
        srl("show", logs[3], "--tokens"),
        srl("show", logs[3], "--json"),
        srl("sql", "FROM hits"),
        srl("sql", "FROM hits", "--json"),
    ]
    for code, out, _ in outputs:
        assert code == 0
        assert "[bold red]x[/]" in out
        assert not set(out) & set("\x1b\x07\x9b\u202e")
    assert EVIL in [json.loads(line)["answer"] for line in outputs[1][1].splitlines()]


def on_a_terminal(*arguments: str, columns: int = 100) -> str:
    """What `srl inspect` writes to a terminal of so many columns."""
    main_end, its_end = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    code = "import sys; from srl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "inspect", *arguments]
    with subprocess.Popen(command, stdout=its_end, stderr=subprocess.PIPE, env=environment) as child:
        os.close(its_end)
        written = b""
        try:
            while block := os.read(main_end, 65536):
                written += block
        except OSError:  # the other end is closed
            pass
    os.close(main_end)
    assert child.returncode == 0
    return written.decode().replace("\r\n", "\n")


def plain(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


def test_terminal_gets_colours_of_ours_only_and_rows_of_one_line(logs):
    shown = on_a_terminal("show", logs[3])
    assert "\x1b[33m" in shown
    assert "\x1b[2m" in shown
    assert "\x1b[31mred" not in shown
    assert not set(shown) & set("\x07\x9b\u202e")
    table = on_a_terminal("trajectories", columns=140)
    assert len(table.splitlines()) == 7
    assert all(len(line) <= 140 for line in plain(table).splitlines())
    narrow = plain(on_a_terminal("trajectories", columns=80)).splitlines()
    assert len(narrow) == 7
    assert all(len(line) <= 80 for line in narrow)
    assert [line.split()[0] for line in narrow[1:5]] == logs
    listed = plain(on_a_terminal("runs", columns=70)).splitlines()
    assert all(len(line) <= 70 for line in listed)
    assert [line.split()[0][-12:] for line in listed[1:]] == [GRPO[-12:], PPO[-12:]]
    assert "\x1b" not in on_a_terminal("sql", "SELECT answer FROM trajectories", "--csv")


def test_help_loads_nothing_heavy(tmp_path):
    heavy = ["torch", "transformers", "numpy", "duckdb", "pyarrow", "fastapi", "matplotlib"]
    code = f"""
import sys
from srl.cli import main
main(["inspect", "trajectories", "--help"])
sys.exit(len([name for name in {heavy} if name in sys.modules]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
