"""`srl eval rescore`: another measure of stored answers, in a table of its own; the log stays as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.store_builder import episode, question, record, search

import srl.store
from srl.answers import f1
from srl.cli import main
from srl.config import load_config, save_config
from srl.errors import UserError
from srl.evaluate.rescore import describe, mean_of, parse_rewards, rescore
from srl.reward import RewardMix
from srl.store import LogWriter, RunInfo, read_records
from srl.store.batches import batches
from srl.store.beside import rescore_files

NAME = "20260101T000000Z-test-grpo-s0-00ff"
ANSWERS = ["Münchenbuchsee", "Bern", "in Münchenbuchsee", None]
REWARDS = '''
from srl.trajectory import Score

class Words:
    """The number of words of an answer."""
    def score(self, trajectories):
        return [Score(float(len((item.answer or "").split()))) for item in trajectories]

class Judge:
    """Needs a server, and nobody listens."""
    async def score(self, trajectories):
        raise ConnectionError("cannot connect to 127.0.0.1:9")

class Down:
    """Cannot score one episode."""
    def score(self, trajectories):
        return [Score(1.0, error="it is down" * (item.question.id == "nq-5")) for item in trajectories]

class Fussy:
    """Fails on one episode late in the log."""
    def score(self, trajectories):
        return [Score(1.0 / (item.question.id != "nq-5")) for item in trajectories]
'''


def episodes(step: int, phase: str, count: int = 6):
    """Episodes with right, wrong, half-right and missing answers; the last one failed."""
    found = [episode(number, step=step, phase=phase, answer=ANSWERS[number % 4]) for number in range(count)]
    broken = episode(count, step=step, phase=phase, answer=None, end="failed")
    broken.searches[-1] = search("query", status="refused", error="nobody listens")
    return [*found, broken]


@pytest.fixture
def run(workspace: Path) -> Path:
    """A run of training with two steps, validations, and an interrupted log."""
    return made(workspace / "runs" / NAME)


def made(run: Path, *, finish: bool = False, **settings: object) -> Path:
    run.mkdir(parents=True)
    save_config(run, load_config(None, None, "grpo", settings).config)
    log = LogWriter(run / "log", RunInfo(run.name))
    for step, phase in ((0, "val"), (1, "train"), (2, "train"), (2, "val")):
        log.write(step, phase, [record(item, advantage=None) for item in episodes(step, phase)], {})
    log.finish() if finish else log.close("interrupted")
    return run


def asked(run: Path, query: str) -> list[tuple]:
    with srl.store.open(run) as log:
        return log.execute(query).fetchall()


def content(run: Path) -> dict[str, str]:
    """A digest of every file of the run but for the rescores."""
    files = (file for file in sorted(run.rglob("*")) if file.is_file() and "rescores" not in file.parts)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# --- reading trajectories back ---


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_trajectories_are_read_in_batches_as_they_were_written(tmp_path, monkeypatch, size):
    monkeypatch.setattr("srl.store.batches.SIZE", size)
    log, written = LogWriter(tmp_path / "log", RunInfo("run")), []
    for step in range(1, 6):
        made = [
            *episodes(step, "train"),
            episode(9, step=step, passages=None),
            episode(8, step=step, passages=()),
        ]
        written += made
        log.write(step, "train", [record(item) for item in made], {})
    with srl.store.open(tmp_path) as connection:
        read = list(batches(connection))
    assert [item.trajectory for batch in read for item, _ in batch.pairs] == written
    assert all(0 < len(batch.pairs) <= size for batch in read)


# --- rescoring ---


@pytest.mark.parametrize("finish", [False, True])
def test_the_new_measure_is_that_of_the_stored_answers_and_the_log_is_unchanged(workspace, finish):
    run = made(workspace / "runs" / NAME, finish=finish)
    before = content(run)
    found = rescore(run, {"f1": 1.0})
    assert (found.scored, found.before, found.rewards) == (28, 0, "f1=1")
    assert content(run) == before
    stored = dict(asked(run, "SELECT trajectory_id, value FROM rescores WHERE measure = 'f1'"))
    with srl.store.open(run) as log:
        expected = {
            item.trajectory.id: f1(item.trajectory.answer, item.trajectory.question.golden_answers)
            for item in read_records(log)
        }
    assert stored == expected
    assert len(set(stored.values())) == 3, "right, half right, wrong"
    last = next(row for row in found.rows if (row.phase, row.step) == ("val", 2))
    assert last.episodes == 7
    assert last.em.mean == pytest.approx(2 / 7)
    assert last.measures["f1"].mean == pytest.approx((2 + 2 / 3) / 7)
    assert [(row.phase, row.step) for row in found.rows] == [
        ("train", 1),
        ("train", 2),
        ("val", 0),
        ("val", 2),
    ]


def test_the_same_again_is_not_computed_twice(run, capsys):
    for scored, before in ((28, 0), (0, 28)):
        assert main(["eval", "rescore", "last", "--reward", "f1", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["scored"], told["before"]) == (scored, before)
    assert asked(run, "SELECT count(*) FROM rescores WHERE measure = 'f1'") == [(28,)]
    assert len(rescore_files(run / "log")) == 1
    assert main(["eval", "rescore", "last", "--reward", "f1"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.split()[:4] == ["phase", "step", "source", "episodes"]


def test_only_what_the_log_has_got_since_is_computed(run):
    rescore(run, {"f1": 1.0})
    with LogWriter(run / "log", RunInfo(run.name)) as log:
        log.write(3, "train", [record(item, advantage=None) for item in episodes(3, "train")], {})
    found = rescore(run, {"f1": 1.0})
    assert (found.scored, found.before) == (7, 28)
    assert asked(
        run, "SELECT count(*), count(DISTINCT trajectory_id) FROM rescores WHERE measure = 'f1'"
    ) == [(35, 35)]


def test_rewards_are_summed_by_weight_with_their_parts_and_the_options_of_the_run(workspace):
    run = made(
        workspace / "runs" / NAME, **{"reward.format.structure_score": 0.5, "reward.weights": {"em": 1.0}}
    )
    found = rescore(run, {"f1": 0.5, "format": 2.0})
    assert found.rewards.startswith("f1=0.5 + format=2 (")
    assert "structure_score=0.5" in found.rewards
    totals = asked(run, """
        SELECT total.value - (0.5 * f.value + 2 * g.value) FROM rescores total
        JOIN rescores f USING (trajectory_id, step, phase) JOIN rescores g USING (trajectory_id, step, phase)
        WHERE total.measure = 'reward' AND f.measure = 'f1' AND g.measure = 'format'
    """)  # fmt: skip
    assert len(totals) == 28
    assert max(abs(value) for (value,) in totals) < 1e-12
    assert ("format/well_formed",) in asked(run, "SELECT DISTINCT measure FROM rescores")


def test_another_prompt_under_the_same_name_is_another_rescore(tmp_path):
    pytest.importorskip("srl_reward_models")
    prompt = tmp_path / "judge.txt"
    sets = ["reward.judge.url=http://127.0.0.1:9", f"reward.judge.prompt={prompt}"]
    config, found = load_config(sets=sets).config, []
    for text in ("Right?", "Wrong?", "Right?"):
        prompt.write_text(text)
        found.append(describe("judge", 1.0, config))
    assert found[0] == found[2] != found[1]
    assert found[0].startswith(f'judge=1 (prompt="{prompt}", url=')


def test_other_weights_are_another_rescore(run):
    rescore(run, {"f1": 1.0})
    rescore(run, {"f1": 0.5})
    assert asked(
        run, "SELECT rewards, count(*) FROM rescores WHERE measure = 'reward' GROUP BY 1 ORDER BY 1"
    ) == [
        ("f1=0.5", 28),
        ("f1=1", 28),
    ]


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "rescore_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def test_a_reward_of_the_current_directory_needs_no_package(run, own_rewards, capsys):
    assert main(["eval", "rescore", NAME, "--reward", "rescore_rewards:Words", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rewards"].startswith("rescore_rewards:Words=1 (code ")
    row = next(row for row in told["rows"] if (row["phase"], row["step"]) == ("val", 0))
    assert row["measures"]["rescore_rewards:Words"] == {"mean": pytest.approx(6 / 7), "interval": None}
    assert row["em"]["interval"] is not None


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        ("rescore_rewards:Judge", "cannot connect to 127.0.0.1:9"),
        ("rescore_rewards:Fussy", "ZeroDivisionError"),
        ("rescore_rewards:Down", "it is down"),
        ("rescore_rewards:Down=0", "it is down"),
        ("nope", "'nope'"),
        ("f1=much", "f1=much"),
        ("=1", "=1"),
        ("f1=nan", "f1=nan"),
    ],
)
def test_a_reward_that_fails_is_one_line_and_leaves_nothing_half(
    run, own_rewards, capsys, monkeypatch, reward, named
):
    monkeypatch.setattr("srl.store.batches.SIZE", 2)
    before = content(run)
    assert main(["eval", "rescore", "last", "--reward", reward]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert named in printed.err
    assert printed.out == ""
    assert not (run / "log" / "rescores").exists()
    assert content(run) == before


def test_a_reward_that_is_named_twice_is_refused():
    with pytest.raises(UserError) as caught:
        parse_rewards(["f1", "f1=2"])
    assert caught.value.key == "reward"


def test_a_log_without_episodes_is_one_line(workspace):
    run = workspace / "runs" / NAME
    run.mkdir(parents=True)
    save_config(run, load_config().config)
    LogWriter(run / "log", RunInfo(run.name))
    with pytest.raises(UserError):
        rescore(run, {"f1": 1.0})


def test_steps_that_a_resumed_run_samples_again_lose_their_rescores(run):
    rescore(run, {"f1": 1.0})
    log = LogWriter(run / "log", RunInfo(run.name))
    log.drop_steps_after(1)
    assert asked(run, "SELECT DISTINCT phase, step FROM rescores ORDER BY step") == [("val", 0), ("train", 1)]
    again = episode(0, step=1, answer="Münchenbuchsee")
    log.write(1, "train", [record(again, advantage=None)], {})
    assert asked(run, "SELECT DISTINCT phase, step FROM rescores") == [("val", 0)]
    assert rescore(run, {"f1": 1.0}).scored == 1
    assert asked(run, "SELECT value FROM rescores WHERE phase = 'train' AND measure = 'f1'") == [(1.0,)]


def test_episodes_that_a_writer_replaces_meanwhile_keep_no_score(run, monkeypatch):
    log = LogWriter(run / "log", RunInfo(run.name))
    real = RewardMix.score

    async def score(self, trajectories):
        log.drop_steps_after(1)
        return await real(self, trajectories)

    with monkeypatch.context() as patch:
        patch.setattr(RewardMix, "score", score)
        with pytest.raises(UserError):
            rescore(run, {"f1": 1.0})
    assert asked(run, "SELECT count(*) FROM rescores") == [(0,)]
    log.write(2, "train", [record(item, advantage=None) for item in episodes(2, "train")], {})
    log.close("interrupted")
    assert rescore(run, {"f1": 1.0}).scored == 21


def test_an_episode_that_is_sampled_again_loses_its_rescores(run):
    rescore(run, {"f1": 1.0})
    (gone,) = asked(run, "SELECT id FROM trajectories WHERE phase = 'val' AND step = 0 LIMIT 1")
    log = LogWriter(run / "log", RunInfo(run.name), adds=True)
    log.drop_trajectories(set(gone))
    left = asked(run, "SELECT trajectory_id FROM rescores WHERE measure = 'f1'")
    assert len(left) == 27
    assert gone not in left


def test_a_damaged_file_of_rescores_does_not_hide_the_log(run):
    rescore(run, {"f1": 1.0})
    (file,) = rescore_files(run / "log")
    file.write_bytes(b"PAR1 and then nothing")
    said: list[str] = []
    read = lambda log: log.execute("SELECT count(*) FROM trajectories").fetchall()  # noqa: E731
    assert srl.store.reading([run], read, warn=said.append) == [(28,)]
    (told,) = said
    assert file.name in told


def test_rescores_of_a_run_are_queried_with_sql(run, capsys):
    query = "SELECT count(*) AS n FROM rescores"
    for expected in ({"n": 0}, {"n": 56}):
        assert main(["inspect", "sql", query, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == expected
        rescore(run, {"f1": 1.0})


# --- the table ---


def test_a_measure_between_0_and_1_has_an_interval_and_another_has_none():
    found = mean_of([0.25 * (number % 5) for number in range(100)])
    assert found.mean == pytest.approx(0.5)
    assert found.interval.low < 0.5 < found.interval.high
    assert mean_of([2.0, 3.0]).interval is None


def test_samples_of_a_question_count_as_one_value(workspace):
    run = workspace / "runs" / NAME
    run.mkdir(parents=True)
    save_config(run, load_config().config)
    answers = (("Bern", "Thun"), ("Bern", "Bern"), ("Thun", "Thun"))
    with LogWriter(run / "log", RunInfo(run.name)) as log:
        found = [
            episode(number, step=0, phase="eval", sample=sample, answer=answer, asked=of_source(number, "nq"))
            for number, pair in enumerate(answers)
            for sample, answer in enumerate(pair)
        ]
        log.write(0, "eval", [record(item, advantage=None) for item in found], {})
    (row,) = rescore(run, {"em": 1.0}).rows
    assert row.episodes == 6
    assert row.em == row.measures["em"] == mean_of([0.5, 1.0, 0.0])


def test_sources_have_rows_of_their_own_where_there_are_several(workspace):
    run = workspace / "runs" / NAME
    run.mkdir(parents=True)
    save_config(run, load_config().config)
    with LogWriter(run / "log", RunInfo(run.name)) as log:
        found = [
            episode(number, step=0, phase="eval", answer=answer, asked=of_source(number, source))
            for number, (source, answer) in enumerate([("nq", "Bern"), ("nq", "Thun"), ("popqa", "Bern")])
        ]
        log.write(0, "eval", [record(item, advantage=None) for item in found], {})
    rows = rescore(run, {"em": 1.0}).rows
    assert [(row.source, row.episodes, row.em.mean) for row in rows] == [
        ("", 3, pytest.approx(2 / 3)), ("nq", 2, 0.5), ("popqa", 1, 1.0),
    ]  # fmt: skip
    for row in rows:
        assert row.measures["em"] == row.em, "the measure that the log has already"


def of_source(number: int, source: str):
    from dataclasses import replace

    return replace(question(number, ("Bern",)), data_source=source)
