"""Whole runs whose reward cannot score: nothing is trained on what has no score, and one line says why."""

from textwrap import dedent

import pytest
from tests.plugin_site import forget_modules
from tests.store_builder import log_rows
from tests.training import Said, config, only_run, train

import srl.store
from srl.errors import UserError
from srl.train.dry_run import startup_errors

REWARD = """
    from srl.trajectory import Score

    class Half:
        "No score for the second sample of a question."
        def score(self, trajectories):
            return [Score(1.0, error="it is down" * (item.sample % 2)) for item in trajectories]
"""
ERROR = "reward 'judges:Half' gave no score: it is down"


@pytest.fixture
def reward(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text(dedent(REWARD))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {"reward.weights.judges:Half": 1.0}
    forget_modules(tmp_path)


def test_episodes_without_a_score_are_logged_and_not_trained_on(tmp_path, workspace, reward):
    given = {"search.max_failed": 1.0, "trainer.total_training_steps": 1, **reward}
    said = Said()
    train(config(tmp_path / "towns", "grpo", **given), workspace, "grpo", said)
    assert said.text.count(f"warning: {ERROR}") == 1
    with srl.store.open(only_run(workspace)) as log:
        query = "SELECT DISTINCT sample, valid, error FROM trajectories WHERE phase = 'train' ORDER BY sample"
        assert log.execute(query).fetchall() == [(0, True, ""), (1, False, ERROR)]
        query = "SELECT DISTINCT verdict FROM trajectories WHERE phase = 'train' AND sample = 1 AND em < 1"
        assert log.execute(query).fetchall() == [("failed reward",)]
        query = """SELECT max(abs(advantage)) FROM (SELECT unnest(advantages) AS advantage FROM segments
            JOIN trajectories AS item ON trajectory_id = item.id WHERE sample = 1 AND item.phase = 'train')"""
        assert log.execute(query).fetchone() in [(0,), (None,)]
        query = "SELECT count(*) FROM trajectories WHERE phase <> 'train' AND \"end\" = 'failed'"
        assert log.execute(query).fetchone() == (0,), "validation measures answers as before"


def test_a_run_whose_reward_fails_too_often_ends_in_one_line(tmp_path, workspace, reward):
    said = Said()
    with pytest.raises(UserError) as caught:
        train(config(tmp_path / "towns", "grpo", **reward), workspace, "grpo", said)
    message = str(caught.value)
    assert message.startswith(
        "the reward failed in 4 of 8 episodes, more than search.max_failed=0.05 "
        f"({ERROR}); once it works again, resume with"
    )
    assert "\n" not in message
    assert log_rows(only_run(workspace), "SELECT count(*) FROM metrics WHERE name = 'actor/grad_norm'")[
        0
    ] == (0,)


def test_a_reward_that_is_0_for_every_question_is_said_before_and_at_the_start(tmp_path, workspace):
    given = {"trainer.total_training_steps": 1, "reward.weights.evidence": 0.2}
    chosen, said = config(tmp_path / "towns", "grpo", **given), Said()
    (line,) = startup_errors(chosen)
    assert "'evidence'" in line
    train(chosen, workspace, "grpo", said)
    assert said.text.count(line) == 1
