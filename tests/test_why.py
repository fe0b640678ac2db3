"""`srl inspect why`: the cause of runs broken on purpose, nothing for sound ones, and the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.made_runs import BROKEN, RIGHT, SOUND, write_broken, write_sound
from tests.store_builder import episode, new_log, record, write_step

import srl.store
from srl.browse.falls import change_point, fall, noise, rise
from srl.browse.why import FEW, Chain, Counts, Diagnosis, Finding, causes_in_episodes, diagnose
from srl.browse.why_report import report
from srl.cli import main
from srl.errors import UserError

NOISY = [0.2, 0.8] * 8 + [0.3] * 3
RUN = "20250102T030405Z-tiny-grpo-s1-00aa"


def diagnosed(run) -> Diagnosis:
    with srl.store.open(run) as log:
        return diagnose(log, run.name)


def test_a_fall_is_found_where_two_levels_fit_best():
    values = [0.1, 0.3, 0.5, 0.6, 0.61, 0.6, 0.59, 0.6, 0.2, 0.21, 0.2, 0.2]
    found = fall(range(10, 22), values)
    assert (found.since, found.before[-1], found.after) == (18, 17, (18, 19, 20, 21))
    assert found.size == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(
    "values",
    [
        [0.5] * 7,
        [0.5, 0.4] * 8,
        [n / 10 for n in range(10)],
        [0.5] * 12 + [0.47] * 8,
        [0.2, 0.8] * 8 + [0.3] * 3,
    ],
    ids=["few", "noise", "rises", "little", "no more than noise"],
)
def test_no_fall_is_found_where_there_is_none(values):
    assert fall(range(len(values)), values) is None


def test_change_point_and_noise_by_hand():
    assert change_point([1, 1, 1, 5, 5]) == 3
    assert noise([0, 1, 0, 1, 0]) == pytest.approx(1 / 0.6745 / 2**0.5)
    assert rise([n / 10 for n in range(10)])
    assert not rise([0.5] * 10)


def test_the_chain_gives_the_exact_match_of_its_counts():
    counts = Counts(
        episodes=100, right=47, answered=90, searched=70, shown=50, right_shown=35, right_searched=42
    )
    chain = Chain.of(counts)
    assert (chain.answered, chain.shown, chain.read, chain.guessed) == (0.9, 50 / 70, 0.7, 7 / 20)
    assert chain.recalled == 5 / 20
    assert chain.em() == pytest.approx(counts.em)
    few = Chain.of(replace(counts, shown=3))
    assert few.read is None
    assert few.filled(chain).read == 0.7


def test_links_that_break_together_are_all_named():
    """Neither wins back much of the fall from .36 to .03 while the other is broken."""
    before = Counts(episodes=100, right=36, answered=100, searched=100, shown=60, right_shown=36,
                    right_searched=36, turns=200, valid_actions=200)  # fmt: skip
    after = Counts(episodes=100, right=3, answered=30, searched=30, shown=18, right_shown=3,
                   right_searched=3, turns=200, valid_actions=120)  # fmt: skip
    found = causes_in_episodes(before, after)
    assert {one.name for one in found} == {"reader", "format errors"}
    shares = [int(re.search(r"(\d+)% of the fall", one.evidence[0])[1]) for one in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1)


def test_failed_searches_are_named_though_the_episodes_that_are_left_get_better(tmp_path):
    write_broken(tmp_path / RUN, "failed searches")
    found = diagnosed(tmp_path / RUN)
    assert (found.cause.name, found.since) == ("failed searches", None)
    assert {row["verdict"] for row in found.examples} == {"failed search"}


@pytest.mark.parametrize(
    ("error", "other", "name", "said"),
    [
        ("reward 'x' gave no score: 1", "", "failed reward", "of these 1 failed search, 5 failed reward"),
        ("the server answers 500", "reward 'x' gave no score: 1", "failed engine",
         "of these 5 failed engine, 1 failed reward"),
        ("", "the server answers 500", "failed searches", "of these 5 failed search, 1 failed engine"),
    ],
)  # fmt: skip
def test_the_fault_that_most_failed_episodes_have_is_named(tmp_path, error, other, name, said):
    """Some have a right answer, whose verdict is `correct`."""
    log = new_log(tmp_path / RUN)
    for step in range(1, 9):
        made = [episode(number, step=step, answer=RIGHT if number % 2 else "Bern") for number in range(10)]
        if step > 5:
            for number, one in enumerate(made[:2]):
                one.end, one.error = "failed", other if (step, number) == (8, 0) else error
        log.write(step, "train", [record(one) for one in made], {})
    found = diagnosed(tmp_path / RUN)
    assert found.cause.name == name
    assert found.cause.evidence == ("20.0% of the last episodes failed; since step 6", said)
    assert {row["step"] for row in found.examples} == {7, 8}


@pytest.mark.parametrize(
    ("share", "which"), [(0.55, None), (0.6, "most groups"), (0.9, "nearly every group")]
)
def test_a_run_whose_groups_score_the_same_stands_still_for_want_of_a_gradient(tmp_path, share, which):
    log = new_log(tmp_path / RUN)
    for step in range(1, 9):
        write_step(log, step, size=FEW, **{"actor/no_gradient_share": share if step > 4 else 0.0})
    found = diagnosed(tmp_path / RUN)
    assert found.outcome.startswith("EM neither rose nor fell: ")
    if which is None:
        assert found.cause is None
    else:
        assert found.cause.name == "no gradient"
        assert which in found.cause.sentence
        assert f"no_gradient_share {share:.2f}" in found.cause.evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize("cause", sorted(BROKEN.keys() - {"stopped searching", "failed searches"}))
def test_the_cause_of_a_broken_run_is_named(tmp_path, cause):
    write_broken(tmp_path / RUN, cause)
    found = diagnosed(tmp_path / RUN)
    assert found.cause.name == cause
    assert 13 <= found.since <= 16
    assert found.examples


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOUND)
def test_nothing_is_blamed_in_a_sound_run(tmp_path, kind):
    write_sound(tmp_path / RUN, kind)
    found = diagnosed(tmp_path / RUN)
    assert (found.cause, found.others, found.since) == (None, (), None)


def test_a_short_run_is_said_to_be_short(tmp_path):
    log = new_log(tmp_path / RUN)
    write_step(log, 1)
    with pytest.raises(UserError, match="has 1 training steps"):
        diagnosed(tmp_path / RUN)


EVIL = "<script>x</script> | `a` \x1b[31m"


def made() -> Diagnosis:
    example = {"shows": "since", "id": "ab12", "step": 3, "em": 0.0, "reward": None, "searches": 1}
    example |= {"verdict": "reader", "answer": EVIL, "question": EVIL}
    watch = {"step": 3, "watch": "entropy", "metric": "actor/entropy", "value": None, "bound": 0.1}
    watch |= {"since": 2, "action": "note"}
    series = {"training EM": {1: 0.5, 2: float("nan"), 3: 0.1}, "validation EM": {1: 0.5, 3: 0.2}}
    cause = Finding("reader", "It reads badly.", ("read: 80% before",))
    return Diagnosis(RUN, "EM fell", 3, cause, (), series, (example,), (watch,))


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_a_report_has_all_parts_and_shows_hostile_text_as_text(form):
    found = report(made(), form)
    for part in ("Likeliest cause: reader", "It reads badly", "training EM", "entropy", "ab12"):
        assert part in found
    assert "\x1b" not in found
    assert "srl inspect diff" in found
    if form == "html":
        assert "<script" not in found
        assert "<svg" in found
        assert not re.search(r"(src|href)=", found)
    if form == "markdown":
        assert r"\<script\>x\</script\> \| \`a\`" in found


def test_why_writes_the_format_of_the_files_name(workspace, tmp_path, capsys):
    write_broken(workspace / "runs" / RUN, "stopped searching")
    assert main(["inspect", "why"]) == 0
    said = capsys.readouterr().out
    assert "Likeliest cause: stopped searching" in said
    assert "since step 14" in said
    assert main(["inspect", "why", "last", "-o", str(tmp_path / "why.html")]) == 0
    assert (tmp_path / "why.html").read_text().startswith("<!doctype html>")
    (tmp_path / "why.html").write_text("mine")
    assert main(["inspect", "why", "last", "-o", str(tmp_path / "why.html")]) == 2
    assert (tmp_path / "why.html").read_text() == "mine"
    assert main(["inspect", "why", "last", "-o", str(tmp_path / "why.html"), "--overwrite"]) == 0
    assert main(["inspect", "why", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cause"]["name"] == "stopped searching"
