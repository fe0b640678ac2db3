"""Which watch fires on which course of metrics: made-up series, and properties of all watches."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.config import load_config
from srl.errors import UserError
from srl.store import LogWriter, RunInfo
from srl.train.watches import RULES, Watcher, how_to_start_again

CONFIG = load_config("tiny", None, "ppo").config
HEALTHY = {
    "actor/entropy": 0.3, "actor/ref_kl": 0.05, "rollout/logprob_diff/mean": 0.01,
    "actor/skipped_steps": 0.0, "critic/skipped_steps": 0.0, "env/number_of_valid_search": 1.5,
    "env/ratio_of_valid_action": 0.95, "env/repetition": 0.1, "env/equal_groups_share": 0.6, "train/em": 0.5,
    "val/em": 0.6,
}  # fmt: skip
BAD = {
    "entropy_low": {"actor/entropy": 0.0005},
    "kl": {"actor/ref_kl": 3.0},
    "sampler_mismatch": {"rollout/logprob_diff/mean": 0.4},
    "skipped_steps": {"critic/skipped_steps": 1.0},
    "searches_low": {"env/number_of_valid_search": 0.3},
    "valid_actions": {"env/ratio_of_valid_action": 0.5},
    "repetition": {"env/repetition": 0.8},
    "equal_groups": {"env/equal_groups_share": 1.0, "train/em": 0.02},
    "val_em": {"val/em": 0.3},
}
"""Metrics on which a watch fires, and no other, after healthy ones."""
names = st.sampled_from(sorted(RULES))


def seen(watcher, course, first=1):
    """What fires on a course of metrics, each of them a step with a validation."""
    found = []
    for step, metrics in enumerate(course, start=first):
        for phase in ("train", "val"):
            found += watcher.observe(step, phase, of_phase(metrics, phase))
    return found


def of_phase(metrics, phase):
    return {name: value for name, value in metrics.items() if name.startswith("val/") == (phase == "val")}


@given(st.lists(st.floats(0.97, 1.03), min_size=1, max_size=60))
def test_no_watch_fires_on_constant_metrics_with_some_noise(factors):
    course = [{name: value * factor for name, value in HEALTHY.items()} for factor in factors]
    assert seen(Watcher(CONFIG), course) == []


def test_one_odd_step_does_not_set_the_level():
    course = [{"env/number_of_valid_search": searches} for searches in (0.9, 3.0, 0.7, 0.7, 0.7, 0.7)]
    assert seen(Watcher(CONFIG), course) == []


@settings(max_examples=60)
@given(names, st.integers(1, 40))
def test_a_watch_fires_once_and_after_its_patience_when_a_metric_jumps(name, healthy):
    watcher = Watcher(CONFIG)
    course = [HEALTHY] * healthy + [HEALTHY | BAD[name]] * 60
    fired = seen(watcher, course)
    assert [one.watch for one in fired] == [name]
    assert fired[0].step == healthy + RULES[name].patience
    assert fired[0].since == healthy + 1


@given(names, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_a_number_is_beyond_every_bound(name, value):
    course = [HEALTHY] * 10 + [HEALTHY | dict.fromkeys(BAD[name], value)] * RULES[name].patience
    fired = [one for one in seen(Watcher(CONFIG), course) if one.watch == name]
    assert [one.value for one in fired] == [None]
    json.dumps(fired[0].value, allow_nan=False)


def test_a_watcher_that_looks_back_on_a_log_goes_on_the_same(tmp_path):
    """Also on numbers that are none."""
    odd = HEALTHY | {"actor/entropy": math.nan, "critic/skipped_steps": 1.0}
    course = [HEALTHY] * 6 + [HEALTHY | BAD["kl"]] * 4 + [odd] * 4
    whole, after = Watcher(CONFIG), Watcher(CONFIG)
    seen(whole, course)
    with LogWriter(tmp_path, RunInfo("run")) as log:
        for step, metrics in enumerate(course, start=1):
            for phase in ("train", "val"):
                log.write(step, phase, [], of_phase(metrics, phase))
    after.look_back(tmp_path)
    assert [one.watch for one in after.fired] == ["kl", "skipped_steps"]
    assert (after.rows(), after.courses) == (whole.rows(), whole.courses)
    (fired,) = seen(after, [odd], first=15)
    assert (fired.watch, fired.value) == ("entropy_low", None)


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param({"env/number_of_valid_search": 0.0}, id="never searched"),
        pytest.param({"env/equal_groups_share": 1.0, "train/em": 1.0}, id="groups that are right"),
    ],
)
def test_what_is_healthy_for_such_a_run_fires_nothing(metrics):
    assert seen(Watcher(CONFIG), [HEALTHY | metrics] * 20) == []


def test_actions_are_those_of_the_watch_or_of_all():
    sets = ["watch.actions={kl: off, val_em: stop}", "watch.thresholds.repetition=0"]
    chosen = load_config("tiny", None, "ppo", sets=sets).config
    assert [chosen.watch.does(name) for name in ("kl", "val_em", "entropy_low")] == ["off", "stop", "note"]
    assert [(fired.watch, fired.step) for fired in seen(Watcher(chosen), [HEALTHY] * 5)] == [
        ("repetition", 3)
    ]
    assert CONFIG.watch.does("skipped_steps") == "stop"
    off = load_config("tiny", None, "ppo", sets=["watch.action=off"]).config
    assert Watcher(off).courses == {}
    with pytest.raises(UserError):
        load_config("tiny", None, "ppo", sets=["watch.thresholds.entropy=1"])


def test_a_validation_that_falls_may_have_been_bad_since_the_last_good_one():
    watcher = Watcher(CONFIG)
    for step, em in {0: 0.5, 10: 0.7, 20: 0.52, 30: 0.5}.items():
        fired = watcher.observe(step, "val", {"val/em": em})
    assert [(one.step, one.since, one.value, one.bound) for one in fired] == [
        (30, 11, 0.5, pytest.approx(0.75 * 0.7))
    ]


@pytest.mark.parametrize(
    ("since", "val_em", "expected"),
    [
        (26, {10: 0.5, 20: 0.6}, 25), (25, {10: 0.5, 20: 0.6}, 20), (26, {10: 0.6, 20: 0.3}, 15),
        (26, {}, 25), (5, {}, None), (26, {0: 0.9, 10: 0.3}, 5), (16, {0: 0.4, 10: 0.35, 20: 0.6}, 15),
    ],
)  # fmt: skip
def test_the_last_good_checkpoint_is_before_the_onset_and_after_a_good_validation(
    tmp_path: Path, since, val_em, expected
):
    for step in (5, 10, 15, 20, 25, 30):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    command = how_to_start_again(tmp_path, CONFIG, val_em, since)
    assert (f"step-{expected or 0:06d}" in command) == (expected is not None)
    assert f"actor.optim.lr={CONFIG.actor.optim.lr / 2:.3g}" in command
