"""The episode: who wrote which token, when it ends, and what the budgets may cut."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.made_tokenizers import made_tokenizer
from tests.scripts import PAGE, QUESTION, RecordingEngine, TableSearch, play, rollout
from tests.tiny_models import byte_level_tokenizer

from srl.protocol import TEMPLATES, Template, render_passage, template
from srl.rollout.codec import Codec
from srl.rollout.episode import EpisodeOptions, PromptTooLongError
from srl.rollout.observation import fit_information
from srl.trajectory import Hit, Passage, Search

SEARCH = "<think>I search.</think><search>lighthouse</search>"
ANSWER = "<think>Now I know.</think><answer>Ossa Trell</answer>"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(byte_level_tokenizer())


def test_a_search_is_answered_and_the_answer_ends_the_episode(codec):
    search = TableSearch()
    trajectory = play(codec, [SEARCH, ANSWER], search)
    assert [segment.kind for segment in trajectory.segments] == ["prompt", "policy", "observation", "policy"]
    assert (trajectory.end, trajectory.answer) == ("answered", "Ossa Trell")
    assert search.queries == ["lighthouse"]
    assert trajectory.segments[2].text == (
        '\n\n<information>Doc 1(Title: "Velmar") The lighthouse of Velmar was built by Ossa Trell.'
        "</information>\n\n"
    )
    assert (trajectory.valid_actions, trajectory.valid_searches, trajectory.turns) == (2, 1, 2)


def test_the_context_of_each_turn_is_the_ids_before_it(codec):
    engine = RecordingEngine(codec, [SEARCH, "no tag", ANSWER])
    trajectory = play(codec, [], TableSearch(), engine=engine)
    ids, seen = trajectory.token_ids, 0
    for segment in trajectory.segments:
        if segment.is_policy:
            assert engine.contexts[segment.turn] == tuple(ids[:seen])
        seen += len(segment.token_ids)
    assert engine.finished == ["train/0/q/0/0/0"]


def test_the_mask_is_one_exactly_on_what_the_policy_wrote(codec):
    trajectory = play(codec, [SEARCH, "no tag", ANSWER], TableSearch())
    written = [token for segment in trajectory.segments if segment.is_policy for token in segment.token_ids]
    masked = [
        token for token, mask in zip(trajectory.token_ids, trajectory.response_mask, strict=True) if mask
    ]
    assert masked == written
    assert codec.decode(masked) == SEARCH + "no tag" + ANSWER


@pytest.mark.parametrize("kind", ["metaspace-first", "metaspace-always", "unigram-first", "legacy"])
def test_no_segment_gets_a_mark_of_the_tokenizers_own_in_front(kind):
    sentence_piece = Codec(made_tokenizer(kind))
    trajectory = play(sentence_piece, [SEARCH, "I do not know who built it.", ANSWER], TableSearch())
    assert len({segment.kind for segment in trajectory.segments}) == 4
    whole = sentence_piece.tokenizer.decode(trajectory.token_ids)
    assert whole == "".join(segment.text for segment in trajectory.segments)


def test_a_token_that_overhangs_the_tag_is_kept_whole_and_trained(codec):
    overhanging = "<search>lighthouse</search>."
    assert codec.tokenizer.tokenize(overhanging)[-1] != ">", "this vocabulary must merge past the tag"
    trajectory = play(codec, [overhanging, ANSWER], TableSearch())
    assert trajectory.segments[1].text == overhanging
    assert trajectory.segments[1].token_ids == tuple(codec.encode_text(overhanging))
    assert trajectory.searches[0].query == "lighthouse"


def test_max_turns_may_search_and_one_more_may_only_answer(codec):
    search = TableSearch()
    trajectory = play(codec, [SEARCH] * 3, search, options={"max_turns": 2})
    assert (len(search.queries), trajectory.turns, trajectory.end) == (2, 3, "unanswered")
    assert (trajectory.valid_searches, trajectory.valid_actions) == (2, 2)
    assert trajectory.segments[-1].is_policy


def test_without_turns_to_search_there_is_one_generation(codec):
    search = TableSearch()
    trajectory = play(codec, [SEARCH], search, options={"max_turns": 0})
    assert (search.queries, trajectory.turns, trajectory.end) == ([], 1, "unanswered")


def test_a_turn_without_an_action_gets_feedback_and_goes_on(codec):
    trajectory = play(codec, ["hm", "</search>", "<search>open", ANSWER], TableSearch())
    kinds = [segment.kind for segment in trajectory.segments]
    assert kinds == ["prompt", *["policy", "feedback"] * 3, "policy"]
    assert (trajectory.valid_actions, trajectory.end) == (1, "answered")


def test_an_empty_query_is_the_policys_own_fault(codec):
    trajectory = play(codec, ["<search> </search>", ANSWER], TableSearch())
    assert [segment.kind for segment in trajectory.segments][2] == "feedback"
    assert (trajectory.valid, trajectory.valid_searches) == (True, 0)
    assert trajectory.searches[0].status == "rejected"


def test_with_search_off_a_search_is_an_invalid_action(codec):
    trajectory = play(codec, [SEARCH, ANSWER], None, template=TEMPLATES["r1"])
    assert [segment.kind for segment in trajectory.segments][2] == "feedback"
    assert trajectory.searches == []
    assert (trajectory.valid_actions, trajectory.answer) == (1, "Ossa Trell")


def test_a_failed_search_is_not_a_wrong_answer(codec):
    search = TableSearch(outcomes=[Search("lighthouse", status="timed_out", error="30 s")])
    trajectory = play(codec, [SEARCH, ANSWER], search)
    assert (trajectory.end, trajectory.valid, trajectory.answer) == ("failed", False, None)
    assert trajectory.segments[-1].is_policy


def test_no_hits_are_said_aloud(codec):
    trajectory = play(codec, [SEARCH, ANSWER], TableSearch(passages=()))
    assert "<information>No results found.</information>" in trajectory.segments[2].text


def test_an_episode_never_ends_on_an_observation(codec):
    for room in range(1, 400, 7):
        trajectory = play(
            codec, [SEARCH, SEARCH, ANSWER], TableSearch([PAGE] * 3), options={"max_response_length": room}
        )
        assert trajectory.segments[-1].is_policy
        assert len(trajectory.token_ids) - len(trajectory.segments[0].token_ids) <= room


def test_an_observation_that_leaves_no_room_for_an_answer_ends_the_episode_before_it(codec):
    used = len(codec.encode_text(SEARCH))
    trajectory = play(
        codec,
        [SEARCH, ANSWER],
        TableSearch(),
        options={"max_response_length": used + 20, "min_answer_tokens": 16},
    )
    assert (trajectory.end, len(trajectory.searches), trajectory.turns) == ("truncated", 1, 1)


def test_a_cap_on_the_last_turn_truncates(codec):
    trajectory = play(codec, ["a word and another"], None, template=TEMPLATES["r1"],
                      options={"max_turns": 0, "max_turn_tokens": 3})  # fmt: skip
    assert trajectory.end == "truncated"
    assert len(trajectory.segments[-1].token_ids) == 3


def test_each_turn_may_use_what_is_left_and_no_more(codec):
    engine = RecordingEngine(codec, [SEARCH, ANSWER])
    play(
        codec, [], TableSearch(), engine=engine, options={"max_response_length": 240, "max_turn_tokens": 100}
    )
    first = len(codec.encode_text(SEARCH))
    observed = len(engine.contexts[1]) - len(engine.contexts[0]) - first
    assert [sampling.max_tokens for sampling in engine.samplings] == [100, min(100, 240 - first - observed)]


def test_a_prompt_that_does_not_fit_is_refused_and_never_cut(codec):
    with pytest.raises(PromptTooLongError, match=r"q/0.*max_prompt_length=20"):
        play(codec, [ANSWER], options={"max_prompt_length": 20})


def test_stop_at_answer_false_lets_the_policy_end_its_text(codec):
    engine = RecordingEngine(codec, [ANSWER])
    play(codec, [], engine=engine, options={"stop_at_answer": False})
    assert engine.samplings[0].stop == ("</search>",)


def test_an_observation_loses_whole_passages_before_any_is_cut(codec):
    hits = [
        Hit(Passage(str(number), f"Page {number}\nSome words of page {number}."), 1.0) for number in range(3)
    ]
    whole = fit_information(hits, 1000, codec)
    fitted = fit_information(hits, len(whole.token_ids) - 1, codec)
    assert [(each.shown, each.cut) for each in (whole, fitted)] == [(3, None), (2, None)]
    assert fitted.text.count("Doc ") == 2
    assert fitted.text.endswith("</information>\n\n")
    assert "words of page 1." in fitted.text


@given(words=st.lists(st.text(max_size=12), max_size=40), budget=st.integers(0, 120))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_an_observation_fits_its_budget_and_keeps_its_closing_tag(codec, words, budget):
    hit = Hit(Passage("1", "T\n" + " ".join(words)), 1.0)
    fitted = fit_information([hit], budget, codec)
    if fitted is None:
        assert budget < 60, "a stub of the observation fits in 60 tokens"
        return
    text, ids, shown, cut = fitted
    assert len(ids) <= budget
    assert ids == codec.encode_text(text)
    assert text.startswith("\n\n<information>")
    assert text.endswith("</information>\n\n")
    assert shown == int("Doc 1(Title: …" not in text and "Doc 1(Title: " in text)
    assert (cut is None) == (not shown or render_passage(1, hit).strip() in text)


def test_a_passage_of_which_only_the_label_has_room_is_not_shown(codec):
    hit = Hit(Passage("1", "Velmar\n" + "The flag is red. " * 20), 1.0)
    found = [each for budget in range(120) if (each := fit_information([hit], budget, codec)) is not None]
    stubs = [each for each in found if not each.shown]
    assert stubs == found[: len(stubs)], "more room shows more"
    assert {each.cut for each in stubs} == {None}
    assert not any("Velmar" in each.text or "flag" in each.text for each in stubs)
    assert all('Title: "V' in each.text or "Title: V" in each.text for each in found[len(stubs) :])


@given(words=st.lists(st.text("ab1 ", min_size=1, max_size=6), min_size=9, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_what_is_left_of_a_cut_passage_is_whole_words_of_it_that_were_shown(codec, words):
    hit = Hit(Passage("1", "T\n" + " ".join(words)), 1.0)
    fitted = fit_information([hit], 60, codec)
    assume(fitted is not None and fitted.cut is not None)
    head, _, tail = fitted.cut.partition("…")
    shown = fitted.text.split("<information>")[1].partition("…")
    assert shown[0].removeprefix("Doc 1(Title: ").strip().startswith(head.strip())
    assert shown[2].removesuffix("</information>\n\n").strip().endswith(tail.strip())
    whole = render_passage(1, hit).split()
    left = f"Doc 1(Title: {fitted.cut}".split("…")
    assert whole[: len(left[0].split())] == left[0].split()
    assert not left[1].split() or whole[-len(left[1].split()) :] == left[1].split()


def test_the_middle_of_a_long_passage_is_what_is_lost(codec):
    passage = Passage("1", "Title\n" + " ".join(f"word{number}" for number in range(200)))
    fitted = fit_information([Hit(passage, 1.0)], 100, codec)
    assert "word0" in fitted.text
    assert "199</information>" in fitted.text
    assert "word100" not in fitted.text
    assert fitted.cut.startswith("Title) word0 word1")
    assert fitted.cut.endswith(" word199")


def test_a_search_says_which_of_its_hits_reached_the_policy(codec):
    page = Passage("far", '"Far"\n' + "A long way off. " * 20)
    whole = len(fit_information([Hit(PAGE, 1.0)], 1000, codec).token_ids)
    for room, shown, part in ((1000, 2, False), (whole, 1, False), (whole - 1, 1, True)):
        options = {"max_obs_length": room}
        (search,) = play(codec, [SEARCH, ANSWER], TableSearch([PAGE, page]), options=options).searches
        assert (search.shown, search.cut is not None) == (shown, part)
    assert (search.shown_hits, search.shown_texts) == (search.hits[:1], (search.cut,))
    assert search.cut.startswith('"Velmar")')


def test_hits_that_leave_no_room_for_an_answer_were_not_shown(codec):
    used = len(codec.encode_text(SEARCH))
    options = {"max_response_length": used + 20, "min_answer_tokens": 16}
    (search,) = play(codec, [SEARCH, ANSWER], TableSearch(), options=options).searches
    assert (len(search.hits), search.shown_hits, search.shown_texts) == (1, (), ())


def test_an_episode_says_how_long_it_took_and_is_the_same_however_long(codec):
    first, second = (play(codec, [SEARCH, ANSWER], TableSearch()) for _ in range(2))
    assert first.seconds > 0
    assert first == second


def test_an_episode_whose_search_failed_is_sampled_again_once(codec):
    broken = Search("lighthouse", status="refused")
    for failures, end, attempt in ((1, "answered", 1), (2, "failed", 1)):
        search = TableSearch(outcomes=[broken] * failures)
        engine = RecordingEngine(codec, [SEARCH, ANSWER])
        (trajectory,) = asyncio.run(
            rollout([QUESTION], engine, search, codec=codec, template=TEMPLATES["search-r1"],
                    options=EpisodeOptions(max_turn_tokens=200))
        )  # fmt: skip
        assert (trajectory.end, trajectory.attempt) == (end, attempt)
    assert len({sampling.key for sampling in engine.samplings if sampling.key[-1] == 0}) == 2


def test_samples_of_a_question_lie_side_by_side_and_have_keys_of_their_own(codec):
    questions = [replace(QUESTION, id=f"q/{number}") for number in range(3)]
    engine = RecordingEngine(codec, [ANSWER])
    found = asyncio.run(
        rollout(questions, engine, None, codec=codec, template=TEMPLATES["r1"],
                options=EpisodeOptions(max_turn_tokens=200), n=2, seed=5, step=7)
    )  # fmt: skip
    assert [(item.question.id, item.sample) for item in found] == [
        (f"q/{number}", sample) for number in range(3) for sample in range(2)
    ]
    assert len({sampling.key for sampling in engine.samplings}) == 6
    assert all(sampling.key[:3] == (5, "train", 7) for sampling in engine.samplings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{question}", TEMPLATES["r1"].feedback),
        ("Read {information}. {question}", TEMPLATES["rag"].feedback),
        ("Use <search>. {question}", TEMPLATES["search-r1"].feedback),
    ],
)
def test_feedback_of_an_own_template_speaks_of_search_only_where_it_does(tmp_path, text, expected):
    (tmp_path / "mine.txt").write_text(text)
    assert template(str(tmp_path / "mine.txt")).feedback == expected


def test_a_template_that_opens_the_thought_is_noticed(codec):
    opening = Template("opening", "Question: {question}\n<think>", feedback="again")
    assert play(codec, [ANSWER], template=opening).think_is_open
    assert not play(codec, [ANSWER]).think_is_open


def test_evaluation_changes_the_sampling_alone():
    options = EpisodeOptions(max_turns=7, temperature=0.9, top_p=0.5)
    assert options.for_evaluation(0.0) == EpisodeOptions(max_turns=7, temperature=0.0, top_p=1.0)
