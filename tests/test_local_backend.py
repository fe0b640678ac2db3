"""Whole runs on a world of six towns: what they leave in the log, and how they stop."""

import pytest
from tests.store_builder import log_records, log_rows
from tests.training import Said, config, only_run, questions, search_is_down, setting, train

from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.train.run import resume
from srl.workspace import Workspace

__all__ = ["setting"]

ALGORITHMS = ("ppo", "grpo", "reinforce_plus_plus")
WANTED = {
    *("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/ref_kl", "critic/score/mean"),
    *("train/em", "env/number_of_valid_search", "response_length/mean", "rollout/logprob_diff/max"),
    *("timing_s/step", "timing_s/gen", "timing_s/update_actor"),
}
CRITIC = {"critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm", "timing_s/update_critic"}


@pytest.fixture(scope="module")
def finished(setting):
    """A run of REINFORCE that is over: its directory, its summary, and what was said."""
    said = Said()
    summary = train(config(setting, "reinforce"), setting / "workspace", "reinforce", said)
    return only_run(setting / "workspace"), summary, said.text


def metrics_of(run):
    """The metrics of each training step."""
    query = "SELECT step, metrics FROM raw.steps WHERE phase = 'train' ORDER BY step"
    return dict(log_rows(run, query))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_trains_from_start_to_end(setting, workspace, algo):
    summary = train(config(setting, algo, actor__entropy_coeff=0.01), workspace, algo)
    run = only_run(workspace)
    assert (summary.run_id, summary.algo, summary.steps) == (run.name, algo, 2)
    assert summary.test_em_start is not None
    assert summary.test_em_end is not None
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    steps = metrics_of(run)
    assert list(steps) == [1, 2]
    wanted = WANTED | (CRITIC if algo == "ppo" else set())
    for values in steps.values():
        assert wanted <= values.keys()
        assert values["rollout/logprob_diff/max"] < 1e-4, "the trainer's log-probs are the sampler's"
        assert values["actor/grad_norm"] > 0
    assert ("critic/vf_loss" in steps[1]) == (algo == "ppo")


def test_the_log_has_the_trainers_log_probs_and_entropies(setting, tmp_path):
    """Their means over the policy's tokens are the metrics of the step; evaluations have none."""
    sets = {"actor__ppo_mini_batch_size": 4, "trainer__total_training_steps": 1}
    train(config(setting, "grpo", **sets), tmp_path, "grpo")
    run = only_run(tmp_path)
    metrics = metrics_of(run)[1]
    assert "timing_s/old_log_prob" not in metrics, "the update's own pass has them"
    records = log_records(run, "phase = 'train'")
    found = log_rows(
        run,
        "SELECT DISTINCT phase, trainer_logprobs IS NULL, entropies IS NULL FROM segments WHERE mask = 1 "
        "ORDER BY ALL",
    )
    assert found == [("test", True, True), ("train", False, False), ("val", True, True)]
    tokens = [
        numbers
        for record in records
        for *numbers, mask in zip(
            record.trainer_logprobs, record.entropies, record.trajectory.logprobs,
            record.trajectory.response_mask, strict=True,
        )
        if mask
    ]  # fmt: skip
    mean = sum(token[1] for token in tokens) / len(tokens)
    assert metrics["actor/entropy"] == pytest.approx(mean, rel=1e-3)
    gaps = [abs(ours - sampled) for ours, _, sampled in tokens]
    assert metrics["rollout/logprob_diff/max"] == pytest.approx(max(gaps))
    assert max(ours for ours, *_ in tokens) < 0


def test_what_is_trained_is_what_was_sampled(finished):
    """Every policy token of the log was drawn by the engine, and carries an advantage."""
    records = log_records(finished[0], "phase = 'train'")
    searched = 0
    for record in records:
        trajectory = record.trajectory
        searched += len(trajectory.searches)
        assert trajectory.segments[0].kind == "prompt"
        assert trajectory.segments[-1].is_policy
        for segment in trajectory.segments:
            assert len(segment.logprobs) == (len(segment.token_ids) if segment.is_policy else 0)
            assert all(logprob < 0 for logprob in segment.logprobs)
        mask = trajectory.response_mask
        assert [value for value, one in zip(record.advantages, mask, strict=True) if not one] == [
            0.0
        ] * mask.count(0)
        own = {value for value, one in zip(record.advantages, mask, strict=True) if one}
        assert own == {record.score.value}, "reinforce without discount gives each token its episode's reward"
    assert searched > 0
    assert {segment.kind for record in records for segment in record.trajectory.segments} >= {"observation"}


def test_too_many_failed_searches_stop_the_run_with_one_line_and_it_resumes(setting, workspace, monkeypatch):
    chosen = config(setting, "grpo", trainer__val_before_train=False, data__test_files=None)
    with monkeypatch.context() as patch:
        search_is_down(patch, "train/")
        with pytest.raises(UserError, match=r"search failed in \d of 8 episodes.*nobody listens.*--resume"):
            train(chosen, workspace)
    run = only_run(workspace)
    assert log_rows(run, "SELECT status FROM runs") == [("failed",)]
    lost = log_rows(run, "SELECT count(*) FROM trajectories WHERE NOT valid")[0]
    assert lost[0] > 0, "the episodes that were lost are in the log"
    summary = resume(run, workspace=Workspace(workspace), terminal=Said())
    assert summary.steps == 2
    assert log_rows(run, "SELECT status FROM runs") == [("finished",)]
    assert log_rows(run, "SELECT count(*) FROM trajectories WHERE NOT valid")[0] == (0,)


def test_training_moves_the_policy_towards_its_reward(setting, workspace, tmp_path):
    """Asked one question again and again, and told whether the answer was right, it learns the answer."""
    (question,) = questions("train", 1)
    write_questions(tmp_path / "one.parquet", [question])
    chosen = config(
        setting, "grpo", data__train_files=[str(tmp_path / "one.parquet")], rollout__n=16,
        data__train_batch_size=1, actor__ppo_mini_batch_size=1, actor__optim__lr=3e-3,
        rollout__max_num_seqs=16, trainer__total_training_steps=18, trainer__save_freq=0,
        trainer__test_freq=0,
    )  # fmt: skip
    train(chosen, workspace, "grpo")
    rewards = [values["critic/score/mean"] for values in metrics_of(only_run(workspace)).values()]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
