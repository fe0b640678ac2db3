"""The engine behind a server with OpenAI's API: what it sends, what it makes of answers, and bad servers."""

import asyncio
import json

import httpx
import pytest
from tests.fake_openai import MODEL, Reply, completion, listing
from tests.scripts import QUESTION, TableSearch, rollout
from tests.tiny_models import byte_level_tokenizer

from srl.errors import UserError
from srl.protocol import STOP_STRINGS, TEMPLATES
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import EngineFault, Sampling
from srl.rollout.episode import EpisodeOptions
from srl.rollout.openai_engine import (
    FAILED_IN_A_ROW,
    OpenAiEngine,
    OpenAiServer,
    find_key,
    find_model,
    returns_ids,
)
from srl.trajectory import Question

CODEC = Codec(byte_level_tokenizer())
URL = "http://127.0.0.1:1/v1"


class Made:
    """An engine whose server gives `replies`, the last again and again; a reply may be an exception."""

    def __init__(self, *replies: Reply | Exception, ids: bool = False, codec: Codec = CODEC, **options):
        self.replies = list(replies)
        self.sent: list[dict] = []
        self.headers: list[httpx.Headers] = []
        self.waits: list[float] = []
        self.notes: list[str] = []
        self.server = OpenAiServer(
            **{"url": URL, "model": MODEL, "retries": 2, **options},
            transport=httpx.MockTransport(self.answer), sleep=self.sleep,
        )  # fmt: skip
        self.engine = OpenAiEngine(
            codec, self.server, token_ids=ids, max_model_len=2000, note=self.notes.append
        )

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.content or b"{}"))
        self.headers.append(request.headers)
        reply = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            return httpx.Response(200, content=reply())
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        return httpx.Response(reply.status, content=body, headers=reply.headers)

    def turn(self, text: str = "who built it", **sampling: object):
        ids = self.engine.codec.encode_text(text)
        asked = {"max_tokens": 40, "stop": STOP_STRINGS, **sampling}
        return asyncio.run(self.engine.generate("one", ids, Sampling(**asked)))

    def said(self) -> str:
        return self.engine.codec.decode(self.turn().token_ids)


def refused(message: str, status: int = 400) -> Reply:
    return Reply({"error": {"message": message, "type": "invalid_request_error"}}, status)


def with_ids(text: str, **choice: object) -> Reply:
    ids = CODEC.encode_text(text)
    return completion(text, **{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, **choice})


BUSY = Reply({"error": {"message": "slow down"}}, 429, {"Retry-After": "7"})
BROKEN = Reply(b"oops", 500)


def test_every_sampling_parameter_is_sent_since_servers_have_defaults_of_their_own():
    made = Made(with_ids("<answer>x</answer>"), ids=True)
    made.turn(temperature=0.7, top_p=0.9)
    assert made.sent == [{
        "model": MODEL, "max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "stop": list(STOP_STRINGS),
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "logprobs": 1,
        "prompt": CODEC.encode_text("who built it"),
    }]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "text", "reason"),
    [
        (completion("so <search>who", stop_reason="</search>"), "so <search>who</search>", "stop"),
        (completion("so <answer>x", matched_stop="</answer>"), "so <answer>x</answer>", "stop"),
        (completion('so <search engine="web">who'), 'so <search engine="web">who</search>', "stop"),
        (completion("<think>so</think><answer>x"), "<think>so</think><answer>x</answer>", "stop"),
        (completion("I give up", stop_reason=None), "I give up", "eos"),
        (completion("a <search> b", stop_reason=None), "a <search> b", "eos"),
        (completion("so <search>who", "length"), "so <search>who", "length"),
        (completion("<answer>x</answer> and on"), "<answer>x</answer>", "stop"),
        (completion(""), "", "eos"),
    ],
)  # fmt: skip
def test_stop_string_that_a_server_cut_off_is_put_back(reply, text, reason):
    turn = Made(reply).turn()
    assert (CODEC.decode(turn.token_ids), turn.stop_reason) == (text, reason)


def test_parameters_that_a_server_refuses_are_dropped_once_with_a_note():
    made = Made(
        refused("Unrecognized request arguments supplied: top_k, min_p"),
        refused("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        refused("Unsupported parameter: 'top_p' is not supported with this model."),
        completion("<answer>x</answer>"),
    )
    assert [made.said() for _ in range(2)] == ["<answer>x</answer>"] * 2
    assert len(made.sent) == 5
    for sent in made.sent[3:]:
        assert not {"top_k", "min_p", "max_tokens", "top_p"} & sent.keys()
        assert (sent["max_completion_tokens"], sent["repetition_penalty"]) == (40, 1.0)
        assert sent["stop"] == list(STOP_STRINGS)
    assert len(made.notes) == 4


@pytest.mark.parametrize(
    ("reply", "requests"),
    [
        (refused("Unsupported value: 'temperature' does not support 0 with this model."), 1),
        (refused("This model's maximum context length is 16 tokens; your max_tokens is too large"), 1),
        *((Reply(b"no\nno", status), 1) for status in (401, 404, 302)),
        (Reply(b"no\nno", 429), 3),
    ],
)
def test_what_no_other_try_mends_ends_the_run_in_one_line(reply, requests):
    made = Made(reply)
    with pytest.raises(UserError):
        made.turn(temperature=0.0)
    assert len(made.sent) == requests


def test_a_busy_server_is_asked_again_when_it_says():
    made = Made(BUSY, completion("x"))
    assert made.said() == "x"
    assert made.waits[0] >= 7.0


NO_TURN = {
    "garbage": (Reply(b"\xff\x00 not json"), 3),
    "deep": (Reply(b"[" * 200_000), 3),
    "large": (Reply(b" " * 300_000 + b"[]"), 3),
    "list": (Reply([1]), 1),
    "500": (BROKEN, 3),
    "no choices": (Reply({"model": MODEL, "choices": []}), 1),
    "no text": (Reply({"model": MODEL, "choices": [{"text": None}]}), 1),
    "aborted": (completion("", "abort"), 1),
    "no ids": (with_ids("x", token_ids=None), 1),
    "words as ids": (with_ids("x", token_ids=["x"]), 1),
    "ids below 0": (with_ids("x", token_ids=[-1]), 1),
    "ids beyond 32 bits": (with_ids("x", token_ids=[2**40]), 1),
    "too many ids": (with_ids("x" * 80), 1),
    "ids of another text": (with_ids("x", token_ids=CODEC.encode_text("y")), 1),
    "more log-probs than ids": (with_ids("who", logprobs={"token_logprobs": [0.0] * 30}), 1),
}


@pytest.mark.parametrize("name", NO_TURN)
def test_bad_answer_is_a_fault_of_the_turn_after_retries_where_they_may_help(name, monkeypatch):
    monkeypatch.setattr("srl.serve.http.MAX_ANSWER_BYTES", 250_000)
    reply, requests = NO_TURN[name]
    made = Made(reply, ids="ids" in name)
    with pytest.raises(EngineFault):
        made.turn()
    assert len(made.sent) == requests


async def drips():
    while True:
        yield b" "
        await asyncio.sleep(0)


LOST = [httpx.ConnectError("gone"), httpx.RemoteProtocolError("gone"), httpx.ReadTimeout("gone"), drips]


@pytest.mark.parametrize("lost", LOST, ids=["refused", "cut", "silent", "endless"])
def test_lost_connection_is_a_fault_after_retries_once_the_server_has_answered(lost):
    made = Made(completion("x"), lost, timeout_s=0.05)
    made.turn()
    with pytest.raises(EngineFault):
        made.turn()
    assert len(made.sent) == 4


@pytest.mark.parametrize("reply", [BROKEN, Reply({"model": MODEL, "choices": []})])
def test_a_server_that_fails_turn_after_turn_is_given_up(reply):
    last = FAILED_IN_A_ROW - 1
    made = Made(*[reply] * last, completion("x"), reply, retries=0)

    def fails(error):
        with pytest.raises(error):
            made.turn()

    for _ in range(last):
        fails(EngineFault)
    assert made.said() == "x", "the count starts anew"
    for _ in range(last):
        fails(EngineFault)
    fails(UserError)


def play(made: Made, *questions: Question):
    return asyncio.run(
        rollout(
            questions or [QUESTION], made.engine, TableSearch(), codec=made.engine.codec,
            template=TEMPLATES["search-r1"],
            options=EpisodeOptions(max_turn_tokens=200, max_response_length=900, temperature=0.0),
        )
    )  # fmt: skip


def test_episode_over_text_searches_and_answers():
    made = Made(completion("<search>lighthouse"), completion("<answer>Ossa Trell"))
    (trajectory,) = play(made)
    assert trajectory.answer == "Ossa Trell"
    assert [segment.kind for segment in trajectory.segments] == ["prompt", "policy", "observation", "policy"]
    assert made.sent[1]["prompt"].startswith(made.sent[0]["prompt"] + "<search>lighthouse</search>")
    assert "Ossa Trell" in made.sent[1]["prompt"]


def chat(text: str) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return Reply({"model": MODEL, "choices": [choice]})


def test_chat_api_gets_passages_as_messages_of_the_user():
    made = Made(chat("<search>lighthouse"), chat("<answer>Ossa Trell"), codec=TextCodec(), api="chat")
    (trajectory,) = play(made)
    assert trajectory.answer == "Ossa Trell"
    assert made.sent[1]["messages"] == [
        {"role": "user", "content": trajectory.segments[0].text},
        {"role": "assistant", "content": "<search>lighthouse</search>"},
        {"role": "user", "content": trajectory.segments[2].text},
    ]
    assert "prompt" not in made.sent[1]


def test_key_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-1")
    made = Made(Reply({"error": {"message": "bad key sk-very-secret-1"}}, 401), key=find_key(None))
    with pytest.raises(UserError) as caught:
        made.turn()
    assert made.headers[0]["Authorization"] == "Bearer sk-very-secret-1"
    assert "very-secret" not in str(caught.value) + caplog.text + repr(made.server)


GONE = Reply(b"gone", 404)


@pytest.mark.parametrize(
    ("replies", "model", "name"),
    [
        ([listing("a")], "", "a"),
        ([Reply([{"id": "a"}])], "", "a"),
        ([listing("a")], "b", "b"),
        ([GONE], "b", "b"),
        ([Reply(b"later", 503), BUSY, listing("a")], "", "a"),
        ([httpx.ConnectError("refused")], "a", None),
        ([Reply(b"no", 401)], "a", None),
        ([BUSY], "a", None),
        ([GONE], "", None),
        ([Reply({})], "", None),
        ([listing("a", "b")], "", None),
        ([listing("a", max_model_len=64)], "a", None),
    ],
)
def test_model_is_the_one_named_or_the_only_one_else_it_is_refused(replies, model, name):
    made = Made(*replies, model=model)
    if name is not None:
        assert asyncio.run(find_model(made.server, 2000)) == name
        return
    with pytest.raises(UserError) as caught:
        asyncio.run(find_model(made.server, 2000))
    assert URL in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [(with_ids("x"), True), (completion("x"), False), (refused("prompt must be a string", 422), False)],
)
def test_server_is_asked_whether_it_returns_ids(reply, answer):
    assert asyncio.run(returns_ids(Made(reply).server, CODEC)) is answer


@pytest.mark.parametrize("text", ["", "a", "abc", "Straße 是 👩‍🚀", "x" * 100])
def test_text_codec_loses_nothing(text):
    codec = TextCodec()
    ids = codec.encode_text(text)
    assert codec.decode(ids) == codec.spelled(ids) == text
    assert len(ids) == -(-len(text.encode()) // 3)


def test_ids_that_go_on_after_a_stop_string_end_at_the_token_that_completes_it():
    turn = Made(with_ids("<answer>x</answer>.\nand so on"), ids=True).turn()
    assert CODEC.decode(turn.token_ids[:-1]).count("</answer>") == 0
    assert "</answer>" in CODEC.decode(turn.token_ids)
    assert (len(turn.logprobs), turn.stop_reason) == (len(turn.token_ids), "stop")
