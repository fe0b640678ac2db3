"""Dynamic sampling: which groups are replaced, by which, how often, and what a run shows of it."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training import Said, config, questions, train, write_setting

import srl.store
from srl.config.sections import Data, FilterGroups
from srl.errors import UserError
from srl.reward import RewardMix
from srl.store import read_records
from srl.train.dynamic_sampling import GroupChoice, metric_value
from srl.train.question_order import QuestionOrder, order_of
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.trajectory import Score
from srl.workspace import Workspace

ON = FilterGroups(enable=True, max_num_gen_batches=3)
EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


def choice(*batches, wanted=4, section=ON):
    """A choice after these generation batches, each a text with `d` for a group that differs."""
    made, number = GroupChoice(section, wanted), 0
    for batch in batches:
        groups = {str(number + n): DIFFERENT if mark == "d" else EQUAL for n, mark in enumerate(batch)}
        number += len(batch)
        made.add(groups)
    return made


@pytest.mark.parametrize(
    ("batches", "count", "kept"),
    [
        ((), 4, ""),
        (("dddd",), 0, "0123"),
        (("dd..",), 4, "0123"),  # two missing at a share of a half: four; until then what agrees fills up
        (("d...",), 4, "0123"),  # three missing at a quarter would be twelve: a whole batch
        (("ddd.",), 2, "0123"),  # one missing at three quarters: two
        (("ddd.", "dd"), 0, "0124"),  # the surplus is left out
        (("....",), 4, "0123"),
        (("....", ".d.."), 4, "5012"),
        (("....", ".d..", "d..."), 0, "5801"),  # the last of three
    ],
)
def test_a_step_asks_until_enough_groups_differ_or_the_batches_are_used_up(batches, count, kept):
    made = choice(*batches)
    assert made.next_batch() == count
    assert made.kept() == set(kept)
    assert made.metrics() == {"train/num_gen_batches": len(batches)}


def test_without_it_there_is_one_generation_batch_and_all_of_it_is_trained_on():
    off = FilterGroups()
    assert choice(section=off).next_batch() == 4
    made = choice("..d.", section=off)
    assert (made.next_batch(), made.kept(), made.metrics()) == (0, set("0123"), {})
    choice("....", section=off).require_differing(1, "")


def test_a_group_with_one_valid_episode_has_nothing_to_compare():
    made = GroupChoice(ON, 1)
    made.add({"alone": (1.0,), "lost": (), "two": DIFFERENT})
    assert made.differing == ["two"]


def test_where_no_group_differs_the_error_says_what_the_scores_were():
    made = choice("....", "....")
    made.add({"wrong": (0.0, 0.0)})
    with pytest.raises(
        UserError, match=r"step 7: .* 9 questions .* same reward \(8 at 1, 1 at 0\).*then this"
    ):
        made.require_differing(7, "then this")
    choice("...d").require_differing(7, "")


def test_the_metric_may_be_a_part_of_the_reward():
    score = Score(0.7, {"em": 0.5, "format": 1.0})
    assert (metric_value(score, "reward"), metric_value(score, "em")) == (0.7, 0.5)
    with pytest.raises(UserError, match=r"metric = acc: .*one of reward, em, format"):
        metric_value(score, "acc")


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


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 12))
def test_where_nothing_is_replaced_a_step_asks_the_questions_of_its_batch(count, size, step):
    order = QuestionOrder(questions("train", count), size, 0)
    position = (step - 1) * order.batch_size
    assert order.further(position, order.batch_size) == (order.batch(step), position + order.batch_size)


def test_with_a_mix_what_is_asked_further_keeps_the_shares():
    data = Data(train_batch_size=4, mix={"1": 3.0, "2": 1.0})
    order = order_of(questions("train", 24), data, 0)
    asked, position = set[str](), 0
    for count in (4, 3, 5):
        found, position = order.further(position, count, asked)
        asked |= {question.id for question in found}
    assert (len(asked), position) == (12, 12)
    assert sum(int(name.rpartition("/")[2]) % 2 for name in asked) == 3, "a quarter has two hops"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    return folder


SETS = {
    "rollout__n": 2, "data__train_batch_size": 2, "rollout__deterministic": True, "actor__use_kl_loss": False,
    "algorithm__filter_groups": {"enable": True, "max_num_gen_batches": 3},
    "trainer__total_training_steps": 3, "trainer__test_freq": 0,
}  # fmt: skip


def made_rewards(monkeypatch, value):
    """Rewards by `value` of a trajectory."""

    async def score(self, trajectories):
        return [Score(value(item), {"em": value(item)}) for item in trajectories]

    monkeypatch.setattr(RewardMix, "score", score)


def odd(item):
    """Questions with an odd number get scores that differ."""
    return float(item.sample == 0 and int(item.question.id.rpartition("/")[2]) % 2)


def run_of(setting, workspace, **sets):
    train(config(setting, "grpo", **SETS | sets), workspace, "grpo")
    (run,) = Workspace(workspace).all_runs()
    return run


def trained(run):
    """Of each step its trajectories: id, whether it was left out, whether it has advantages, its metrics."""
    with srl.store.open(run) as log:
        records = read_records(log, "phase = 'train'")
        query = "SELECT step, metrics FROM raw.steps WHERE phase = 'train'"
        metrics = dict(log.execute(query).fetchall())
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
    with pytest.raises(
        UserError,
        match=r"nothing to learn in step 1: .* 6 questions .*same reward \(6 at 0\).*resume with `srl",
    ):
        run_of(setting, workspace)
    (run,) = Workspace(workspace).all_runs()
    assert not checkpoints(run)
    with srl.store.open(run) as log:
        assert log.execute("SELECT count(*) FROM trajectories WHERE phase = 'train'").fetchone() == (12,)


def test_a_pool_that_runs_dry_fills_up_with_groups_that_agree(setting, workspace, monkeypatch):
    """Eight questions in batches of four: after two batches all are asked."""
    made_rewards(monkeypatch, lambda item: float(item.question.id.endswith("3") and item.sample))
    steps = trained(run_of(setting, workspace, data__train_batch_size=4, actor__ppo_mini_batch_size=4))
    for records, _ in steps.values():
        names = [record.trajectory.question.id for record in records[::2]]
        assert len(names) == len(set(names))
        assert sum(not record.left_out for record in records) == 8
    assert any(metrics["train/num_gen_batches"] < 3 for _, metrics in steps.values())


def test_groups_of_one_are_refused(setting):
    with pytest.raises(UserError, match=r"filter_groups.enable.* compares .*rollout.n = 1.*set rollout.n=5"):
        config(setting, "grpo", **SETS | {"rollout__n": 1})
