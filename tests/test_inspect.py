"""`srl inspect` as a user types it, also while a run writes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.store_builder import (
    BERN,
    GRPO,
    PPO,
    episode,
    new_log,
    question,
    record,
    search,
    two_runs,
)

from srl.cli import main
from srl.store.run_info import write_watches
from srl.trajectory import Passage

EVIL = "[bold red]x[/] \x1b[31mred\x1b]0;title\x07\x9b2J\u202e"
PAGE = Path(__file__).parent.parent / "docs" / "inspect.md"


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
    episodes = [
        episode(0, step=2, answer="Münchenbuchsee"),
        episode(1, step=2, answer="Bern", asked=question(1, hops=3)),
        episode(2, step=2, answer=None, passages=(BERN,)),
        episode(3, step=2, answer=EVIL, passages=(Passage(EVIL, f'"{EVIL}"\n{EVIL}'),)),
    ]
    two_runs(runs, episodes, **{"timing_s/step": 1.5})
    return runs, [made.id for made in episodes]


@pytest.fixture
def logs(workspace, written):
    """The two runs in the workspace of this test; gives the ids of the later one's second step."""
    runs, ids = written
    shutil.copytree(runs, workspace / "runs")
    return ids


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


MISTAKES = [
    ("trajectories", "other"), ("show", "xyz"), ("show", ""), ("curve", "00aa", "--metric", "val/me"),
    ("sql", "SELECT 1", "--csv", "--json"), ("sql", "SELECT", "1"),
    ("diff", "00aa", "01ab"), ("show", "a", "--group", "--tokens"), ("export", "--where", "em = 7"),
    ("report", "--where", "true; DELETE FROM runs"),
    ("export", "--where", "emm = 1"), ("report", "--where", "em = 7"), ("trajectories", "--sort", "rewrad"),
    ("trajectories", "--verdict", "good"), ("report", "all"), ("sql", "SELEC 1"), ("why", "01ab"),
    ("sql", "SELECT emm FROM steps"), ("export", "--where", "id IN (FROM read_csv('/etc/passwd'))"),
]  # fmt: skip


def test_a_mistake_gets_one_line_and_writes_nothing(srl, logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for typed in MISTAKES:
        code, out, err = srl(*typed)
        assert (typed, code, out, err.count("\n")) == (typed, 2, "", 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_are_listed_with_how_they_stand(srl, logs):
    _, first, second = srl("runs")[1].splitlines()
    assert first.split()[:6] == [GRPO, "finished", "3", "0.150", "3", "0.150"]
    assert second.split()[:3] == [PPO, "running", "2"]
    rows = [(row["run_id"], row["status"], row["val_em"]) for row in lines(srl("runs", "--json")[1])]
    assert rows == [(GRPO, "finished", 0.15), (PPO, "running", None)]


def test_trajectories_by_conditions_of_a_run_by_its_end(srl, logs):
    _, *rows = srl("trajectories", "-n", 5)[1].splitlines()
    assert [row.split()[0] for row in rows[:4]] == logs
    _, out, _ = srl("trajectories", "01ab", "--em", "<1", "--where", "step = 2", "--sort", "-hops", "--json")
    assert [row["id"] for row in lines(out)] == [logs[1], logs[2], logs[3]]
    assert srl("trajectories", GRPO, "--phase", "test")[:2] == (0, "")
    assert {row["run_id"] for row in lines(srl("trajectories", "all", "--json")[1])} == {GRPO, PPO}


def test_show_by_the_beginning_of_an_id(srl, logs):
    code, out, _ = srl("show", logs[1][:7].upper())
    assert code == 0
    assert out.startswith(f"trajectory {logs[1]} of {PPO}")
    shown = json.loads(srl("show", logs[1], "--json")[1])
    assert shown["verdict"] == "reader"
    assert [segment["mask"] for segment in shown["segments"]] == [0, 1, 0, 1]
    assert shown["segments"][1]["token_ids"] == [100, 101, 102, 103, 104]
    assert shown["segments"][1]["advantages"] == [0.5] * 5
    assert [hit["id"] for hit in shown["search_results"][0]["hits"]] == ["p1", "p2"]
    assert shown["metadata"] == {"hops": 3}


def test_show_lists_the_group_and_the_tokens(srl, logs):
    code, out, _ = srl("show", logs[1], "--group")
    assert code == 0
    assert all(text in out for text in ("where was painter 1 born?", "Münchenbuchsee", "0.500"))
    [row] = lines(srl("show", logs[1], "--group", "--json")[1])
    assert (row["id"], row["advantage"], row["queries"]) == (logs[1], 0.5, ["painter 1"])
    heads, *rows = srl("show", logs[1], "--tokens")[1].splitlines()
    assert heads.split()[:5] == ["position", "turn", "kind", "mask", "token"]
    assert [row["token"] for row in lines(srl("show", logs[1], "--tokens", "--json")[1])] == [
        int(row.split()[4]) for row in rows
    ]


def test_curves_of_several_runs_and_metrics(srl, logs):
    metrics = ("--metric", "critic/score/mean", "--metric", "val/em")
    _, *rows = srl("curve", "00aa", "01ab", *metrics)[1].splitlines()
    assert [(row.split()[0], row.split()[-6:]) for row in rows] == [
        ("tiny-grpo-s1-00aa", ["▁▄█", "0.1", "0.3", "3", "0.3", "3"]),
        ("tiny-ppo-s1-01ab", ["▁", "0.1", "0.1", "1", "0.1", "1"]),
        ("tiny-grpo-s1-00aa", ["▁▄█", "0.05", "0.15", "3", "0.15", "3"]),
    ]
    [row] = lines(srl("curve", "00aa", "--json")[1])
    series = ("val/em", [1, 2, 3], [0.05, 0.1, 0.15], [])
    assert tuple(row[name] for name in ("metric", "steps", "values", "marks")) == series


WRITES = {
    "mine.parquet": (("export", "-o"), b"PAR1"),
    "mine.html": (("report", "-o"), b"<!doctype html>"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_file_is_replaced_only_when_told_and_none_goes_into_a_run(srl, logs, workspace, tmp_path, name):
    (typed, start), file = WRITES[name], tmp_path / name
    file.write_text("mine")
    assert srl(*typed, file)[:2] == (2, "")
    assert file.read_text() == "mine"
    assert srl(*typed, file, "--overwrite")[:2] == (0, f"{file}\n")
    assert file.read_bytes().startswith(start)
    [run] = workspace.glob("runs/*00aa")
    before = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
    for out in (run / "log" / "manifest.json", run / "new.svg", run):
        assert srl(*typed, out, "--overwrite")[:2] == (2, "")
    assert sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file()) == before


def test_sql_of_one_run_and_of_all(srl, logs):
    assert srl("sql", "SELECT count(*) AS n FROM trajectories")[1] == "n\n6\n"
    query = "SELECT run_id, count(*) AS n FROM trajectories GROUP BY ALL ORDER BY ALL"
    of_all = lines(srl("sql", query, "--run", "all", "--json")[1])
    assert of_all == [{"run_id": GRPO, "n": 6}, {"run_id": PPO, "n": 6}]
    assert srl("sql", query, "--run", "00aa", "--csv")[1] == f"run_id,n\n{GRPO},6\n"
    words = srl("sql", "SELECT 1/3 AS third, [1, 2] AS two, NULL AS no")[1].split()
    assert words == ["third", "two", "no", "0.333333", "[1,", "2]"]


def test_the_queries_of_the_page_have_rows(srl, workspace):
    """On a log with a failed search, an answer that was not shown, and a watch that fired."""
    made = episode(0, answer=None)
    made.searches += [search("again", turn=1, status="failed", error="503")]
    log = new_log(workspace / "runs" / GRPO)
    log.write(1, "train", [record(made)], {})
    fired = {"number": 1, "step": 1, "phase": "train", "watch": "entropy", "metric": "actor/entropy"}
    fired |= {"action": "note"}
    write_watches(log.directory, [dict.fromkeys(("value", "bound", "since")) | fired])
    for query in re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        code, out, _ = srl("sql", query, "--json")
        assert (query, code) == (query, 0)
        assert lines(out), query


ESCAPES = [
    "FROM read_text('{secret}')", "FROM read_csv('{secret}')", "FROM '{secret}'", "FROM glob('{folder}/*')",
    "FROM read_text('.tmp/secret')", "SELECT (SELECT content FROM read_text('{secret}'))",
    "EXPLAIN ANALYZE FROM read_text('{secret}')", "COPY (SELECT 42) TO '{folder}/written'",
    "EXPLAIN (ANALYZE /*) SELECT 1 -- */) COPY (SELECT 42) TO '{folder}/written'",
    "COPY (SELECT 42) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)",
    "WITH a AS (COPY (SELECT 42) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)) FROM a",
    "EXPLAIN\x1cANALYZE COPY runs TO '{folder}/written'", "SELECT 1; COPY runs TO '{folder}/written'",
    "WITH a AS (COPY runs TO '{folder}/written') PIVOT steps ON phase USING max(step)", "SET threads = 1",
    "FROM query('COPY runs TO ''{folder}/written''')", "WITH a AS (DELETE FROM raw.runs RETURNING *) FROM a",
    "DROP VIEW runs", "INSERT INTO raw.runs VALUES (1)", "CREATE TABLE a AS SELECT 1", "", "FROM trajectory",
    "ATTACH '{folder}/written'", "EXPORT DATABASE '{folder}/written'", "INSTALL httpfs", "LOAD httpfs",
    "SET enable_external_access = true", "RESET lock_configuration", "PRAGMA database_list",
]  # fmt: skip


def test_sql_opens_and_writes_nothing_but_reads_the_log(srl, logs, workspace, tmp_path, monkeypatch):
    """DuckDB's own temporary directory is .tmp unless another one is set."""
    folder = tmp_path / "elsewhere"
    for file in (folder / "secret", folder / ".tmp" / "secret"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("a,b\n1,hunter2\n")
    monkeypatch.chdir(folder)
    part = next((workspace / "runs" / PPO / "log" / "parts").glob("*/trajectories.parquet"))
    before = part.read_bytes(), sorted(folder.rglob("*"))
    for query in ESCAPES:
        typed = query.format(secret=folder / "secret", folder=folder, part=part)
        code, out, err = srl("sql", "--run", "all", typed)
        assert (query, code, out, err.count("\n"), "hunter2" in err) == (query, 2, "", 1, False)
        assert (part.read_bytes(), sorted(folder.rglob("*"))) == before
    target = tmp_path / "steps.csv"
    assert srl("sql", "--unsafe", f"COPY (SELECT step FROM steps ORDER BY step) TO '{target}'")[0] == 0
    assert target.read_text() == "step\n1\n2\n"


def test_text_of_others_acts_in_no_output(srl, logs):
    shows = [("show", logs[3]), ("show", logs[3], "--tokens"), ("show", logs[3], "--group")]
    for typed in (("trajectories",), *shows, ("sql", "FROM hits")):
        for option in ([], ["--json"]):
            code, out, _ = srl(*typed, *option)
            assert code == 0
            assert "[bold red]x[/]" in out or "--tokens" in typed
            assert not set(out) & set("\x1b\x07\x9b\u202e")
    assert EVIL in [row["answer"] for row in lines(srl("trajectories", "--json")[1])]
