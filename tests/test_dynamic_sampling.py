"""Dynamic sampling: which groups are replaced, by which, how often, and what a run shows of it."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import trajectory
from tests.training import Said, config, questions, setting, train

import srl.store
from srl.config.sections import FilterGroups
from srl.errors import UserError
from srl.plugins import manager
from srl.reward import RewardMix
from srl.store import read_records
from srl.train import rl
from srl.train.questions import QuestionOrder
from srl.train.rl import Sampled, compared, differ
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.trajectory import Score
from srl.workspace import Workspace

__all__ = ["setting"]

ON = FilterGroups(enable=True)


@pytest.fixture(autouse=True)
def three_batches(monkeypatch):
    monkeypatch.setattr(rl, "MAX_BATCHES", 3)


GROUPED = ("grpo", "rloo", "turn_rloo", "gspo", "cispo")
"""The algorithms whose baseline is the group."""


def sampled(*batches, wanted=4, section=ON):
    """The groups of these generation batches, each a text with `d` for a group that differs, `.` for one that
    agrees, `1` for one with a single valid episode."""
    made, number = Sampled(section, wanted), 0
    for batch in batches:
        episodes, scores = [], []
        for mark in batch:
            episodes += [
                trajectory("pa", question=str(number), failed=mark == "1" and n > 0) for n in range(2)
            ]
            scores += [Score(float(mark != "d" or n)) for n in range(2)]
            number += 1
        made.add(episodes, scores)
    return made


def trained_on(made):
    return {record.trajectory.question.id for record in made.trained()}


@pytest.mark.parametrize(
    ("batches", "count", "kept"),
    [
        ((), 4, ""),
        (("dddd",), 0, "0123"),
        (("dd..",), 4, "0123"),  # two missing at a share of a half: four; until then what agrees fills up
        (("d...",), 4, "0123"),  # three missing at a quarter would be twelve: a whole batch
        (("ddd.",), 2, "0123"),  # one missing at three quarters: two
        (("ddd.", "dd"), 0, "0124"),  # the surplus is left out
        (("....", ".d1."), 4, "5012"),
        (("....", ".d..", "d..."), 0, "5801"),  # the last of three
    ],
)
def test_a_step_asks_until_enough_groups_differ_or_the_batches_are_used_up(batches, count, kept):
    made = sampled(*batches)
    assert made.next_batch() == count
    assert trained_on(made) == set(kept)
    assert made.metrics() == {"train/num_gen_batches": len(batches)}


def test_where_no_group_differs_it_is_an_error():
    with pytest.raises(UserError) as caught:
        sampled("....", "....").require_differing(7)
    assert caught.value.key == "algorithm.filter_groups.enable"
    sampled("...d").require_differing(7)


def test_an_episode_without_the_metric_is_left_out_and_none_with_it_is_an_error():
    scores = [Score(1.0, {"em": 1.0, "judge": 0.5}), Score(0.0, {"em": 0.0}), Score(0.0)]
    episodes = [trajectory("pa"), trajectory("pa"), trajectory("pa", failed=True)]
    for metric, values in (("judge", [(0.5,)]), ("reward", [(1.0,), (0.0,)])):
        made = Sampled(FilterGroups(enable=True, metric=metric), 1)
        made.add(episodes, scores)
        assert list(made.groups.values()) == [values]
    with pytest.raises(UserError) as caught:
        Sampled(FilterGroups(enable=True, metric="acc"), 1).add(episodes, scores)
    assert caught.value.key == "algorithm.filter_groups.metric"


def advantages(name, turns):
    """The advantages of a group with these rewards by turn; a turn is one token, and one is read after it."""
    longest = 2 * max(map(len, turns))
    rewards, mask = torch.zeros(len(turns), longest), torch.zeros(len(turns), longest)
    for row, each in enumerate(turns):
        rewards[row, : 2 * len(each) : 2] = torch.tensor(each)
        mask[row, : 2 * len(each) : 2] = 1
    valid, group = torch.ones(len(turns), dtype=torch.bool), torch.zeros(len(turns), dtype=torch.long)
    return manager.load("algorithm", name).estimator(
        token_level_rewards=rewards, response_mask=mask.long(), group_ids=group, valid=valid,
        values=None, group_size=len(turns), gamma=1.0, lam=1.0,
    ).advantages  # fmt: skip


def differs(name, turns):
    turn_level = manager.load("algorithm", name).turn_level
    return differ([compared(Score(sum(each), {}, each), "reward", turn_level) for each in turns])


@pytest.mark.parametrize("name", GROUPED)
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_group_differs_exactly_where_it_has_an_advantage(name, data):
    """Rewards are halves, so that no sum is rounded. Episodes may have more turns than others."""
    turn = st.lists(st.sampled_from([0.0, 0.5]), min_size=1, max_size=3).map(tuple)
    turns = data.draw(st.lists(turn, min_size=2, max_size=4))
    assert differs(name, turns) == bool((advantages(name, turns).abs() > 1e-5).any())


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
    """Rewards by `value` of a trajectory: a number, or one for each turn."""

    async def score(self, trajectories):
        return [scored(value(item)) for item in trajectories]

    def scored(found):
        per_turn = found if isinstance(found, tuple) else None
        total = sum(per_turn) if per_turn else found
        return Score(total, {"em": total}, per_turn)

    monkeypatch.setattr(RewardMix, "score", score)


def odd(item):
    """Questions with an odd number get scores that differ."""
    return float(item.sample == 0 and int(item.question.id.rpartition("/")[2]) % 2)


def run_of(setting, workspace, algo="grpo", **sets):
    train(config(setting, algo, **SETS | sets), workspace, algo)
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
    with pytest.raises(UserError, match="6 questions") as caught:
        run_of(setting, workspace)
    (run,) = Workspace(workspace).all_runs()
    assert caught.value.key == "algorithm.filter_groups.enable"
    assert not checkpoints(run)
    with srl.store.open(run) as log:
        assert log.execute("SELECT count(*) FROM trajectories WHERE phase = 'train'").fetchone() == (12,)
