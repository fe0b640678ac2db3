"""The engine behind a server with OpenAI's API: what it sends, what it makes of answers, and bad servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from tests.fake_openai import MODEL, Reply, completion, listing
from tests.scripts import QUESTION, TableSearch
from tests.tiny_models import byte_level_tokenizer

from srl.errors import UserError
from srl.protocol import STOP_STRINGS, TEMPLATES
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import EngineFault, Sampling
from srl.rollout.episode import EpisodeOptions
from srl.rollout.many_episodes import rollout
from srl.rollout.openai_engine import (
    FAILED_IN_A_ROW,
    MAX_ANSWER_BYTES,
    OpenAiEngine,
    OpenAiServer,
    ServerOptions,
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
        self.now = 0.0
        self.server = OpenAiServer(
            ServerOptions(**{"url": URL, "model": MODEL, "retries": 2, **options}),
            httpx.MockTransport(self.answer), self.sleep, lambda: self.now,
        )  # fmt: skip
        self.engine = OpenAiEngine(
            codec, self.server, token_ids=ids, max_num_seqs=8, max_model_len=2000, note=self.notes.append
        )

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.content or b"{}"))
        self.headers.append(request.headers)
        reply = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
        return respond(reply(self.sent[-1]) if callable(reply) else reply)

    def turn(self, text: str = "who built it", name: str = "one", **sampling: object):
        ids = self.engine.codec.encode_text(text)
        asked = {"max_tokens": 40, "stop": STOP_STRINGS, **sampling}
        return asyncio.run(self.engine.generate(name, ids, Sampling(**asked)))

    def said(self, text: str = "who built it", **sampling: object) -> str:
        return self.engine.codec.decode(self.turn(text, **sampling).token_ids)


def respond(reply: Reply | Exception) -> httpx.Response:
    if isinstance(reply, Exception):
        raise reply
    body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    return httpx.Response(reply.status, content=body, headers=reply.headers)


def refused(message: str, status: int = 400) -> Reply:
    return Reply({"error": {"message": message, "type": "invalid_request_error"}}, status)


def sampled(text: str) -> dict:
    ids = CODEC.encode_text(text)
    return {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}


def with_ids(text: str, **choice: object) -> Reply:
    return completion(text, **{**sampled(text), **choice})


def test_every_sampling_parameter_is_sent_since_servers_have_defaults_of_their_own():
    made = Made(with_ids("<answer>x</answer>"), ids=True)
    made.turn(temperature=0.7, top_p=0.9)
    sent = made.sent[0]
    assert sent.pop("prompt") == CODEC.encode_text("who built it")
    assert sent == {
        "model": MODEL, "max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "stop": list(STOP_STRINGS),
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "include_stop_str_in_output": True,
        "no_stop_trim": True, "return_token_ids": True, "logprobs": 1,
    }  # fmt: skip


def test_text_is_sent_where_the_server_returns_no_ids():
    made = Made(completion("<answer>x</answer>"))
    assert made.said() == "<answer>x</answer>"
    assert made.sent[0]["prompt"] == "who built it"
    assert not {"return_token_ids", "logprobs"} & made.sent[0].keys()
    assert not made.engine.traits.token_ids


@pytest.mark.parametrize(
    ("reply", "text", "reason"),
    [
        (completion("so <search>who", stop_reason="</search>"), "so <search>who</search>", "stop"),
        (completion("so <answer>x", matched_stop="</answer>"), "so <answer>x</answer>", "stop"),
        (completion("<search>a</search> <answer>x"), "<search>a</search>", "stop"),
        (completion('so <search engine="web">who'), 'so <search engine="web">who</search>', "stop"),
        (completion("<think>so</think><answer>x"), "<think>so</think><answer>x</answer>", "stop"),
        (completion("I give up", stop_reason=None), "I give up", "eos"),
        (completion("a <search> b", stop_reason=None), "a <search> b", "eos"),
        (completion("I give up"), "I give up", "eos"),
        (completion("so <search>who", "length"), "so <search>who", "length"),
        (completion("<answer>x</answer> and on"), "<answer>x</answer>", "stop"),
        (completion(""), "", "eos"),
    ],
)  # fmt: skip
def test_stop_string_that_a_server_cut_off_is_put_back(reply, text, reason):
    made = Made(reply)
    found = made.turn()
    assert (CODEC.decode(found.token_ids), found.stop_reason) == (text, reason)


def test_server_that_ignores_stop_strings_is_cut_at_the_token_that_completes_one():
    text = "<answer>x</answer>.\nand so on"
    found = Made(with_ids(text), ids=True).turn()
    assert CODEC.decode(found.token_ids[:-1]).count("</answer>") == 0
    assert "</answer>" in CODEC.decode(found.token_ids)
    assert (len(found.logprobs), found.stop_reason) == (len(found.token_ids), "stop")


def test_parameters_that_a_server_refuses_are_dropped_once_with_a_note():
    made = Made(
        refused("Unrecognized request arguments supplied: top_k, no_stop_trim"),
        refused("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        completion("<answer>x</answer>"),
    )
    assert made.said() == "<answer>x</answer>"
    assert made.said() == "<answer>x</answer>"
    assert len(made.sent) == 4
    for sent in made.sent[2:]:
        assert not {"top_k", "no_stop_trim", "max_tokens"} & sent.keys()
        assert (sent["max_completion_tokens"], sent["min_p"], sent["stop"]) == (40, 0.0, list(STOP_STRINGS))
    named = [note.split()[5].rstrip(";") for note in made.notes]
    assert sorted(named) == ["max_tokens", "no_stop_trim", "top_k"]


def test_a_refusal_of_the_temperature_says_which_to_type():
    made = Made(refused("Unsupported value: 'temperature' does not support 0 with this model."))
    with pytest.raises(UserError, match=r"was asked for temperature = [\d.]+; type --temperature 1"):
        made.turn()
    assert len(made.sent) == 1


def test_a_refusal_that_names_no_parameter_ends_the_run():
    long = "This model's maximum context length is 16 tokens; your max_tokens is too large"
    made = Made(refused(long))
    with pytest.raises(UserError, match=r"context length is 16.*episode one has \d+ tokens") as caught:
        made.turn()
    assert "\n" not in str(caught.value)
    assert len(made.sent) == 1


def test_at_most_max_num_seqs_requests_are_under_way():
    made, running, most = Made(completion("x")), 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return respond(completion("x"))

    async def many() -> None:
        made.server._transport = httpx.MockTransport(answer)
        sampling = Sampling(max_tokens=4)
        await asyncio.gather(*(made.engine.generate(str(n), [5, 6], sampling) for n in range(30)))

    asyncio.run(many())
    assert most == made.engine.max_num_seqs == 8


def test_rate_limit_is_waited_for_by_everybody_and_forgotten():
    wait = Reply({"error": {"message": "slow down"}}, 429, {"Retry-After": "7"})
    made = Made(wait, completion("<answer>x</answer>"))
    assert made.said() == "<answer>x</answer>"
    assert sum(made.waits) >= 7
    made.waits.clear()
    assert made.said() == "<answer>x</answer>"
    assert made.waits == []
    assert made.server.used()["failed_requests"] == 1


def test_rate_limit_that_one_request_meets_holds_for_all():
    made = Made(Reply({"error": "slow down"}, 429, {"Retry-After": "7"}), completion("x"), retries=0)
    with pytest.raises(UserError, match="HTTP 429: slow down"):
        made.turn()
    made.turn()
    assert made.waits == [7.0]


def test_requests_per_minute_space_the_requests():
    made = Made(completion("<answer>x</answer>"), requests_per_minute=30)
    for _ in range(4):
        made.turn()
    assert made.waits == [2.0, 2.0, 2.0]


def test_429_for_ever_ends_the_run_with_what_to_set():
    made = Made(Reply({"error": {"message": "slow down"}}, 429, {"Retry-After": "7"}))
    with pytest.raises(UserError, match=r"HTTP 429: slow down; set rollout\.openai\.requests_per_minute"):
        made.turn()
    assert len(made.sent) == 3


def test_a_spent_quota_is_not_asked_again():
    long = "You exceeded your quota, " + "please check your plan and billing details, " * 5
    said = {"error": {"message": long, "code": "insufficient_quota"}}
    made = Made(Reply(said, 429))
    with pytest.raises(UserError, match=r"exceeded your quota.*pay the account up"):
        made.turn()
    assert len(made.sent) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply({"error": {"message": "no such key"}}, 401), "set the environment variable OPENAI_API_KEY"),
        (
            Reply({"error": {"message": "no model x"}}, 404),
            "check rollout.openai.url and rollout.op",
        ),
        (Reply(b"<html>", 302), "check rollout.openai.url"),
        (Reply({**completion("x").body, "model": "gpt-2"}), "set rollout.openai.model"),
        (Reply({**completion("x").body, "model": f"{MODEL}o"}), "set rollout.openai.model"),
        (Reply({**completion("x").body, "model": f"{MODEL}-mini-2026-01-01"}), "set rollout.openai.model"),
    ],
)
def test_what_no_retry_mends_ends_the_run_in_one_line_with_what_to_type(reply, message):
    made = Made(reply)
    with pytest.raises(UserError, match=message) as caught:
        made.turn()
    assert "\n" not in str(caught.value)
    assert len(made.sent) == 1


@pytest.mark.parametrize("date", ["-2026-01-01", "-0613"])
def test_dated_name_of_the_model_asked_for_is_that_model(date):
    made = Made(Reply({**completion("x").body, "model": f"{MODEL}{date}"}))
    assert made.said() == "x"


FAULTS = {
    "garbage": (Reply(b"\xff\x00 not json"), "the answer is not JSON", 3),
    "list": (Reply([1]), "not a JSON object", 3),
    "500": (Reply(b"oops", 500), "HTTP 500: oops", 3),
    "cut off": (httpx.RemoteProtocolError("peer closed connection"), "peer closed connection", 3),
    "no connection": (httpx.ConnectError("refused"), "no connection", 3),
    "no choices": (Reply({"model": MODEL, "choices": []}), "no completion", 1),
    "no text": (Reply({"model": MODEL, "choices": [{"text": None}]}), "no text", 1),
    "aborted": (completion("", "abort"), "no completion", 1),
}
OTHER_IDS = {
    "none": (with_ids("x", token_ids=None), "no token ids came back"),
    "words": (with_ids("x", token_ids=["x"]), "no token ids came back"),
    "too many": (with_ids("x" * 80), "80 token ids came back, at most 40"),
    "echo of a number": (with_ids("x", prompt_token_ids=5), "after other token ids than those it was"),
    "echo": (with_ids("x", prompt_token_ids=[1, 2]), "after other token ids than those it was given"),
    "text": (completion("Ossa", **sampled("x")), "set model.tokenizer"),
    "endless": (with_ids("x", token_ids=[10**40]), "no token ids came back"),
    "endless log-prob": (with_ids("x", logprobs={"token_logprobs": [-(10**400)]}), "0 log-probs came back"),
    "beyond": (with_ids("x", token_ids=[10**9]), "set model.tokenizer"),
    "log-probs": (with_ids("who", logprobs={"token_logprobs": [0.0] * 30}), "30 log-probs came back"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_answer_is_a_fault_of_the_turn_after_retries_where_they_may_help(name):
    reply, message, requests = FAULTS[name]
    made = Made(reply)
    with pytest.raises(EngineFault, match=message) as caught:
        made.turn()
    assert "\n" not in str(caught.value)
    assert len(made.sent) == requests


@pytest.mark.parametrize("body", [b"a." * 30_000 + b"://", b'{"error": "' + b"://@" * 20_000 + b'"}'])
def test_a_large_body_of_an_error_is_read_at_its_beginning(body):
    with pytest.raises(EngineFault) as caught:
        Made(Reply(body, 500)).turn()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", OTHER_IDS)
def test_other_ids_than_asked_are_a_fault_of_the_turn(name):
    reply, message = OTHER_IDS[name]
    with pytest.raises(EngineFault, match=message):
        Made(reply, ids=True).turn()


def test_a_fault_that_passes_costs_nothing_but_a_wait():
    made = Made(Reply(b"oops", 500), Reply(b"{", 200), completion("<answer>x</answer>"))
    assert made.said() == "<answer>x</answer>"
    assert len(made.waits) == 2


def test_a_dead_server_is_given_up():
    made = Made(Reply(b"oops", 500), retries=0)
    for _ in range(FAILED_IN_A_ROW - 1):
        with pytest.raises(EngineFault):
            made.turn()
    with pytest.raises(
        UserError, match=rf"{FAILED_IN_A_ROW} requests in a row failed.*HTTP 500.*look at what"
    ):
        made.turn()


def test_a_server_that_answers_without_completions_is_given_up():
    made = Made(Reply({"model": MODEL, "choices": []}))
    for _ in range(FAILED_IN_A_ROW - 1):
        with pytest.raises(EngineFault):
            made.turn()
    with pytest.raises(
        UserError, match=rf"{FAILED_IN_A_ROW} requests in a row failed.*no completion.*look at what"
    ):
        made.turn()


def test_a_turn_that_succeeds_starts_the_count_of_failed_turns_anew():
    made = Made(
        *[Reply(b"oops", 500)] * (FAILED_IN_A_ROW - 1), completion("x"), Reply(b"oops", 500), retries=0
    )
    for _ in range(FAILED_IN_A_ROW - 1):
        with pytest.raises(EngineFault):
            made.turn()
    assert made.said() == "x"
    with pytest.raises(EngineFault):
        made.turn()


def test_failed_requests_warn_once_for_each_status_and_not_beside_the_error_that_they_end_with(caplog):
    made = Made(*[Reply(b"oops", 500)] * 3, Reply(b"later", 503), completion("x"), retries=5)
    assert made.said() == "x"
    assert [record.getMessage() for record in caplog.records] == [
        f"{URL}: HTTP 500: oops", f"{URL}: HTTP 503: later"
    ]  # fmt: skip
    caplog.clear()
    with pytest.raises(UserError, match="HTTP 401"):
        Made(Reply(b"no", 401)).turn()
    assert not caplog.records


def play(made: Made, *questions: Question):
    return asyncio.run(
        rollout(
            questions or [QUESTION], made.engine, TableSearch(), codec=made.engine.codec,
            template=TEMPLATES["search-r1"],
            options=EpisodeOptions(max_turn_tokens=200, max_response_length=900, temperature=0.0),
        )
    )  # fmt: skip


def test_episode_whose_engine_failed_is_sampled_again_once_and_then_failed():
    made = Made(Reply(b"oops", 500), retries=0)
    (trajectory,) = play(made)
    assert (trajectory.end, trajectory.valid, trajectory.attempt) == ("failed", False, 1)
    assert "HTTP 500: oops" in trajectory.error
    assert len(made.sent) == 2
    made = Made(Reply(b"oops", 500), completion("<answer>Ossa Trell"), retries=0)
    (trajectory,) = play(made)
    assert (trajectory.end, trajectory.answer, trajectory.attempt) == ("answered", "Ossa Trell", 1)


def test_other_episodes_go_on_when_one_fails():

    def answer(body: dict) -> Reply:
        return Reply(b"oops", 500) if "Quillon" in body["prompt"] else completion("<answer>Ossa Trell")

    other = replace(QUESTION, id="q/1", text="Who built Quillon?")
    ends = [trajectory.end for trajectory in play(Made(answer), QUESTION, other, QUESTION)]
    assert ends == ["answered", "failed", "answered"]


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
    messages = made.sent[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == trajectory.segments[0].text
    assert messages[1]["content"] == "<search>lighthouse</search>"
    assert messages[2]["content"] == trajectory.segments[2].text
    assert "prompt" not in made.sent[1]


def test_chat_content_in_parts_is_their_text():
    parts = [{"type": "text", "text": "<answer>Ossa "}, {"type": "image_url"}, {"text": "Trell</answer>"}]
    choice = {"index": 0, "message": {"role": "assistant", "content": parts}, "finish_reason": "stop"}
    made = Made(Reply({"model": MODEL, "choices": [choice]}), codec=TextCodec(), api="chat")
    assert play(made)[0].answer == "Ossa Trell"


def test_tokens_and_cost_are_counted():
    made = Made(completion("x"), price_in=2.0, price_out=10.0)
    made.turn()
    made.turn()
    assert made.server.used() == {
        "requests": 2, "failed_requests": 0, "prompt_tokens": 20, "completion_tokens": 10,
        "cost": pytest.approx((20 * 2 + 10 * 10) / 1e6),
    }  # fmt: skip
    assert "cost" not in Made(completion("x")).server.used()


@pytest.mark.parametrize("tokens", [-5, True, "7", None, 10**400])
def test_usage_that_is_no_count_of_tokens_is_left_out(tokens):
    made = Made(Reply({**completion("x").body, "usage": {"prompt_tokens": tokens, "completion_tokens": 5}}))
    made.turn()
    assert made.server.used()["prompt_tokens"] == 0
    assert made.server.used()["completion_tokens"] == 5


def test_key_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-1")
    refusal = Reply({"error": {"message": "bad key sk-very-secret-1"}}, 401)
    made = Made(refusal, key=find_key("OPENAI_API_KEY")["key"])
    with pytest.raises(UserError) as caught:
        made.turn()
    assert made.headers[0]["Authorization"] == "Bearer sk-very-secret-1"
    assert "very-secret" not in str(caught.value) + caplog.text + repr(made.server.options)


@pytest.mark.parametrize(
    ("reply", "model", "message"),
    [
        (httpx.ConnectError("refused"), "", "no connection.*start the server"),
        (Reply(b"no", 401), "", "HTTP 401: no; set the environment variable OPENAI_API_KEY"),
        (
            listing("a", "b"),
            "",
            r"several models \(a, b\); name one with --set rollout\.openai\.model=NAME",
        ),
        (
            Reply(b"gone", 404),
            "",
            r"does not list its models \(HTTP 404: gone\): correct rollout.openai.url,",
        ),
        (
            Reply(b"oops", 500),
            "",
            r"does not list its models \(HTTP 500: oops\): correct rollout.openai.url,",
        ),
        (Reply({}), "", "does not list its models; name one with"),
        (Reply(b"", 302), "", r"HTTP 302(?!:)"),
        (Reply(b"later", 503), "a", "HTTP 503: later; try again later"),
        (Reply(b" " * (MAX_ANSWER_BYTES + 1)), "a", "the answer is larger than 67,108,864 bytes; start the"),
        (listing("a", max_model_len=64), "a", "the server's context is 64 tokens"),
    ],
)
def test_server_that_does_not_fit_is_refused_before_anything_is_loaded(reply, model, message):
    transport = httpx.MockTransport(lambda request: respond(reply))
    with pytest.raises(UserError, match=message):
        asyncio.run(find_model(ServerOptions(URL, model, retries=0), 2000, transport))


def test_server_that_is_busy_at_the_start_is_asked_again():
    made = Made(Reply(b"later", 503), Reply(b"slow", 429), listing("a"))
    found = asyncio.run(made.server.ask_at_start("GET", "models"))
    assert (found.answer, len(made.waits)) == (listing("a").body, 2)


def test_server_that_is_busy_is_not_taken_for_one_without_token_ids():
    transport = httpx.MockTransport(lambda request: respond(Reply(b"later", 503)))
    with pytest.raises(UserError, match="HTTP 503"):
        asyncio.run(returns_ids(ServerOptions(URL, MODEL, retries=0), CODEC, transport))


@pytest.mark.parametrize(
    ("reply", "model", "found"),
    [(listing("a"), "", "a"), (listing("a"), "b", "b"), (Reply(b"", 404), "b", "b")],
)
def test_model_is_the_one_named_or_the_only_one(reply, model, found):
    transport = httpx.MockTransport(lambda request: respond(reply))
    assert asyncio.run(find_model(ServerOptions(URL, model), 2000, transport)) == found


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (with_ids("x"), True),
        (completion("x"), False),
        (refused("prompt must be a string", 422), False),
        (Reply(b"oops", 500), False),
    ],
)
def test_server_is_asked_whether_it_returns_ids(reply, found):
    transport = httpx.MockTransport(lambda request: respond(reply))
    assert asyncio.run(returns_ids(ServerOptions(URL, MODEL), CODEC, transport)) is found


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "who built it?", "Straße 是 👩‍🚀", "x" * 100])
def test_text_codec_loses_nothing(text):
    codec = TextCodec()
    ids = codec.encode_text(text)
    assert codec.decode(ids) == codec.spelled(ids) == text
    assert len(ids) == -(-len(text.encode()) // 3)
    assert all(0 <= token < 2**31 for token in ids)
