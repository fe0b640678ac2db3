"""`srl index diff`: overlap with ties, rank-biased overlap, paired tests, and the command."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl.cli import main
from srl.data.relevance import LabelledQuestions
from srl.errors import UserError
from srl.evaluate.index_diff import diff_indexes, measure_diff, overlap_at, rank_biased_overlap, ranking_diff
from srl.evaluate.intervals import difference_interval
from srl.evaluate.paired_tests import paired_p
from srl.index import Fault, build_index, open_index
from srl.trajectory import Hit, Passage, Question

pytest.importorskip("ir_measures")

PASSAGES = [
    Passage("p0", '"Running"\nshe runs and runs'),
    Passage("p1", '"Runner"\na runner is running on grass'),
    Passage("p2", '"Port"\nthe port of Genoa'),
    Passage("p3", '"Ports"\nports and more ports are in Italy'),
]
RANKINGS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


def scored(names: str, scores: str = "") -> list[tuple[str, float]]:
    """`"abc", "321"` as hits; without scores all differ."""
    given = scores or "987654321"[: len(names)]
    return [(name, float(score)) for name, score in zip(names, given, strict=True)]


def test_overlap_is_the_share_in_common():
    assert overlap_at(scored("abc"), scored("cde"), 3) == 1 / 3
    assert overlap_at(scored("abc"), scored("abc"), 3) == 1
    assert overlap_at(scored("abc"), scored("def"), 3) == 0
    assert overlap_at([], [], 3) == 1
    assert overlap_at(scored("ab"), [], 3) == 0
    assert overlap_at(scored("ab"), scored("abc"), 3) == 2 / 3


def test_passages_tied_at_the_cut_stand_in_for_each_other():
    a, b = scored("abcd", "3211"), scored("abdc", "3211")
    assert overlap_at(a, b, 3) == 1
    assert overlap_at(scored("abcd", "4321"), scored("abdc", "4321"), 3) == 2 / 3
    assert overlap_at(scored("abcd", "3211"), scored("abdc", "4321"), 3) == 1
    assert overlap_at(scored("abcd", "3211"), scored("abxy", "3211"), 3) == 2 / 3


def test_same_first_passage_takes_ties_into_account():
    assert ranking_diff("q", scored("ab", "11"), scored("ba", "11"), 1).same_first
    assert not ranking_diff("q", scored("ab", "21"), scored("ba", "21"), 1).same_first
    assert ranking_diff("q", [], [], 1).same_first
    assert not ranking_diff("q", scored("a"), [], 1).same_first


def test_rank_biased_overlap_of_equal_lists_is_1_at_any_length():
    hits = [str(number) for number in range(300)]
    assert {rank_biased_overlap(hits[:k], hits[:k]) <= 1 for k in range(1, 301)} == {True}
    assert rank_biased_overlap(hits, hits) == pytest.approx(1)


def test_rank_biased_overlap_is_that_computed_by_hand():
    assert rank_biased_overlap("ab", "ba", 0.5) == pytest.approx(0.5 * (0 + 0.5 * 1) + 0.25 * 1)
    assert rank_biased_overlap("abc", "abd", 0.9) == pytest.approx(
        0.1 * (1 + 0.9 + 0.81 * 2 / 3) + 0.729 * 2 / 3
    )
    assert rank_biased_overlap("", "") == 1
    assert rank_biased_overlap("a", "") == 0


@given(RANKINGS, RANKINGS, st.integers(1, 8))
def test_overlaps_are_shares_the_same_from_either_side(a, b, k):
    one, other = scored("".join(a)), scored("".join(b))
    for found in (overlap_at(one, other, k), rank_biased_overlap(a, b)):
        assert -1e-12 <= found <= 1 + 1e-12
    assert overlap_at(one, other, k) == overlap_at(other, one, k)
    assert rank_biased_overlap(a, b) == pytest.approx(rank_biased_overlap(b, a))
    assert overlap_at(one, one, k) == 1
    assert rank_biased_overlap(a, a) == pytest.approx(1)


def test_paired_test_counts_every_way_to_swap_signs():
    changes = [0.3, 0.1, 0.2, -0.1, 0.4]
    means = [
        abs(fmean(s * c for s, c in zip(signs, changes, strict=True))) for signs in product((1, -1), repeat=5)
    ]
    expected = fmean(mean >= fmean(changes) - 1e-12 for mean in means)
    assert paired_p(changes) == pytest.approx(expected)
    assert paired_p([0.0, *changes, 0.0]) == pytest.approx(expected)
    assert paired_p([0.0, 0.0]) == 1
    assert paired_p([0.2]) == 1


def test_paired_test_agrees_with_the_t_test_on_many_questions():
    from scipy.stats import ttest_1samp

    changes = [((n * 37) % 100 - 45) / 100 for n in range(300)]
    assert paired_p(changes) == pytest.approx(ttest_1samp(changes, 0).pvalue, abs=0.01)


def test_a_measure_is_compared_on_the_questions_both_were_measured_on():
    found = measure_diff({"a": 0.5, "b": 1.0, "only": 0.0}, {"a": 1.0, "b": 0.75})
    assert (found.a.mean, found.b.mean, found.change.mean) == (0.75, 0.875, 0.125)
    assert (found.better, found.worse) == (1, 1)
    assert (found.change.low, found.change.high) == difference_interval([0.5, -0.25])


def test_questions_that_did_not_change_leave_room_for_others_that_would():
    same = {str(number): 0.5 for number in range(20)}
    found = measure_diff(same, same)
    assert found.p == 1
    assert found.change.low == -found.change.high < -0.1


def test_questions_of_one_document_count_as_a_cluster():
    changes = {str(number): float(number < 8) for number in range(80)}
    nothing = dict.fromkeys(changes, 0.0)
    of_two = {name: "left" if int(name) < 40 else "right" for name in changes}
    alone, two = measure_diff(nothing, changes), measure_diff(nothing, changes, of_two)
    assert alone.p < 0.05
    assert two.p == 1
    assert two.change.mean == alone.change.mean == 0.1
    assert all(math.isnan(each.low) for each in (two.a, two.b, two.change))
    assert not math.isnan(alone.change.low)
    pairs = {name: str(int(name) // 2) for name in changes}
    assert measure_diff(nothing, changes, pairs).change.high > alone.change.high


def test_lists_shown_are_those_that_were_measured(tmp_path, monkeypatch, capsys):
    """A live retriever is asked once: another search may be paid for, refused, or find something else."""
    asked = []

    class Live:
        directory, live, passages, digest = Path("live"), True, None, "d" * 12
        manifest = SimpleNamespace(retriever="live", options={}, passages=0, corpus_digest="")

        def outcomes(self, queries, k):
            asked.append(k)
            return [[Hit(Passage("url", f"of {query}"), 1.0)] for query in queries]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("srl.index.open_index", lambda path: Live())
    Path("q.tsv").write_text("1\tports\n2\trunning\n")
    assert main(["index", "diff", "a", "b", "--questions", "q.tsv", "-k", "1"]) == 0
    assert asked == [100, 100]
    out = capsys.readouterr().out
    assert (out.count("[url] of ports"), out.count("[url] of running")) == (2, 2)


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    build_index(PASSAGES, "a", options={"stemmer": "none"})
    build_index(PASSAGES, "b")
    Path("q.tsv").write_text("1\tports\n2\trunning\n3\tgrass\n")
    Path("q.qrels").write_text("1 0 p2 1\n2 0 p1 1\n")
    return tmp_path


def test_it_says_what_is_in_common_which_is_better_and_where_they_differ(here, capsys):
    command = ["index", "diff", "a", "b", "--questions", "q.tsv", "--qrels", "q.qrels", "--show", "1"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out.startswith("A: a (bm25 k1=0.9 b=0.4 stopwords=english stemmer=none, 4 passages, ")
    assert "the same first passage" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("recall@10"))
    assert row[1:4] == ["0.5000", "1.0000", "+0.5000"]
    assert "(1: overlap 0.50, nDCG@10 0.000 in A and" in out
    assert "* [p2] Port: the port of Genoa" in out
    assert "(3: " not in out
    assert "without a relevant passage" in err


def test_json_has_both_lists_of_each_question_shown(here, capsys):
    assert main(["index", "diff", "a", "b", "--questions", "q.tsv", "--json", "-k", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["questions"], found["labels"], found["measures"]) == (3, None, {})
    first = found["most_different"][0]
    assert (first["id"], first["overlap"], first["a"]) == ("1", 0.5, ["p3"])
    assert set(first["b"]) == {"p2", "p3"}
    assert found["same_first"] == 3


def test_an_index_does_not_differ_from_itself(here, capsys):
    command = ["index", "diff", "a", "a", "--questions", "q.tsv", "--qrels", "q.qrels", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["overlap"]["mean"], found["same_passages"], found["notes"]) == (1, 3, [
        "1 questions left out: without a relevant passage"
    ])  # fmt: skip
    assert all(each["p"] == 1 and each["change"]["mean"] == 0 for each in found["measures"].values())


def test_other_passages_are_said_aloud(here, capsys):
    build_index([*PASSAGES[:2], Passage("p9", '"Port"\nanother port, ports')], "c")
    assert main(["index", "diff", "a", "c", "--questions", "q.tsv", "--show", "0"]) == 0
    err = capsys.readouterr().err
    assert "the corpora differ: passages are compared by their ids; 67% of what A finds is in B" in err
    judged = ["index", "diff", "a", "c", "--questions", "q.tsv", "--qrels", "q.qrels", "--show", "0"]
    assert main(judged) == 0
    assert "note: 1 of 2 relevant passages are not in B" in capsys.readouterr().err
    Path("q.qrels").write_text("1 0 elsewhere 1\n")
    assert main(judged) == 0
    out, err = capsys.readouterr()
    assert "none of the relevant passages is in either index: only the rankings are compared" in err
    assert "nDCG" not in out


def test_a_tie_that_reaches_past_the_cut_is_seen_whole(here):
    twins = [Passage(name, '"Twin"\nthe same words') for name in ("x", "y")]
    build_index(twins, "one")
    build_index(twins[::-1], "other")
    one, other = open_index("one"), open_index("other")
    assert [index.search(["words"], 1)[0][0].passage.id for index in (one, other)] == ["x", "y"]
    found = diff_indexes(one, other, LabelledQuestions([Question("q", "words", ())], {}), k=1)
    assert (found.overlap.mean, found.same_first) == (1, 1)


def test_failed_searches_are_left_out_and_said(here, monkeypatch):
    asked = [Question("1", "ports", ()), Question("2", "running", ())]
    one, other = open_index("a"), open_index("b")
    monkeypatch.setattr(
        other, "outcomes", lambda queries, k: [Fault("timed_out", "slow"), one.search(["x"], k)[0]]
    )
    found = diff_indexes(one, other, LabelledQuestions(asked, {}))
    assert list(found.differences) == ["2"]
    assert found.notes == ["1 searches of B failed, their questions are left out: slow"]
    monkeypatch.setattr(other, "outcomes", lambda queries, k: [Fault("timed_out", "slow")] * 2)
    with pytest.raises(UserError, match="nothing to compare: 2 searches of B failed"):
        diff_indexes(one, other, LabelledQuestions(asked, {}))
