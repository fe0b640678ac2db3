"""Dynamic sampling: which groups are replaced, by which, how often, and what a run shows of it."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import trajectory
from tests.store_builder import log_records, log_rows
from tests.training import Said, config, only_run, questions, setting, train

from srl.config.sections import FilterGroups
from srl.errors import UserError
from srl.reward import RewardMix
from srl.store import Record
from srl.train import dynamic_sampling
from srl.train.dynamic_sampling import sample_until_differing
from srl.train.questions import QuestionOrder
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.trajectory import Score
from srl.workspace import Workspace

__all__ = ["setting"]

ON = FilterGroups(enable=True)


@pytest.fixture(autouse=True)
def three_batches(monkeypatch):
    monkeypatch.setattr(dynamic_sampling, "MAX_BATCHES", 3)


class InOrder:
    """An order of questions that are numbered as they are asked."""

    batch_size = 4

    def further(self, position, count, asked):
        return list(range(position, position + count)), position + count


def sampled(marks, section=ON):
    """How many questions each batch asks, and those that are trained on. A mark for each question: `d` for a
    group that differs, `.` for one that agrees, `1` for one with a single valid episode."""
    counts, records = [], []

    def play(numbers):
        counts.append(len(numbers))
        for number in numbers:
            mark = marks[number]
            for n in range(2):
                episode = trajectory("pa", question=str(number), failed=mark == "1" and n > 0)
                records.append(Record(episode, Score(float(mark != "d" or n))))
        return records

    position, batches = sample_until_differing(section, InOrder(), 0, play)
    assert (position, batches) == (sum(counts), len(counts))
    return counts, {record.trajectory.question.id for record in records if not record.left_out}


@pytest.mark.parametrize(
    ("marks", "counts", "kept"),
    [
        ("dddd", [4], "0123"),
        ("dd..dd..", [4, 4], "0145"),  # two missing at a share of a half: four
        ("d...dd..d...", [4, 4, 3], "0458"),  # three missing at a quarter would be twelve: a whole batch
        ("ddd.dd", [4, 2], "0124"),  # one missing at three quarters: two; the surplus is left out
        ("....1d1.d...", [4, 4, 4], "0158"),  # after the last of three batches what agrees fills up
    ],
)
def test_a_step_asks_until_enough_groups_differ_or_the_batches_are_used_up(marks, counts, kept):
    assert sampled(marks) == (counts, set(kept))


def test_where_no_group_differs_it_is_an_error():
    with pytest.raises(UserError) as caught:
        sampled("." * 12)
    assert caught.value.key == "algorithm.filter_groups.enable"


def test_an_episode_without_the_metric_is_left_out_and_none_with_it_is_an_error():
    def play(numbers):
        parts = [{"em": 1.0, "judge": 0.5}, {"em": 1.0, "judge": 0.0}, {"em": 1.0}, {}]
        records = [Record(trajectory("pa", question="q"), Score(1.0, each)) for each in parts]
        return [*records, Record(trajectory("pa", question="q", failed=True), Score(0.0))]

    assert sample_until_differing(FilterGroups(enable=True, metric="judge"), InOrder(), 0, play)[1] == 3
    for metric, key in (("em", "enable"), ("acc", "metric")):
        with pytest.raises(UserError) as caught:
            sample_until_differing(FilterGroups(enable=True, metric=metric), InOrder(), 0, play)
        assert caught.value.key == f"algorithm.filter_groups.{key}"


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_step_asks_no_question_twice_and_the_position_is_all_that_it_depends_on(count, size, wishes):
    made = [QuestionOrder(questions("train", count), size, 0) for _ in range(2)]
    asked, position = set(), 3
    for wish in wishes:
        found, after = made[0].further(position, wish, asked)
        again, _ = made[1].further(position, wish, asked)
        names = {question.id for question in found}
        assert [item.id for item in again] == [item.id for item in found]
        assert len(names) == len(found) == min(wish, len(found))
        assert not names & asked
        assert position <= after
        if len(found) < wish:
            size = made[0].batch_size
            assert len(names | asked) >= count - count % size, "too few only if an epoch's are all asked"
        asked, position = asked | names, after


SETS = {
    "rollout__n": 2, "data__train_batch_size": 2, "rollout__deterministic": True, "actor__use_kl_loss": False,
    "algorithm__filter_groups": {"enable": True},
    "trainer__total_training_steps": 3, "trainer__test_freq": 0,
}  # fmt: skip


def made_rewards(monkeypatch, value):
    async def score(self, trajectories):
        return [Score(value(item), {"em": value(item)}) for item in trajectories]

    monkeypatch.setattr(RewardMix, "score", score)


def odd(item):
    """Questions with an odd number get scores that differ."""
    return float(item.sample == 0 and int(item.question.id.rpartition("/")[2]) % 2)


def run_of(setting, workspace):
    train(config(setting, **SETS), workspace)
    return only_run(workspace)


def trained(run):
    """Of each step its trajectories: id, whether it was left out, whether it has advantages, its metrics."""
    records = log_records(run, "phase = 'train'")
    query = "SELECT step, metrics FROM raw.steps WHERE phase = 'train'"
    metrics = dict(log_rows(run, query))
    steps = {record.trajectory.step for record in records}
    return {
        step: ([item for item in records if item.trajectory.step == step], metrics[step]) for step in steps
    }


def test_the_log_has_all_episodes_and_marks_those_that_are_not_trained_on(setting, workspace, monkeypatch):
    made_rewards(monkeypatch, odd)
    for records, metrics in trained(run_of(setting, workspace)).values():
        kept = [record for record in records if not record.left_out]
        assert len(kept) == 2 * 2
        assert all((record.advantages is None) == record.left_out for record in records)
        names = [record.trajectory.question.id for record in records[::2]]
        assert len(set(names)) == len(names), "a step asks no question twice"
        assert 1 <= metrics["train/num_gen_batches"] <= 3
        differing = [name for name in names if int(name[-1]) % 2]
        assert {record.trajectory.question.id for record in kept} >= set(differing[:2])
        assert metrics["env/equal_groups_share"] == pytest.approx(1 - len(differing) / len(names))
        if len(differing) >= 2:
            assert metrics["critic/score/mean"] == 0.5


@pytest.mark.slow
def test_a_resumed_run_asks_and_learns_what_it_would_have(setting, tmp_path, monkeypatch):
    made_rewards(monkeypatch, odd)
    whole = run_of(setting, tmp_path / "whole")
    cut = run_of(setting, tmp_path / "cut")
    for step, path in checkpoints(cut).items():
        if step > 1:
            shutil.rmtree(path)
    resume(cut, workspace=Workspace(tmp_path / "cut"), terminal=Said())
    ids = [
        [(item.trajectory.id, item.left_out) for step in sorted(found) for item in found[step][0]]
        for found in (trained(whole), trained(cut))
    ]
    assert ids[0] == ids[1]
    weights = [(run / "checkpoints/step-000003/model.safetensors").read_bytes() for run in (whole, cut)]
    assert weights[0] == weights[1]


def test_a_run_without_a_group_that_differs_stops_and_trains_nothing(setting, workspace, monkeypatch):
    made_rewards(monkeypatch, lambda item: 0.0)
    with pytest.raises(UserError, match="6 questions") as caught:
        run_of(setting, workspace)
    run = only_run(workspace)
    assert caught.value.key == "algorithm.filter_groups.enable"
    assert not checkpoints(run)
    assert log_rows(run, "SELECT count(*) FROM trajectories WHERE phase = 'train'")[0] == (12,)
