"""One trajectory as `srl inspect show` tells it, its group, its tokens; nothing in it acts on a terminal."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.store_builder import episode, new_log, question, record, search
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import srl.store
from srl.answers import contains_answer
from srl.browse.groups import group_of, in_words, summary
from srl.browse.render import render
from srl.browse.token_text import token_rows, token_texts
from srl.browse.transcript import as_json, marked, transcript
from srl.store import Record

WORDS = st.sampled_from(["the", "Paul", "Klee", "St.", "John's", "yes", ",", "(", "Zürich", "1879"])


@given(st.lists(WORDS), st.lists(st.lists(WORDS, min_size=1), max_size=3))
def test_golden_answers_are_marked_where_they_stand(text, golds):
    body, answers = " ".join(text), [" ".join(gold) for gold in golds]
    pieces = list(marked(body, answers))
    assert "".join(piece for piece, _ in pieces) == body
    assert all(contains_answer(piece, answers) for piece, is_gold in pieces if is_gold)


def shown(path, made: Record, **console) -> str:
    new_log(path).write(1, "train", [made], {})
    stream = io.StringIO()
    with srl.store.open(path) as connection:
        options = {"width": 1000, "markup": False, "highlight": False, "emoji": False} | console
        render(Console(file=stream, **options), transcript(connection, made.trajectory.id[:6]))
    return stream.getvalue()


def test_a_transcript_has_question_gold_scores_texts_and_hits(tmp_path):
    made = record(episode())
    drawn = shown(tmp_path, made)
    for text in (
        made.trajectory.id, "where was painter 0 born?", "Münchenbuchsee", "0.125", "reader", "+0.500",
        "┃ <think>so</think> <answer> Bern </answer>", "┊ <information>Doc 1", "Paul Klee  p1  ← contains",
    ):  # fmt: skip
        assert text in drawn
    assert "advantage" not in shown(tmp_path / "again", Record(episode()))


def test_passages_that_were_not_shown_and_searches_that_failed_say_so(tmp_path):
    made = record(episode())
    hidden = replace(made.trajectory.searches[0], shown=1, cut="Paul Klee … 1879.", retriever="web")
    failed = search("q", status="timed_out", error="no answer in 10 s")
    made.trajectory.searches = [hidden, failed]
    drawn = shown(tmp_path, made)
    for text in ("p1  ← shown without", "p2  ← not shown", "by web", "timed_out", "no answer in 10 s"):
        assert text in drawn
    with srl.store.open(tmp_path) as connection:
        first, second = as_json(transcript(connection, made.trajectory.id))["search_results"]
    assert [hit["shown"] for hit in first["hits"]] == ["part", "none"]
    assert (first["cut"], first["retriever"], second["status"]) == ("Paul Klee … 1879.", "web", "timed_out")


def test_a_search_for_the_prompt_is_none_of_the_policys(tmp_path):
    """Also where it failed, so that there is no turn."""
    asked = replace(question(1), prompt=({"role": "user", "content": "{information} who?"},))
    made = [record(episode()), record(episode(1, asked=asked))]
    new_log(tmp_path).write(1, "train", made, {})
    with srl.store.open(tmp_path) as log:
        plain, retrieved = (transcript(log, one.trajectory.id).steps for one in made)
    assert [len(step.searches) for step in plain] == [0, 1, 0, 0]
    assert [len(step.searches) for step in retrieved] == [1, 0, 0, 0]


def write_group(run, scores=(1.0, 0.0, 1.0), advantages=(0.5, -0.5, 0.5)):
    """The ids of a group, beside which another question was asked."""
    made = [
        episode(0, sample=n, answer="Münchenbuchsee" if score else "Bern") for n, score in enumerate(scores)
    ]
    records = [record(one, advantage=value) for one, value in zip(made, advantages, strict=True)]
    new_log(run).write(1, "train", [*records, record(episode(1), advantage=9.0)], {})
    return [one.id for one in made]


def test_a_group_is_the_samples_of_one_question_with_their_advantages(tmp_path):
    ids = write_group(tmp_path)
    with srl.store.open(tmp_path) as log:
        samples = [summary(one) for one in group_of(log, ids[1][:8])]
    assert [row["id"] for row in samples] == ids
    numbers = [(row["advantage"], row["reward"], row["em"]) for row in samples]
    assert numbers == [(0.5, 1.125, 1.0), (-0.5, 0.125, 0.0), (0.5, 1.125, 1.0)]
    assert samples[0]["queries"] == ["painter 0"]
    assert "0.792, standard deviation 0.471" in in_words(samples)
    by_turn = {"lowest_advantage": 0.0, "highest_advantage": 0.5, "reward": 1.0}
    assert "advantages are 0" not in in_words([row | by_turn for row in samples])


@pytest.mark.parametrize(
    ("scores", "advantages", "text"),
    [((1.0, 1.0), (0.0, 0.0), "advantages are 0"), ((1.0, 1.0), (0.5, -0.25), "rewards are equal")],
)
def test_a_group_has_no_gradient_where_its_advantages_are_0(tmp_path, scores, advantages, text):
    """Not where its rewards agree: with rewards for turns, or another baseline, these have advantages."""
    ids = write_group(tmp_path, scores, advantages)
    with srl.store.open(tmp_path) as log:
        words = in_words([summary(one) for one in group_of(log, ids[0])])
    assert [each for each in ("advantages are 0", "rewards are equal") if each in words] == [text]


def test_tokens_have_their_mask_and_the_numbers_of_sampler_and_trainer(tmp_path):
    made = record(episode())
    mask = made.trajectory.response_mask
    made.trainer_logprobs, made.entropies = [-0.5 * bit for bit in mask], [1.5 * bit for bit in mask]
    new_log(tmp_path).write(1, "train", [made], {})
    with srl.store.open(tmp_path) as log:
        table = token_rows(transcript(log, made.trajectory.id), None)
    assert [row["token"] for row in table] == made.trajectory.token_ids
    assert [row["mask"] for row in table] == mask
    numbers = {(row["sampler"] is None, row["trainer"], row["entropy"], row["advantage"]) for row in table}
    assert numbers == {(False, -0.5, 1.5, 0.5), (True, None, None, None)}


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
