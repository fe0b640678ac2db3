"""One trajectory as `srl inspect show` tells it, and nothing in it that acts on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.store_builder import KLEE, episode, new_log, policy, question, record, search

import srl.store
from srl.browse.render import render
from srl.browse.transcript import Span, as_json, spans, transcript
from srl.store import Record
from srl.trajectory import Hit, Passage


def test_spans_follow_the_tags():
    text = "so <think>a</think> b <search> q </search><answer>x"
    assert [(span.kind, span.text) for span in spans(text)] == [
        ("other", "so "),
        ("thought", "<think>a</think>"),
        ("other", " b "),
        ("search", "<search> q </search>"),
        ("answer", "<answer>x"),
    ]


def test_spans_begin_in_a_thought_that_the_template_opened():
    found = spans("a</think> b", think_is_open=True)
    assert [(span.kind, span.text) for span in found] == [("thought", "a</think>"), ("other", " b")]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<search>", "</search>", "<answer>", "x", " "])),
    st.booleans(),
)
def test_spans_put_together_are_the_text(pieces, think_is_open):
    text = "".join(pieces)
    assert "".join(span.text for span in spans(text, think_is_open)) == text


SHOWN = """\
trajectory {id} of {run}, train step 1, sample 0
question   where was painter 0 born?  (nq, nq-0, 2 hops)
gold       Münchenbuchsee
answer     Bern
verdict    reader: a golden answer was in the passages shown
reward     0.125; parts before weights: em 0.000, format 1.000; f1 0.000
end        answered after 2 turns and 1 search; 9 of 19 tokens written by the policy

── prompt, 6 tokens, masked
┊ Question: where was painter 0 born?

── turn 1: policy, 5 tokens, advantage +0.500, return +0.500
┃ <think>who?</think> <search> painter 0 </search>

── search 1: painter 0 (ok, 2 passages, 12 ms, index d1ce)
   1.    10.000  Paul Klee  p1  ← contains a golden answer
   2.     9.000  Bern  p2

── turn 1: observation, 4 tokens, masked
┊ <information>Doc 1(Title: ...) ...</information>

── turn 2: policy, 4 tokens, advantage +0.500, return +0.500
┃ <think>so</think> <answer> Bern </answer>
"""


def shown(path, made: Record, tokens: bool = False, **console) -> str:
    new_log(path).write(1, "train", [made], {})
    stream = io.StringIO()
    with srl.store.open(path) as connection:
        options = {"width": 1000, "markup": False, "highlight": False, "emoji": False} | console
        render(Console(file=stream, **options), transcript(connection, made.trajectory.id[:6]), tokens)
    return stream.getvalue()


def test_transcript_reads_like_this(tmp_path):
    made = record(episode())
    assert shown(tmp_path, made) == SHOWN.format(id=made.trajectory.id, run=tmp_path.name)


def test_transcript_says_which_passages_were_not_shown(tmp_path):
    made = record(episode())
    made.trajectory.searches = [replace(made.trajectory.searches[0], shown=1, cut="Paul Klee … 1879.")]
    drawn = shown(tmp_path, made)
    assert (
        "   1.    10.000  Paul Klee  p1  ← shown without its middle\n"
        "   2.     9.000  Bern  p2  ← not shown: it did not fit\n" in drawn
    )
    with srl.store.open(tmp_path) as connection:
        (found,) = as_json(transcript(connection, made.trajectory.id))["search_results"]
    assert [hit["shown"] for hit in found["hits"]] == ["part", "none"]
    assert found["cut"] == "Paul Klee … 1879."


def test_transcript_with_tokens_shows_ids_mask_and_logprobs(tmp_path):
    drawn = shown(tmp_path, record(episode()), tokens=True)
    assert (
        "      id  mask    logprob  advantage     return\n     100     1     -0.250     +0.500     +0.500"
        in drawn
    )
    assert "┊ <information>Doc 1(Title: ...) ...</information>\n  mask 0, ids 0 1 2 3\n" in drawn


def test_transcript_without_advantages_or_score_says_nothing_of_them(tmp_path):
    drawn = shown(tmp_path, Record(episode()), tokens=True)
    assert "advantage" not in drawn
    assert "reward     (not scored); em 0.000, f1 0.000" in drawn


def test_transcript_marks_every_line_that_a_narrow_terminal_makes(tmp_path):
    made = record(episode())
    made.trajectory.segments[2] = replace(made.trajectory.segments[2], text="word " * 60 + "\n\nend")
    lines = shown(tmp_path, made, width=40).splitlines()
    assert sum(line.startswith("┊ word") for line in lines) == 9
    assert "┊ end" in lines
    assert all(len(line) <= 40 for line in lines if line.startswith(("┊", "┃")))


def test_failed_search_shows_its_error_and_attempts(tmp_path):
    trajectory = episode(answer=None, passages=None, end="failed")
    trajectory.segments = [policy("<search> q </search>", 0)]
    trajectory.searches = [search("q", status="timed_out", error="no answer in 10 s")]
    drawn = shown(tmp_path, record(trajectory))
    assert (
        "── search 1: q (timed_out, 0 passages, 12 ms, 3 attempts, index d1ce)\n   no answer in 10 s\n"
        in drawn
    )
    assert "verdict    failed search: infrastructure" in drawn


def test_a_search_by_a_named_retriever_says_which(tmp_path):
    asks = '<search engine="web"> q </search>'
    trajectory = episode(passages=None)
    trajectory.segments = [policy(f"<think>so</think> {asks}", 0), policy("<answer> Bern </answer>", 1)]
    trajectory.searches = [replace(search("q"), retriever="web")]
    assert "── search 1 by web: q (ok, 0 passages" in shown(tmp_path, record(trajectory))
    assert spans(f"so {asks}") == (Span("other", "so "), Span("search", asks))
    with srl.store.open(tmp_path) as connection:
        (found,) = as_json(transcript(connection, trajectory.id))["search_results"]
    assert found["retriever"] == "web"


EVIL = "[bold red]x[/] \x1b[31mred\x1b]0;title\x07 \u202egnp.exe \x9b2J \r\x08 \u2028 </answer>"


def evil_record() -> Record:
    """An episode in which everything that others wrote tries to act on the terminal."""
    made = record(episode(asked=replace(question(0, (EVIL,)), text=EVIL, data_source=EVIL)))
    trajectory = made.trajectory
    trajectory.answer = EVIL
    trajectory.segments = [replace(segment, text=segment.text + EVIL) for segment in trajectory.segments]
    hits = (Hit(Passage(EVIL, f'"{EVIL}"\n{EVIL}'), 1.0), Hit(KLEE, 0.5))
    trajectory.searches = [
        replace(trajectory.searches[0], query=EVIL, hits=hits, error=EVIL, index_digest=EVIL)
    ]
    return made


def test_text_of_others_does_not_act_on_the_terminal(tmp_path):
    drawn = shown(tmp_path, evil_record(), tokens=True, width=80)
    assert "[bold red]x[/]" in drawn
    assert set(drawn) & set("\x1b\x07\x9b\r\x08\u202e\u2028") == set()
    assert "\\x1b[31mred" in drawn
    coloured = shown(tmp_path / "again", evil_record(), width=80, force_terminal=True)
    assert "\x1b[31mred" not in coloured
    assert "\x1b]0;" not in coloured
    assert "\x1b[1;36m" in coloured or "\x1b[36m" in coloured
