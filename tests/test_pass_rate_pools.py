"""Pools by pass rate: which questions are drawn, what a checkpoint keeps of them, and what a run says."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.test_dynamic_sampling import made_rewards, trained
from tests.training import Said, config, questions, train, write_setting

from srl.config.sections import PassRatePools
from srl.errors import UserError
from srl.train.pass_rates import POOLS, PassRateOrder, note_asked, pool_of
from srl.train.question_order import MixedOrder, QuestionOrder
from srl.train.run import resume
from srl.train.run_directory import checkpoint_path, checkpoints
from srl.trajectory import Question
from srl.workspace import Workspace

HISTORY = {"unasked": None, "never": [1, 0, 4], "sometimes": [1, 3, 4], "always": [1, 4, 4]}


def pools(**shares):
    return PassRatePools(enable=True, **shares)


def with_pools(counts, **shares):
    """An order of `counts` questions of each pool, called by the pool and a number."""
    names = [(name, f"{name}{number}") for name, count in counts.items() for number in range(count)]
    made = [Question(name, "?", ()) for _, name in names]
    asked = {name: HISTORY[pool] for pool, name in names if HISTORY[pool]}
    return PassRateOrder(QuestionOrder(made, 4, seed=0), pools(**shares), asked)


@pytest.mark.parametrize(
    ("episodes", "pool"),
    [((), "unasked"), ((0, 0), "never"), ((1, 0), "sometimes"), ((0, 1, 1), "sometimes"), ((1, 1), "always")],
)
def test_the_pool_is_that_of_the_last_asking(episodes, pool):
    asked = {"q": [1, 1, 2]}
    note_asked(asked, 5, {"q": [bool(right) for right in episodes]})
    assert asked == {"q": [5, sum(episodes), len(episodes)]}
    assert (pool_of(asked, "q"), pool_of(asked, "another")) == (pool, "unasked")


def test_questions_are_drawn_in_proportion_to_the_shares():
    order = with_pools(dict.fromkeys(POOLS, 400), unasked=1.0, never=0.5, sometimes=2.0, always=0.5)
    drawn = order.drawn(order.further(0, 400)[0])
    for name, share in {"unasked": 0.25, "never": 0.125, "sometimes": 0.5, "always": 0.125}.items():
        error = (share * (1 - share) / 400) ** 0.5
        assert drawn[f"train/drawn/{name}"] == pytest.approx(share, abs=3 * error)


def test_a_pool_that_is_empty_or_has_no_share_leaves_its_share_to_the_others():
    order = with_pools({"unasked": 4, "always": 9, "sometimes": 2}, always=0.0)
    found, place = order.further(0, 6)
    assert Counter(item.id.rstrip("0123456789") for item in found) == {"unasked": 4, "sometimes": 2}
    assert place == 6
    assert order.further(place, 3, {item.id for item in found})[0] == [], "what is always right has no share"


def test_what_was_asked_longest_ago_comes_first():
    made = with_pools({"sometimes": 6})
    asked = {f"sometimes{number}": [9 - number, 1, 2] for number in range(6)}
    order = PassRateOrder(made.order, made.section, asked)
    assert [item.id for item in order.further(0, 6)[0]] == [f"sometimes{5 - number}" for number in range(6)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_step_draws_no_question_twice_and_what_it_draws_depends_on_the_place_and_the_state(start, wishes):
    made = [with_pools({"unasked": 5, "never": 3, "sometimes": 4}) for _ in range(2)]
    asked, position = set(), start
    for wish in wishes:
        found, after = made[0].further(position, wish, asked)
        assert made[1].further(position, wish, asked) == (found, after)
        names = {item.id for item in found}
        assert len(names) == len(found) == min(wish, 12 - len(asked))
        assert not names & asked
        asked, position = asked | names, after


def sorted_anew(order: PassRateOrder, position: int, count: int, asked: set[str]) -> list[str]:
    """The ids that `further` draws, by the definition: all questions are sorted at each draw."""
    queues = defaultdict(lambda: {name: [] for name in POOLS})
    for item in sorted(order.order.first_epoch(), key=lambda item: order.asked.get(item.id, [0])[0]):
        if item.id not in asked:
            queues[order.order.part_of(item)][pool_of(order.asked, item.id)].append(item.id)
    drawn, share = [], order.section.model_dump()
    for place in range(position, position + count):
        pools = queues[order.order.part_of(order.order.at(place))]
        if left := [name for name in POOLS if pools[name] and share[name]]:
            rng = Random(f"pass rates {order.order.seed} {place}")
            drawn.append(pools[rng.choices(left, [share[name] for name in left])[0]].pop(0))
    return drawn


def made_orders(count: int, mixed: bool, shares: dict[str, float]) -> PassRateOrder:
    made = questions("train", count)
    order = MixedOrder(made, 4, 0, True, {"1": 2.0, "2": 1.0}) if mixed else QuestionOrder(made, 4, seed=0)
    asked = {item.id: [number % 4, number % 3, 2] for number, item in enumerate(made) if number % 5 == 0}
    return PassRateOrder(order, pools(**shares), asked)


@settings(deadline=None, max_examples=60)
@given(
    st.booleans(),
    st.fixed_dictionaries({name: st.sampled_from([0.0, 0.5, 3.0]) for name in POOLS}).filter(
        lambda shares: shares["unasked"]
    ),
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_steps_draw_what_sorting_all_questions_anew_would(mixed, shares, steps, rng):
    """Each step has one or more generation batches, and its questions are then right or wrong at random."""
    order, position = made_orders(24, mixed, shares), 0
    for step, wishes in enumerate(steps, start=5):
        asked = dict[str, list[bool]]()
        for wish in wishes:
            expected = sorted_anew(order, position, wish, asked)
            found, position = order.further(position, wish, asked)
            assert [item.id for item in found] == expected
            asked |= {name: [rng.random() < 0.5 for _ in range(rng.randrange(3))] for name in expected}
        order.note(step, asked)


def test_with_a_mix_each_place_keeps_its_part():
    made = questions("train", 24)  # every other one has two hops
    order = MixedOrder(made, 4, 0, True, {"1": 3.0, "2": 1.0})
    rates = {item.id: [1, number % 3, 2] for number, item in enumerate(made) if number % 5}
    found, _ = PassRateOrder(order, pools(), rates).further(0, 12)
    assert len({item.id for item in found}) == 12
    places = [order.part_of(order.at(place)) for place in range(12)]
    assert [str(item.metadata["hops"]) for item in found] == places
    assert Counter(places) == {"1": 9, "2": 3}


def test_of_a_mix_only_the_parts_that_run_dry_are_named():
    made = questions("train", 24)  # every other one has two hops, and is always right
    order = MixedOrder(made, 4, 0, True, {"1": 3.0, "2": 1.0})
    asked = {item.id: [1, 2, 2] for item in made[1::2]}
    drawer = PassRateOrder(order, pools(always=0.0), asked)
    found, _ = drawer.further(0, 4)
    assert len(found) == 3
    said = drawer.dry(len(found), 7)
    assert "step 7 asks 3 of 4 questions; of '2' in data.mix there are 0 unasked (share 1), 0 never" in said
    assert "12 always (share 0): give" in said
    assert "'1'" not in said


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    return folder


SETS = {
    "rollout__n": 2, "data__train_batch_size": 2, "rollout__deterministic": True, "actor__use_kl_loss": False,
    "data__pass_rate_pools": {"enable": True, "sometimes": 6.0}, "trainer__total_training_steps": 4,
    "trainer__test_freq": 0,
}  # fmt: skip


def by_number(item):
    """Of a question's number modulo 3: 0 is never right, 1 sometimes, 2 always."""
    return float(int(item.question.id.rpartition("/")[2]) % 3 > item.sample)


def run_of(setting, workspace, terminal=None, **sets):
    train(config(setting, "grpo", **SETS | sets), workspace, "grpo", *([terminal] if terminal else []))
    (run,) = Workspace(workspace).all_runs()
    return run


def state(run, step):
    path = run / f"checkpoints/step-{step:06d}/trainer/state.json"
    return json.loads(path.read_text())["pass_rates"]


def test_a_run_keeps_what_was_asked_and_shows_what_was_drawn(setting, workspace, monkeypatch):
    made_rewards(monkeypatch, by_number)
    run = run_of(setting, workspace)
    asked = dict[str, list[int]]()
    for step, (records, metrics) in sorted(trained(run).items()):
        names = dict.fromkeys(record.trajectory.question.id for record in records)
        drawn = Counter(pool_of(asked, name) for name in names)
        found = {name: metrics[f"train/drawn/{name}"] for name in POOLS}
        assert found == {name: drawn[name] / 2 for name in POOLS}
        asked |= {name: [step, int(name.rpartition("/")[2]) % 3, 2] for name in names}
        assert state(run, step) == asked


@pytest.mark.slow
def test_a_resumed_run_draws_and_learns_what_it_would_have(setting, tmp_path, monkeypatch):
    made_rewards(monkeypatch, by_number)
    whole, cut = (run_of(setting, tmp_path / name) for name in ("whole", "cut"))
    for step, path in checkpoints(cut).items():
        if step > 2:
            shutil.rmtree(path)
    resume(cut, workspace=Workspace(tmp_path / "cut"), terminal=Said())
    ids = [
        [item.trajectory.id for _, (records, _) in sorted(trained(run).items()) for item in records]
        for run in (whole, cut)
    ]
    assert ids[0] == ids[1]
    assert state(whole, 4) == state(cut, 4)
    weights = [(run / "checkpoints/step-000004/model.safetensors").read_bytes() for run in (whole, cut)]
    assert weights[0] == weights[1]


def test_pools_without_a_question_left_end_the_run_and_few_are_said_once(setting, workspace, monkeypatch):
    """Eight questions in batches of six: two are left for step 2, and none for step 3."""
    made_rewards(monkeypatch, lambda item: 1.0)
    said = Said()
    sets = {"data__pass_rate_pools": {"enable": True, "always": 0.0}, "data__train_batch_size": 6}
    with pytest.raises(
        UserError, match=r"pools .*run dry: step 3 asks 0 of 6 .*8 always \(share 0\).*"
    ) as caught:
        run_of(setting, workspace, said, **sets | {"actor__ppo_mini_batch_size": 6})
    (run,) = Workspace(workspace).all_runs()
    assert max(checkpoints(run)) == 2
    assert f"--config {run}/config.yaml --model {checkpoint_path(run, 2)} --set" in str(caught.value)
    assert said.text.count("run dry: step 2 asks 2 of 6 questions") == 1


def test_the_metric_may_be_a_part_of_the_reward_that_exists(setting, workspace):
    with pytest.raises(UserError, match=r"data.pass_rate_pools.metric = acc .*one of reward, em"):
        run_of(setting, workspace, data__pass_rate_pools={"enable": True, "metric": "acc"})


def test_groups_of_one_are_refused(setting):
    with pytest.raises(UserError, match=r"pass_rate_pools.enable.*rollout.n = 1.*set rollout.n=5"):
        config(setting, "grpo", **SETS | {"rollout__n": 1})
    with pytest.raises(UserError, match=r"unasked"):
        config(setting, "grpo", **SETS | {"data__pass_rate_pools": {"unasked": 0.0}})
