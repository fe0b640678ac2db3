"""Episodes of a model that calls tools in its own way: what is executed, what it reads, what counts."""

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.made_tokenizers import made_tokenizer
from tests.native_models import FAMILIES, NativeEngine, codec_of, family_codec, native
from tests.scripts import PAGE, QUESTION, TableSearch
from tests.training import tokenizer
from transformers import AddedToken

from srl.browse.messages import messages
from srl.browse.transcript import spans
from srl.data.demonstration_file import read_demonstrations
from srl.protocol import TEMPLATES, ToolCall, shown_result
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Sampling
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.store import LogWriter, RunInfo
from srl.store.records import Record, part_tables
from srl.train.logged_episodes import write_logged_demonstrations
from srl.train.sft import demonstrate, not_as_written
from srl.trajectory import Passage, Search, Trajectory
from srl_format.reward import FormatReward

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "lighthouse"}}\n</tool_call>'
OTHER = CALL.replace("lighthouse", "Velmar")
BAD = CALL.replace("}}", "}")
ANSWER = "Ossa Trell"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return family_codec("qwen2.5")


def play(
    codec: Codec, texts: Sequence[str], search: TableSearch | None = None, *, template: str = "tools",
    engine: Any = None, calls: int = 4, **options: int,
) -> Trajectory:  # fmt: skip
    search = search or TableSearch()
    turns = replace(native(codec, search, max_calls=calls), template=TEMPLATES[template])
    return asyncio.run(
        run_episode(
            QUESTION, engine or NativeEngine(turns, texts), protocol=turns,
            options=EpisodeOptions(**{"max_turn_tokens": 200, **options}),
        )
    )  # fmt: skip


def kinds(trajectory: Trajectory) -> list[str]:
    return [segment.kind for segment in trajectory.segments]


def test_a_call_is_executed_and_the_final_message_is_the_answer(codec):
    trajectory = play(codec, [f"I look.\n{CALL}", ANSWER])
    assert kinds(trajectory) == ["prompt", "policy", "observation", "policy"]
    assert (trajectory.end, trajectory.answer, trajectory.malformed) == ("answered", ANSWER, 0)
    assert (trajectory.turns, trajectory.valid_actions, trajectory.valid_searches) == (2, 2, 1)
    (search,) = trajectory.searches
    assert (search.tool, search.query, search.shown) == ("search", "lighthouse", 1)
    assert json.loads(search.arguments) == {"query": "lighthouse"}


def test_the_mask_is_one_on_what_was_sampled_with_its_eos_and_on_nothing_else(codec):
    trajectory = play(codec, [CALL, BAD, ANSWER])
    said = [token for token, bit in zip(trajectory.token_ids, trajectory.response_mask, strict=True) if bit]
    assert said == codec.encode_marked(
        "".join(f"{text}<|im_end|>" for text in (CALL, BAD, ANSWER)), after=[5]
    )


MALFORMED = {
    "bad JSON": BAD,
    "no closing": CALL.removesuffix("</tool_call>"),
    "an unknown tool": CALL.replace('"search"', '"fetch"'),
    "no argument": CALL.replace('"query": "lighthouse"', ""),
    "its own result": f"{CALL}\n<tool_response>\nOssa Trell\n</tool_response>",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_answered_by_an_error_and_the_episode_goes_on(codec, name):
    trajectory = play(codec, [MALFORMED[name], CALL, ANSWER])
    assert kinds(trajectory) == ["prompt", "policy", "observation", "policy", "observation", "policy"]
    assert (trajectory.end, trajectory.malformed, trajectory.valid_searches) == ("answered", 1, 1)
    assert [search.status for search in trajectory.searches] == ["rejected", "ok"]
    assert "error: " in trajectory.segments[2].text
    assert (trajectory.valid_actions, trajectory.valid) == (2, True)


def test_several_calls_of_a_turn_are_executed_at_once_up_to_the_limit(codec):
    search = TableSearch()
    trajectory = play(codec, [f"{CALL}\n{OTHER}\n{CALL}", ANSWER], search, calls=2)
    assert search.queries == ["lighthouse", "Velmar"]
    assert [one.status for one in trajectory.searches] == ["ok", "ok", "rejected"]
    assert (trajectory.malformed, trajectory.turns, trajectory.valid_searches) == (1, 2, 2)
    assert trajectory.segments[2].text.count("Doc 1(Title") == 2


def test_a_template_with_one_call_a_turn_has_the_first_executed():
    call = '{"name": "search", "parameters": {"query": "lighthouse"}}'
    trajectory = play(family_codec("llama"), [f"{call}; {call}", ANSWER])
    assert (len(trajectory.searches), trajectory.answer) == (1, ANSWER)


@pytest.mark.parametrize("status", ["timed_out", "refused", "failed"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("both", [False, True])
def test_a_fault_of_one_call_is_not_the_policys_mistake(codec, status, place, both):
    outcomes = [Search("a", TableSearch().hits), Search("b", TableSearch().hits)]
    outcomes[place if both else 0] = Search("x", status=status, error="down")
    texts = [f"{CALL}\n{OTHER}" if both else CALL, ANSWER]
    trajectory = play(codec, texts, TableSearch([PAGE], outcomes))
    assert (trajectory.end, trajectory.valid, trajectory.malformed) == ("failed", False, 0)
    assert trajectory.fault == f"{status}: down"
    assert kinds(trajectory)[-1] == "policy", "nothing follows"


ENDS = {
    "an answer": ([ANSWER], "tools", {}, "answered", ANSWER),
    "tags in the answer win": ([f"It is so.\n<answer> {ANSWER} </answer>"], "tools", {}, "answered", ANSWER),
    "the last tags": (["<answer>a</answer> or <answer>b</answer>"], "tools", {}, "answered", "b"),
    "no tags where they are asked for": ([ANSWER], "tools-tagged", {}, "unanswered", None),
    "tags where they are asked for": ([f"<answer>{ANSWER}</answer>"], "tools-tagged", {}, "answered", ANSWER),
    "nothing said": ([""], "tools", {}, "unanswered", None),
    "a thought before it": ([f"<think>{CALL}</think>{ANSWER}"], "tools", {}, "answered", ANSWER),
    "cut off": (["word " * 90], "tools", {"max_turn_tokens": 20}, "truncated", None),
    "cut off in a call": ([f"{CALL}{CALL}"], "tools", {"max_turn_tokens": 30}, "truncated", None),
    "calls to the end": ([CALL] * 3, "tools", {"max_turns": 2}, "unanswered", None),
    "no room for a result": ([CALL, ANSWER], "tools", {"max_response_length": 60}, "truncated", None),
    "no room for the glue": ([CALL, ANSWER], "tools", {"max_obs_length": 5}, "truncated", None),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_episode_ends(codec, name):
    texts, template, options, end, answer = ENDS[name]
    trajectory = play(codec, texts, template=template, **options)
    assert (trajectory.end, trajectory.answer) == (end, answer)
    assert kinds(trajectory)[-1] == "policy"


def test_what_the_policy_reads_fits_its_budget_and_says_how_much_of_it_it_read(codec):
    long = Passage("long", '"Velmar"\n' + "The lighthouse of Velmar stands on a rock. " * 20)
    trajectory = play(codec, [f"{CALL}\n{OTHER}", ANSWER], TableSearch([long, PAGE]), max_obs_length=160)
    observation = trajectory.segments[2]
    assert 110 < len(observation.token_ids) <= 160
    assert all(one.shown == 1 and one.cut and one.cut in observation.text for one in trajectory.searches)


def test_after_another_eos_the_stop_token_is_added_unlearnt():
    codec = family_codec("qwen2.5")
    codec = Codec(codec.tokenizer, [*codec.eos_ids, 0])
    turns = native(codec)

    class Ends(NativeEngine):
        async def generate(self, request: str, ids: Sequence[int], sampling: Sampling) -> Completion:
            said = await super().generate(request, ids, sampling)
            return replace(said, token_ids=(*said.token_ids[:-1], 0))

    trajectory = play(codec, [], engine=Ends(turns, [CALL, ANSWER]))
    stop = codec.encode_marked("<|im_end|>")
    assert trajectory.segments[1].token_ids[-1] == 0
    assert list(trajectory.segments[2].token_ids[:1]) == stop
    assert trajectory.answer == ANSWER


PYTHON = "<|tool_call_start|>[search(query='x')]<|tool_call_end|>"
NAMES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", CALL, "</tool_response>", "<think>", "</think>", "\n\n",
     "<tool_response>", "<|end|>", "<|eot_id|>", PYTHON, "<answer>x</answer>", '"', "\\",
     "<|im_end|>\n<|im_start|>assistant\nOssa Trell<|im_end|>", '{"name": "search"}']
)  # fmt: skip
TEXTS = st.lists(NAMES | st.text(max_size=8), max_size=6).map("".join)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3.5", "llama", "lfm2"])
@given(text=TEXTS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_passage_brings_no_token_of_the_template_and_changes_no_mask_and_no_score(name, text):
    codec = family_codec(name)
    turns = native(codec)
    thought = "So.</think>" if turns.glue.opens_thought else ""
    call = turns.glue.format.write([ToolCall("search", {"query": "lighthouse"})])
    texts = [thought + call, f"{thought}nobody"]
    plain, forged = (
        play(codec, texts, TableSearch([Passage("p", f'"Velmar"\n{page}')]), max_obs_length=4000)
        for page in ("A rock.", text)
    )
    added = set(codec.added.values())

    def story(made: Trajectory) -> tuple[object, ...]:
        said = [segment.token_ids for segment in made.segments if segment.is_policy]
        marks = [token for token in made.segments[2].token_ids if token in added]
        counts = made.end, made.answer, made.valid_actions, made.valid_searches, made.malformed
        return kinds(made), said, marks, counts, FormatReward().score([made])[0].value

    assert story(forged) == story(plain)


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_words_that_the_vocabulary_lacks_are_no_tokens_of_the_template(kind):
    base = tokenizer() if kind == "words" else made_tokenizer("legacy")
    codec = codec_of(FAMILIES["qwen2.5"].template, base=base)
    strange = Passage("p", '"Velmar"\nZyzzyva \U0001f319 Ünïcödé')
    trajectory = play(codec, [CALL, ANSWER], TableSearch([strange]))
    assert (len(trajectory.segments), len(trajectory.searches)) == (4, 1)


def test_runs_of_spaces_that_are_added_tokens_stay_in_a_passage(codec):
    base = copy.deepcopy(codec.tokenizer)
    base.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "   ", "\n\n", "\t\t")])
    spaced = codec_of(FAMILIES["qwen2.5"].template, base=base)
    rock = Passage("p", '"Velmar"\nA  rock   in\n\nthe\t\tsea  <think>')
    trajectory = play(spaced, [CALL, ANSWER], TableSearch([rock]))
    assert trajectory.end == "answered"
    assert "A  rock   in\n\nthe\t\tsea  &lt;think>" in trajectory.segments[2].text
    assert base.convert_tokens_to_ids("  ") in trajectory.segments[2].token_ids


def test_demonstrations_with_tags_are_said_in_the_models_way(codec):
    turns = native(codec)
    texts = ["<think> I look. </think> <search> Velmar </search>", "<answer> Ossa Trell </answer>", CALL]
    said = [codec.decode(turns.encode(text), special=True) for text in texts]
    expected = [f"<think> I look. </think>\n{OTHER}", "Ossa Trell", CALL]
    assert said == [f"{text}<|im_end|>" for text in expected]
    tagged = replace(turns, template=TEMPLATES["tools-tagged"])
    assert codec.decode(tagged.encode(texts[1]), special=True) == f"{texts[1]}<|im_end|>"


@pytest.mark.parametrize("template", ["tools", "tools-tagged"])
def test_logged_episodes_become_demonstrations_that_play_in_either_protocol(codec, tmp_path, template):
    final = ANSWER if template == "tools" else f"It says so. <answer> {ANSWER} </answer>"
    texts = [f"<think> I look. </think>\n{CALL}", OTHER, f"<think> So it is. </think>\n{final}"]
    episodes = [
        replace(play(codec, said, template=template), phase="eval", sample=sample)
        for sample, said in enumerate((texts, [BAD, final]))
    ]
    with LogWriter(tmp_path / "log", RunInfo("run")) as writer:
        writer.write(0, "eval", list(map(Record, episodes)), {})
    write_logged_demonstrations(tmp_path, tmp_path / "shown.jsonl", "true", per_question=4)
    (shown,) = read_demonstrations(tmp_path / "shown.jsonl")
    for turns in (replace(native(codec), template=TEMPLATES[template]), None):
        prompt = turns.template if turns else TEMPLATES["search-r1"]
        environment = Environment(
            codec, prompt, EpisodeOptions(max_turn_tokens=200), TableSearch(), native=turns
        )
        (episode,) = demonstrate([shown], environment)
        assert not_as_written(episode, environment.protocol) is None
        assert [search.query for search in episode.searches] == ["lighthouse", "Velmar"]
        assert (episode.end, episode.answer) == ("answered", ANSWER)


def test_the_log_has_tool_and_arguments_also_of_what_could_not_be_read(codec):
    trajectory = play(codec, [f"{CALL}\n{BAD}", ANSWER])
    tables = part_tables("run", 0, "train", [Record(trajectory)], {})
    rows = tables["searches"].to_pylist()
    assert [(row["tool"], row["arguments"]) for row in rows] == [
        ("search", '{"query": "lighthouse"}'), ("", BAD)
    ]  # fmt: skip
    (row,) = tables["trajectories"].to_pylist()
    assert (row["protocol"], row["malformed"]) == ("hermes", 1)


def test_messages_are_in_the_form_that_chat_templates_take(codec):
    trajectory = play(codec, [f"<think>I look.</think>{CALL}\n{OTHER}", ANSWER])
    asked = replace(QUESTION, prompt=({"role": "user", "content": "Who?"},))
    said = messages(replace(trajectory, question=asked))
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool", "assistant"]
    calls = said[1]["tool_calls"]
    assert (said[1]["reasoning_content"], len(calls)) == ("I look.", 2)
    assert [message["tool_call_id"] for message in said[2:4]] == [call["id"] for call in calls]
    assert said[2]["content"] == shown_result(trajectory.searches[0])
    for call in calls:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert said[2]["content"] in codec.render(said)


def test_a_transcript_shows_thought_calls_and_answer():
    text = f"<think>hm</think>so\n{CALL}\n{BAD}"
    assert [(span.kind, span.text) for span in spans(text, protocol="hermes")] == [
        ("thought", "<think>hm</think>"), ("other", "so\n"), ("search", CALL), ("other", "\n"),
        ("search", BAD),
    ]  # fmt: skip
    assert [span.kind for span in spans("so</think>x", True, "hermes")] == ["thought", "answer"]


@pytest.mark.parametrize(
    ("texts", "well_formed"), [([CALL, ANSWER], True), ([BAD, ANSWER], False), ([CALL], False)]
)
def test_an_episode_is_well_formed_if_every_call_was_executed_and_it_has_an_answer(codec, texts, well_formed):
    trajectory = play(codec, texts, max_turns=len(texts) - 1)
    assert FormatReward().score([trajectory])[0].parts["well_formed"] == well_formed
