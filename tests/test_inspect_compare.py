"""`srl inspect diff`, `group` and `replay`: sides, flips, advantages and hits, by hand-computed numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.store_builder import BERN, KLEE, episode, new_log, question, record
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import srl.store
from srl.browse.diff import diff, read_side, sides
from srl.browse.groups import group, in_words, summary
from srl.browse.replay import as_rows, replay
from srl.browse.token_text import token_texts
from srl.cli import main
from srl.errors import UserError
from srl.evaluate.paired_tests import paired_test
from srl.index.retriever import Fault
from srl.store.prune import prune
from srl.trajectory import Hit

A, B = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"
RIGHT, WRONG = "Münchenbuchsee", "Bern"


def write(run, step, answers, phase="val", **changes):
    """A step that answers question 0 with the first of `answers`, and so on."""
    made = [episode(n, step=step, phase=phase, answer=answer) for n, answer in enumerate(answers)]
    for number, queries in changes.get("queries", {}).items():
        made[number].searches = [replace(made[number].searches[0], query=query) for query in queries]
    log = new_log(run)
    log.write(step, phase, [record(one) for one in made], {})


@pytest.fixture
def runs(workspace):
    write(workspace / "runs" / A, 1, [RIGHT, RIGHT, WRONG, WRONG, None])
    write(
        workspace / "runs" / A, 2, [RIGHT, WRONG, RIGHT, WRONG, RIGHT, RIGHT], queries={3: ["Klee", "Bern"]}
    )
    write(workspace / "runs" / B, 7, [RIGHT], "train")
    write(workspace / "runs" / B, 7, [WRONG, WRONG, WRONG], queries={0: ["PAINTER   0"]})
    return workspace / "runs"


def compared(runs, *asked, phase=None):
    with srl.store.open(runs) as log:
        return diff(log, *sides(log, asked, phase))


def test_questions_that_flipped_are_counted_and_the_falls_come_first(runs):
    found = compared(runs, (A, 1), (A, 2))
    assert (found.a.phase, found.questions, found.only_a, found.only_b) == ("val", 5, 0, 1)
    assert (found.em_a, found.em_b) == (0.4, 0.6)
    assert (found.worse[0], found.better[0], found.other_queries) == (1, 2, 1)
    assert found.test == paired_test([1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [(f"nq-{n}",) for n in range(5)])
    kinds = [(row["change"], row["question_id"], row["queries_changed"]) for row in found.changes]
    assert kinds == [
        ("right→wrong", "nq-1", False), ("wrong→right", "nq-2", False), ("wrong→right", "nq-4", False),
        ("same", "nq-3", True),
    ]  # fmt: skip
    assert (found.changes[0]["answer_a"], found.changes[0]["answer_b"]) == (RIGHT, WRONG)
    assert found.changes[3]["queries_b"] == ["Klee", "Bern"]


def test_without_a_step_it_is_the_last_one_of_a_phase_that_both_have(runs):
    found = compared(runs, (A, None), (B, None))
    assert [(side.phase, side.step) for side in (found.a, found.b)] == [("val", 2), ("val", 7)]
    assert (found.questions, found.only_a, found.em_b, found.other_queries) == (3, 3, 0.0, 0)


def test_without_a_step_it_is_the_last_one_that_is_not_pruned(runs):
    new_log(runs / A).close("interrupted")
    prune(runs / A / "log", {(2, "val")})
    found = compared(runs, (A, None), (B, None))
    assert [(side.phase, side.step) for side in (found.a, found.b)] == [("val", 1), ("val", 7)]
    with pytest.raises(UserError, match=r"no common phase at step 2; it has val steps 1$"):
        compared(runs, (A, 1), (A, 2))


def test_failed_episodes_count_as_wrong_and_samples_as_their_mean(tmp_path):
    for step, ends in ((1, (None, None)), (2, (None, "failed"))):
        made = [
            episode(0, step=step, phase="val", sample=n, answer=RIGHT, end=end) for n, end in enumerate(ends)
        ]
        new_log(tmp_path).write(step, "val", [record(one) for one in made], {})
    with srl.store.open(tmp_path) as log:
        found = diff(log, *sides(log, [(tmp_path.name, 1), (tmp_path.name, 2)]))
    assert (found.em_a, found.em_b, found.single) == (1.0, 0.5, False)
    assert [row["change"] for row in found.changes] == ["worse"]


@pytest.mark.parametrize(
    ("asked", "phase", "said"),
    [
        (((A, 1), (A, 1)), None, "both are val step 1"),
        (((A, 1), (B, 7)), "train", "no train at step 1; it has val steps 1, 2"),
        (((A, 9), (B, 7)), None, "no common phase at step 9"),
        (((A, 2), ("none", None)), None, "it has no trajectories"),
    ],
)
def test_sides_that_do_not_fit_are_said_with_what_there_is(runs, asked, phase, said):
    with pytest.raises(UserError, match=said):
        compared(runs, *asked, phase=phase)


def test_steps_without_a_common_question_are_an_error(tmp_path):
    log = new_log(tmp_path)
    for step in (1, 2):
        log.write(step, "train", [record(episode(step, step=step))], {})
    with srl.store.open(tmp_path) as connection, pytest.raises(UserError, match="--phase val"):
        diff(connection, *sides(connection, [(tmp_path.name, 1), (tmp_path.name, 2)]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("last", ("last", None)),
        ("00aa@3", ("00aa", 3)),
        ("@4", ("last", 4)),
        ("/home/alice@corp/runs/00aa", ("/home/alice@corp/runs/00aa", None)),
        ("/home/alice@corp/runs/00aa@3", ("/home/alice@corp/runs/00aa", 3)),
    ],
)
def test_a_side_is_a_run_or_a_run_at_a_step(text, found):
    assert read_side(text) == found


def test_a_side_that_is_a_path_has_no_step(tmp_path):
    run = tmp_path / "run@2"
    run.mkdir()
    assert read_side(str(run)) == (str(run), None)


@pytest.mark.parametrize("text", ["last@", "last@best", "last@-1", "last@²"])
def test_a_step_that_is_no_number_is_an_error(text):
    with pytest.raises(UserError, match="expected RUN or RUN@STEP"):
        read_side(text)


def test_diff_prints_both_sides_and_what_changed(runs, capsys):
    assert main(["inspect", "diff", "00aa@1", "00aa@2", "--queries"]) == 0
    out = capsys.readouterr().out
    assert f"A  {A} val step 1  EM 0.400" in out
    assert "wrong→right 2 (40.0%" in out
    assert "Münchenbuchsee → Bern" in out
    assert "painter 3 → Klee | Bern" in out
    assert main(["inspect", "diff", "00aa@1", "00aa@2", "--json", "-n", "1"]) == 0
    summary, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert (summary["better"], summary["worse"], summary["b"]["step"]) == (2, 1, 2)
    assert row["change"] == "right→wrong"


def test_a_set_from_few_documents_has_no_interval_and_the_others_have_one(tmp_path, capsys, monkeypatch):
    """50 questions of squad from 5 documents, 50 of nq and 50 of triviaqa with one each."""
    asked = [
        replace(
            question(number, document=str(number % 5)) if source == "squad" else question(number),
            id=f"{source}-{number}", data_source=source,
        )
        for source in ("nq", "squad", "triviaqa")
        for number in range(50)
    ]  # fmt: skip
    run = tmp_path / "runs" / A
    for step in (1, 2):
        made = [
            episode(step=step, phase="val", asked=one, answer=RIGHT if step == 2 and number % 2 else WRONG)
            for number, one in enumerate(asked)
        ]
        new_log(run).write(step, "val", [record(one) for one in made], {})
    found = compared(run, (A, 1), (A, 2))
    assert found.test.interval is None
    assert [(one.data_sources, one.questions, one.test.difference) for one in found.sets] == [
        (("nq",), 50, 0.5), (("squad",), 50, 0.5), (("triviaqa",), 50, 0.5), (("nq", "triviaqa"), 100, 0.5)
    ]  # fmt: skip
    assert [one.test.interval is None for one in found.sets] == [False, True, False, False]
    both = found.sets[-1].test.interval
    assert found.sets[0].test.interval.low < both.low < 0.5 < both.high < found.sets[0].test.interval.high
    monkeypatch.setenv("SRL_WORKSPACE", str(tmp_path))
    assert main(["inspect", "diff", "00aa@1", "00aa@2", "-n", "1"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("squad ")]
    assert line.split()[:5] == ["squad", "50", "0.000", "0.500", "+0.500"]
    assert line.endswith("none: too few documents")


def write_group(run, scores=(1.0, 0.0, 1.0), advantages=(0.5, -0.5, 0.5)):
    made = [episode(0, sample=n, answer=RIGHT if score else WRONG) for n, score in enumerate(scores)]
    records = [record(one, advantage=value) for one, value in zip(made, advantages, strict=True)]
    records.append(record(episode(1), advantage=9.0))
    new_log(run).write(1, "train", records, {})
    return [one.id for one in made]


def test_a_group_is_the_samples_of_one_question_with_their_advantages(tmp_path):
    ids = write_group(tmp_path)
    with srl.store.open(tmp_path) as log:
        found = [summary(one) for one in group(log, ids[1][:8])]
    assert [row["id"] for row in found] == ids
    assert [(row["advantage"], row["reward"], row["em"]) for row in found] == [
        (0.5, 1.125, 1.0), (-0.5, 0.125, 0.0), (0.5, 1.125, 1.0)
    ]  # fmt: skip
    assert found[0]["queries"] == ["painter 0"]
    assert in_words(found) == "reward 0.792, standard deviation 0.471, 3 samples"


ZERO = "; all advantages are 0, so it has no policy gradient"


@pytest.mark.parametrize(
    ("scores", "advantages", "said"),
    [
        ((1.0, 1.0), (0.0, 0.0), ZERO),
        ((1.0, 1.0), (0.5, -0.25), "; all rewards are equal"),
        ((1.0, 1.0), (None, None), "; all rewards are equal"),
        ((1.0, 0.0), (0.0, 0.0), ZERO),
        ((1.0, 0.0), (0.5, -0.5), ""),
        ((1.0,), (None,), ""),
    ],
)
def test_a_group_has_no_gradient_where_its_advantages_are_0_not_where_its_rewards_agree(
    tmp_path, scores, advantages, said
):
    """With rewards for turns, or a baseline that is not the group's, equal rewards have advantages."""
    ids = write_group(tmp_path, scores, advantages)
    with srl.store.open(tmp_path) as log:
        found = [summary(one) for one in group(log, ids[0])]
    assert in_words(found).partition(f", {len(scores)} samples")[2] == said


def test_group_is_printed_and_an_evaluation_has_no_advantage(workspace, capsys):
    ids = write_group(workspace / "runs" / A)
    new_log(workspace / "runs" / B).write(
        0, "eval", [record(episode(0, step=0, phase="eval"), advantage=None)], {}
    )
    assert main(["inspect", "group", ids[0]]) == 0
    assert "-0.500" in capsys.readouterr().out
    assert main(["inspect", "group", episode(0, step=0, phase="eval").id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advantage"] is None


class Other:
    """An index that finds Bern for everything, and fails on what it does not like."""

    def outcomes(self, queries, k):
        self.asked = (queries, k)
        return [Fault("failed", "too long") if query == "bad" else [Hit(BERN, 1.5)] for query in queries]


def test_a_replay_has_both_results_side_by_side():
    index, asked = Other(), question(golds=("Bern",))
    (found,) = replay(episode(passages=(KLEE, BERN), asked=asked), index)
    assert index.asked == (["painter 0"], 2)
    assert (found.gold, found.gold_now, found.common, found.hits_now) == (1, 1, 1, 1)
    first, second = as_rows([found], asked.golden_answers)
    assert (first["was_id"], first["was_gold"], first["id"], first["gold"]) == ("p1", False, "p2", True)
    assert (second["was_id"], second["was_gold"], second["id"], second["gold"]) == ("p2", True, None, None)


def test_what_cannot_be_replayed_is_an_error():
    with pytest.raises(UserError, match="has no search to replay"):
        replay(episode(passages=None), Other())
    trajectory = episode()
    trajectory.searches = [replace(trajectory.searches[0], query="bad")]
    with pytest.raises(UserError, match="no answer to 'bad'"):
        replay(trajectory, Other())


def test_tokens_have_their_mask_and_the_numbers_of_sampler_and_trainer(workspace, capsys):
    made = record(episode())
    mask = made.trajectory.response_mask
    made.trainer_logprobs, made.entropies = [-0.5 * bit for bit in mask], [1.5 * bit for bit in mask]
    new_log(workspace / "runs" / A).write(1, "train", [made], {})
    assert main(["inspect", "tokens", made.trajectory.id[:6], "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["token"] for row in rows] == made.trajectory.token_ids
    assert [row["mask"] for row in rows] == mask
    numbers = {(row["sampler"] is None, row["trainer"], row["entropy"], row["advantage"]) for row in rows}
    assert numbers == {(False, -0.5, 1.5, 0.5), (True, None, None, None)}
    assert main(["inspect", "tokens", made.trajectory.id]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["position", "turn", "kind", "mask", "token"]
    assert len(lines) == len(mask)


def test_tokens_have_the_pieces_that_they_wrote():
    letters = "".join(sorted(set("the key is Zx9QWv7Kt3")))
    tokenizer = Tokenizer(WordLevel({letter: place for place, letter in enumerate(letters)}, letters[0]))
    tokenizer.decoder = Fuse()
    text = "the key is Zx9QWv7Kt3"
    ids = [letters.index(letter) for letter in text]
    assert token_texts(tokenizer, ids, text) == list(text)
    tokenizer.add_special_tokens(["<end>"])
    assert token_texts(tokenizer, [*ids, len(letters)], text) == [*text, "<end>"]
    assert token_texts(tokenizer, [*ids, len(letters)], f"{text}<end>") == [*text, "<end>"]
    assert token_texts(tokenizer, [*ids, 0], text) is None
