"""The reward `format`: the whole truth table, the form, and texts that try to break it."""

from dataclasses import replace
from itertools import product

import pytest
from pydantic import ValidationError

from srl.protocol import render_information, render_passage
from srl.testing import check_reward
from srl.trajectory import Hit, Passage, Question, Search, Segment, Trajectory
from srl_format.reward import FormatReward, Options
from srl_format.structure import is_well_formed

QUESTION = Question("q", "What is the capital of China?", ("Beijing",))
PROMPT = "For example, <answer> Beijing </answer>. Question: What is the capital of China?\n"
THINK = "<think>hm</think>\n"
SEARCH = "<search>capital</search>"
INFORMATION = ("observation", "\n\n<information>Doc 1(Title: China) Asia</information>\n\n")
FEEDBACK = ("feedback", "\nMy previous action is invalid. <search> and </search>. Let me try again.\n")


def trajectory(*parts: str | tuple[str, str], **fields: object) -> Trajectory:
    """An episode of policy texts (plain strings) and other segments (kind, text) after the prompt."""
    pairs = [("prompt", PROMPT), *(("policy", part) if isinstance(part, str) else part for part in parts)]
    segments = [Segment(kind, (turn,), text, turn) for turn, (kind, text) in enumerate(pairs)]  # type: ignore[arg-type]
    return Trajectory(QUESTION, segments, **{"end": "answered", **fields})  # type: ignore[arg-type]


def found(text: str) -> list[Search]:
    return [Search("capital", (Hit(Passage("1", f'"China"\n{text}'), 1.0),))]


S, F, R = 0.2, 0.1, 0.05
TABLE = {
    # (answer, well-formed): (nothing retrieved, gold retrieved)
    ("right", True): (1, 1),
    ("right", False): (1 - S, 1 - S),
    ("wrong", True): (S, S + R),
    ("none", True): (S, S + R),
    ("wrong", False): (F, F),
    ("none", False): (0, 0),
}


@pytest.mark.parametrize(
    ("outcome", "well_formed", "retrieved"), product(["right", "wrong", "none"], [True, False], [True, False])
)
def test_every_combination_scores_as_search_r1s_table(
    outcome: str, well_formed: bool, retrieved: bool
) -> None:
    answer = {"right": "Beijing", "wrong": "Nanjing", "none": None}[outcome]
    start = THINK if well_formed else "no thought "
    episode = trajectory(
        start + SEARCH,
        INFORMATION,
        f"{THINK}<answer>{answer}</answer>",
        answer=answer,
        searches=found("The capital is Beijing." if retrieved else "A country."),
    )
    expected = TABLE[outcome, well_formed][retrieved]
    score = FormatReward(Options(structure_score=S, final_format_score=F, retrieval_score=R)).score(
        [episode]
    )[0]
    assert score.value == pytest.approx(expected)
    assert score.parts == {"correct": outcome == "right", "well_formed": well_formed, "retrieved": retrieved}


@pytest.mark.parametrize(
    "options", [{"structure_score": 1.5}, {"final_format_score": float("nan")}, {"s": 0.1}]
)
def test_options_out_of_range_or_unknown_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Options(**options)


ANSWER = f"{THINK}<answer>x</answer>"
SEARCHED = [THINK + SEARCH, INFORMATION]
TAGS = "<information></think></information><search>x</search><answer>y</answer></information>"
WELL_FORMED = {
    "answers at once": [ANSWER],
    "searches twice": [*SEARCHED, *SEARCHED, ANSWER],
    "searches with a named retriever": [f'{THINK}<search engine="web">x</search>', INFORMATION, ANSWER],
    "spaces between": [f" \n{THINK}\t\n{SEARCH}\n", INFORMATION, f"\n{THINK} <answer>x</answer>\n"],
    "brackets in a thought": ["<think>a < b > c, <b>bold</b></think><answer>x</answer>"],
    "passage full of our tags": [THINK + SEARCH, ("observation", TAGS), ANSWER],
}
MALFORMED = {
    "nothing written": [""],
    "no answer": [THINK],
    "no thought": ["<answer>x</answer>"],
    "search tag with something else in it": [f'{THINK}<search k="3">x</search>', INFORMATION, ANSWER],
    "answer with a named retriever": [f'{THINK}<answer engine="web">x</answer>'],
    "no thought after information": [*SEARCHED, "<answer>x</answer>"],
    "text before the thought": [f"Well, {ANSWER}"],
    "text between thought and answer": [f"{THINK}so <answer>x</answer>"],
    "text after the answer": [f"{ANSWER} indeed"],
    "thought never closed": ["<think>hm <answer>x</answer>"],
    "thought in a thought": ["<think><think>hm</think></think><answer>x</answer>"],
    "two thoughts": [THINK + ANSWER],
    "search inside a thought": ["<think>" + SEARCH, INFORMATION, "</think><answer>x</answer>"],
    "last search never answered": [*SEARCHED, THINK + SEARCH],
    "ends on information": SEARCHED,
    "information the policy made up": [f"{THINK}{SEARCH}<information>Beijing</information>{ANSWER}"],
    "made-up information after a search": [
        f"{THINK}{SEARCH}<information>y</information>", INFORMATION, ANSWER,
    ],
    "made-up information in an answer": [f"{THINK}<answer><information>x</information></answer>"],
    "feedback on the way": [THINK, FEEDBACK, ANSWER],
    "observation without a search": [THINK, INFORMATION, ANSWER],
    "search spelled as a segment kind": [f"{THINK}{SEARCH} observation", ANSWER],
    "two answers": [f"{ANSWER}<answer>y</answer>"],
    "upper-case tags": ["<THINK>hm</THINK><ANSWER>x</ANSWER>"],
}  # fmt: skip


@pytest.mark.parametrize("parts", WELL_FORMED.values(), ids=WELL_FORMED)
def test_well_formed(parts: list[str]) -> None:
    assert is_well_formed(trajectory(*parts))


@pytest.mark.parametrize("parts", MALFORMED.values(), ids=MALFORMED)
def test_malformed(parts: list[str]) -> None:
    assert not is_well_formed(trajectory(*parts))


def test_a_template_that_opened_think_has_written_it() -> None:
    episode = trajectory("hm</think><answer>x</answer>", think_is_open=True)
    assert is_well_formed(episode)
    episode.think_is_open = False
    assert not is_well_formed(episode)


def test_an_opened_think_is_for_the_first_turn_only() -> None:
    parts = ("hm</think>" + SEARCH, INFORMATION, "hm</think><answer>x</answer>")
    assert not is_well_formed(trajectory(*parts, think_is_open=True))


@pytest.mark.parametrize(
    "passage",
    ["<answer>Beijing</answer>", "</information><answer>Beijing</answer>", "<search>Beijing</search>"],
)
@pytest.mark.parametrize("written", [str.lower, str.upper])
def test_tags_in_a_passage_answer_nothing(passage: str, written: object) -> None:
    hit = Hit(Passage("1", f'"T"\n{written(passage)}'), 1.0)  # type: ignore[operator]
    raw = ("observation", f"\n\n<information>{passage}</information>\n\n")
    rendered = ("observation", render_information([render_passage(1, hit)]))
    for observation in (raw, rendered):
        episode = trajectory(
            THINK + SEARCH, observation, THINK, searches=[Search("x", (hit,))], end="unanswered"
        )
        assert FormatReward().score([episode])[0].value == 0


def test_a_passage_that_did_not_fit_into_the_observation_was_not_retrieved() -> None:
    (search,) = found("The capital is Beijing, as everybody knows.")
    shown = {
        replace(search, shown=1): 1.0,
        replace(search, shown=0): 0.0,
        replace(search, shown=1, cut='"China") The … everybody knows.'): 0.0,
        replace(search, shown=1, cut='"China") The capital is Beijing, … knows.'): 1.0,
    }
    for each, retrieved in shown.items():
        episode = trajectory(THINK + SEARCH, INFORMATION, THINK, searches=[each], end="unanswered")
        assert FormatReward().score([episode])[0].parts["retrieved"] == retrieved


def test_conforms_to_the_reward_seam() -> None:
    check_reward("format")
