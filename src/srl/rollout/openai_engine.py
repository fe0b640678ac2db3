"""An engine that asks a server with OpenAI's API: vLLM, SGLang, llama.cpp, OpenAI.

Prompts are sent as token ids where the server returns the sampled ids (vLLM, SGLang), else as text. Nothing
is left to a server's defaults: many take them from the model's `generation_config.json`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from srl.errors import UserError
from srl.rollout.codec import Codec
from srl.rollout.engine import (
    Completion,
    Engine,
    EngineFault,
    EngineTraits,
    Sampling,
    StopReason,
    check_turn,
    stop_reason,
)
from srl.safe_text import keep_secret, quoted, refusal
from srl.serve.client.retry import backoff, repeatable_jitter, retried, retry_after
from srl.serve.wire import is_loopback

log = logging.getLogger(__name__)

FAILED_IN_A_ROW = 20
"""Turns that fail one after the other before the server is given up."""
MAX_WAIT_S = 60.0
"""The longest wait before a retry, whatever `Retry-After` says; the back-off is added to it."""
BACKOFF_S = 0.5
MAX_ANSWER_BYTES = 64 << 20
_MANY = 1 << 31
"""No server counts so many tokens in an answer, has such an id, or such a log-prob."""
_QUOTED = 200
"""Characters of a server's answer that a message quotes."""
_ERROR_BYTES = 1 << 16
"""Bytes of an error's body that are looked at."""
_QUOTA = "insufficient_quota"
_RETRIED = {408, 425, 429}
_OPTIONAL: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
}
"""Parameters that only some servers have, with the values that sample the whole distribution and keep stop
strings (vLLM: include_stop_str_in_output, SGLang: no_stop_trim)."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server, and how patiently it is asked. `key` is empty where it needs none.

    Prices are of a million tokens. `key_variable` is what a message names, and `section` begins the keys of
    the configuration that it names.
    """

    url: str
    model: str
    api: str = "completions"
    key: str = field(default="", repr=False)
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 300.0
    retries: int = 5
    requests_per_minute: int | None = None
    price_in: float | None = None
    price_out: float | None = None
    section: str = "rollout.openai"


@dataclass(slots=True)
class Usage:
    """What the server was asked, and the tokens that it counted."""

    requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A parsed answer, or why there is none. `status` 0: no HTTP answer."""

    answer: Mapping[str, Any] | None
    fault: str = ""
    status: int = 0
    wait_s: float = 0.0

    @property
    def is_retryable(self) -> bool:
        lost = self.status in (0, 200) or self.status >= 500 or self.status in _RETRIED
        return self.answer is None and lost and _QUOTA not in self.fault


class OpenAiServer:
    """The HTTP side: requests with retries, within the rate limit, and what they have used."""

    def __init__(
        self,
        options: ServerOptions,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self.usage = options, Usage()
        self._transport, self._sleep, self._clock = transport, sleep, clock
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = 0.0  # when the next request may be sent
        self.failed_turns = 0  # in a row
        self._warned: set[int] = set()

    def used(self) -> dict[str, float]:
        """The usage so far; with prices also its `cost`, in their currency."""
        options, found = self.options, {name: float(value) for name, value in asdict(self.usage).items()}
        if options.price_in is None and options.price_out is None:
            return found
        prices = (options.price_in or 0.0, options.price_out or 0.0)
        cost = (self.usage.prompt_tokens * prices[0] + self.usage.completion_tokens * prices[1]) / 1e6
        return {**found, "cost": cost}

    async def post(self, name: str, path: str, payload: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """The answer, or what the server said about a request that it refused (HTTP 400, 413, 422).

        Raises EngineFault where the server did not answer, UserError where it never will.
        """
        last = await self._ask(name, "POST", path, payload, lambda found: found.is_retryable)
        if last.answer is not None:
            return last.answer
        if last.status in (400, 413, 422):
            return last.fault
        raise self._error(last)

    async def _ask(
        self,
        name: str,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None,
        is_retryable: Callable[[_Outcome], bool],
    ) -> _Outcome:
        """The last outcome of a request and its retries; `name` sets their waits apart from another's."""
        body = b"" if payload is None else json.dumps(payload).encode()

        async def attempt() -> _Outcome:
            found = await self._attempt(method, path, body)
            if found.answer is None:
                self._log(found, is_retryable(found))
            return found

        def wait_s(number: int, found: _Outcome) -> float:
            return backoff(BACKOFF_S, number, repeatable_jitter(number, [name]), MAX_WAIT_S)

        return await retried(
            attempt, attempts=self.options.retries + 1, is_retryable=is_retryable, wait_s=wait_s,
            sleep=self._sleep,
        )  # fmt: skip

    async def ask_at_start(
        self, method: str, path: str, payload: Mapping[str, Any] | None = None
    ) -> _Outcome:
        """One question before any turn. Raises UserError where nobody answers, or the key is refused.

        A server that is busy is asked again; one that is not there is not.
        """
        busy = {408, 425, 429, 502, 503, 504}
        try:
            found = await self._ask(
                "start", method, path, payload, lambda found: found.is_retryable and found.status in busy
            )
        finally:
            await self._open_client().aclose()
        if found.status == 0:
            raise UserError(
                f"{self.options.url}: {found.fault}; start the server, or correct {self.options.section}.url"
            )
        if found.status in busy:
            raise UserError(f"{self.options.url}: {found.fault}; try again later")
        if found.status in (401, 403):
            raise self._error(found)
        return found

    def fault(self, why: str) -> EngineFault | UserError:
        """What a turn that failed raises: UserError where too many in a row have."""
        self.failed_turns += 1
        said = f"{self.options.url}: {why}"
        if self.failed_turns >= FAILED_IN_A_ROW:
            return UserError(
                f"{self.failed_turns} requests in a row failed, last {said}; look at what the server says, "
                "then continue"
            )
        return EngineFault(said)

    def _error(self, last: _Outcome) -> EngineFault | UserError:
        """What a turn without an answer raises: UserError where others would fare no better."""
        said, options = f"{self.options.url}: {last.fault}", self.options
        if last.status in (401, 403):
            return UserError(f"{said}; {_set_key(options)}")
        if last.status == 404:
            return UserError(
                f"{said}; check {options.section}.url and {options.section}.model={options.model}"
            )
        if _QUOTA in last.fault:
            return UserError(f"{said}; pay the account up, or use another key ({options.key_variable})")
        if last.status == 429:
            return UserError(f"{said}; set {options.section}.requests_per_minute, or try again later")
        if 300 <= last.status < 500:
            return UserError(f"{said}; check {options.section}.url")
        return self.fault(last.fault)

    async def _attempt(self, method: str, path: str, body: bytes) -> _Outcome:
        await self._wait_for_turn()
        self.usage.requests += 1
        found = await self._exchange(method, path, body)
        if found.answer is None:
            self.usage.failed_requests += 1
        if found.wait_s:  # everybody waits, not only this request
            self._next = max(self._next, self._clock() + found.wait_s)
        return found

    async def _wait_for_turn(self) -> None:
        now, limit = self._clock(), self.options.requests_per_minute
        start = max(now, self._next)
        if limit is not None:
            self._next = start + 60.0 / limit
        if start > now:
            await self._sleep(start - now)

    def _log(self, found: _Outcome, retryable: bool) -> None:
        """A request that failed: the first of each status that may be retried is a warning."""
        known = found.status in self._warned or not retryable
        self._warned.add(found.status)
        log.log(logging.DEBUG if known else logging.WARNING, "%s: %s", self.options.url, found.fault)

    async def _exchange(self, method: str, path: str, body: bytes) -> _Outcome:
        """One request. Every fault becomes an outcome."""
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(self.options.timeout_s),
                self._open_client().stream(method, path, content=body) as response,
            ):
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        return _Outcome(None, f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes")
        except TimeoutError:
            return _Outcome(None, f"no answer within {self.options.timeout_s:g} s")
        except httpx.ConnectError as error:
            return _Outcome(None, f"no connection ({quoted(str(error), _QUOTED)})")
        except Exception as error:  # a library may raise anything; an episode must get an outcome
            return _Outcome(None, f"{type(error).__name__}: {quoted(str(error), _QUOTED)}")
        return _read(response.status_code, response.headers.get("Retry-After", ""), bytes(answer))

    def _open_client(self) -> httpx.AsyncClient:
        """The HTTP client of the running event loop; connections of an earlier loop died with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = httpx.AsyncClient(
                base_url=self.options.url,
                transport=self._transport,
                headers=_headers(self.options),
                timeout=None,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=128),
                trust_env=not is_loopback(httpx.URL(self.options.url).host),
            )
        return self._client


def find_key(variable: str | None, section: str = "rollout.openai") -> dict[str, str]:
    """`key` and `key_variable` of ServerOptions: the key in the environment `variable`, or in a usual one.

    From now on its value is hidden wherever it would be shown. Raises UserError.
    """
    names = (variable,) if variable else ("OPENAI_API_KEY", "SRL_API_KEY")
    keep_secret(names)
    values = {name: os.environ.get(name, "").strip() for name in names}
    found = next((name for name in names if values[name]), names[0])
    key = values[found]
    if variable and not key:
        raise UserError(f"the environment variable {variable} ({section}.key_variable) is not set")
    if not all("!" <= letter <= "~" for letter in key):
        raise UserError(f"{found} is not a valid key: it has characters that HTTP headers forbid")
    return {"key": key, "key_variable": found}


def _set_key(options: ServerOptions) -> str:
    return f"set the environment variable {options.key_variable} to the server's key"


def _headers(options: ServerOptions) -> dict[str, str]:
    key = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    return {"Content-Type": "application/json", **key}


def _read(status: int, wait: str, body: bytes) -> _Outcome:
    """The outcome of an HTTP answer."""
    if status != 200:
        seconds = min(retry_after(wait) or 0.0, MAX_WAIT_S) if status in (429, 503) else 0.0
        said, code = _message(body[:_ERROR_BYTES])
        why = refusal(status, said, _QUOTED) + (f" ({quoted(code, _QUOTED)})" if code else "")
        return _Outcome(None, why, status, seconds)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return _Outcome(None, f"the answer is not JSON: {quoted(body[:1000], 80)}", status)
    if not isinstance(found, dict):
        return _Outcome(None, f"the answer is not a JSON object: {quoted(body[:1000], 80)}", status)
    return _Outcome(found, status=status)


def _message(body: bytes) -> tuple[str, str]:
    """The message in an error's JSON, in OpenAI's form or another, and its code; else the body."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        said = error.get("message", error) if isinstance(error, dict) else error
        code = error.get("code") if isinstance(error, dict) else None
        return str(said), code if isinstance(code, str) else ""
    except (ValueError, AttributeError, RecursionError):
        return body.decode("utf-8", "replace"), ""


async def find_model(
    options: ServerOptions, max_model_len: int, transport: httpx.AsyncBaseTransport | None = None
) -> str:
    """The model to ask for: `options.model`, or the only one that the server lists.

    Raises UserError where the server is not there, refuses the key, or has a shorter context.
    """
    found = await OpenAiServer(options, transport).ask_at_start("GET", "models")
    listed = (found.answer or {}).get("data")
    items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    models = {str(item.get("id")): item for item in items}
    if not options.model and len(models) != 1:
        names = quoted(", ".join(list(models)[:8]), _QUOTED)
        why = f" ({found.fault}): correct {options.section}.url," if found.fault else ";"
        said = f"has several models ({names});" if models else f"does not list its models{why}"
        raise UserError(f"{options.url} {said} name one with --set {options.section}.model=NAME")
    name = options.model or next(iter(models))
    context = models.get(name, {}).get("max_model_len")
    if isinstance(context, int) and context < max_model_len:
        raise UserError(
            f"{options.url}: the server's context is {context:,} tokens, and an episode may have "
            f"{max_model_len:,} (data.max_prompt_length + data.max_response_length): lower one of them"
        )
    return name


async def returns_ids(
    options: ServerOptions, codec: Codec, transport: httpx.AsyncBaseTransport | None = None
) -> bool:
    """Whether the server takes a prompt as token ids and returns the sampled ids; asks for one token."""
    payload = {
        "model": options.model,
        "prompt": codec.encode_text("who", after=()),
        "max_tokens": 1,
        "return_token_ids": True,
    }
    server = OpenAiServer(options, transport)
    found = await server.ask_at_start("POST", "completions", payload)
    return found.answer is not None and _returned_ids(found.answer) is not None


class RefusedError(UserError):
    """A request that the server refuses, and not for a parameter; `why` is what it said, without the hint."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(f"{why}; {hint}")
        self.why = why


class OpenAiEngine(Engine):
    """Asks the server for one turn at a time, `max_num_seqs` of them at once.

    With `token_ids` the prompt is sent as ids and the sampled ids come back. Without, both are text, and what
    comes back is encoded here: good for evaluation, not for training. Log-probs are the server's: vLLM's are
    those at temperature 1 unless it was started with `--logprobs-mode processed_logprobs`. `note` is told of
    each parameter that the server refuses, once.
    """

    def __init__(
        self,
        codec: Codec,
        server: OpenAiServer,
        *,
        token_ids: bool,
        max_num_seqs: int,
        max_model_len: int,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        self.codec, self.server, self.note = codec, server, note
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.traits = EngineTraits(same_weights=False, token_ids=token_ids)
        self._dropped: set[str] = set()
        self._chats: dict[str, _Chat] = {}
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn. Raises EngineFault if the server fails, UserError if it refuses or the turn is long."""
        check_turn(request_id, token_ids, sampling, self.max_model_len)
        async with self._limit():
            answer = await self._ask(request_id, token_ids, sampling)
        completion = self._completion(request_id, answer, token_ids, sampling)
        self.server.failed_turns = 0
        if self.server.options.api == "chat":
            self._chats[request_id].answered(
                self.codec.decode(completion.token_ids), len(completion.token_ids)
            )
        return completion

    def finish(self, request_id: str) -> None:
        self._chats.pop(request_id, None)

    def reset(self) -> None:
        self._chats.clear()

    def _limit(self) -> asyncio.Semaphore:
        """The slots of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(self.max_num_seqs), loop
        return self._slots

    async def _ask(self, name: str, token_ids: Sequence[int], sampling: Sampling) -> Mapping[str, Any]:
        """The server's answer. A parameter that it refuses by its name is left out from then on."""
        while True:
            path, payload = self._payload(name, token_ids, sampling)
            answer = await self.server.post(name, path, payload)
            if isinstance(answer, Mapping):
                self._count(answer)
                return answer
            refused = _refused(payload, answer)
            if not refused:
                raise RefusedError(
                    f"{self.server.options.url}: {answer}",
                    _about_sampling(sampling, answer)
                    or f"episode {name} has {len(token_ids)} tokens and asks for {sampling.max_tokens} "
                    "(data.max_prompt_length, data.max_response_length)",
                )
            for key in set(refused) - self._dropped:
                self._dropped.add(key)
                self.note(f"the server refuses the parameter {key}; it is left out ({quoted(answer, 120)})")

    def _payload(self, name: str, token_ids: Sequence[int], sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Path and body of the request."""
        asked = {
            "model": self.server.options.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            **_OPTIONAL,
        }
        path = "completions"
        if self.server.options.api == "chat":
            path, asked["messages"] = "chat/completions", self._chat(name, token_ids)
        elif self.traits.token_ids:
            asked |= {"prompt": list(token_ids), "return_token_ids": True, "logprobs": 1}
        else:
            asked["prompt"] = self.codec.spelled(token_ids)
        payload = {key: value for key, value in asked.items() if key not in self._dropped}
        if "max_tokens" in self._dropped:
            payload["max_completion_tokens"] = sampling.max_tokens
        return path, payload

    def _chat(self, name: str, token_ids: Sequence[int]) -> list[dict[str, str]]:
        chat = self._chats.setdefault(name, _Chat())
        return chat.messages(self.codec.decode(token_ids[chat.tokens :]), len(token_ids))

    def _count(self, answer: Mapping[str, Any]) -> None:
        found = answer.get("usage")
        for key in ("prompt_tokens", "completion_tokens"):
            tokens = found.get(key) if isinstance(found, Mapping) else None
            if type(tokens) is int and 0 <= tokens < _MANY:
                setattr(self.server.usage, key, getattr(self.server.usage, key) + tokens)

    def _completion(
        self, name: str, answer: Mapping[str, Any], token_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        """The turn in an answer. Raises EngineFault where it is not one, UserError for another model."""
        self._check_model(answer)
        choice = _choice(answer)
        if choice is None or choice.get("finish_reason") in ("abort", "error"):
            raise self._fault(name, f"the answer has no completion: {quoted(json.dumps(answer), 120)}")
        if not self.traits.token_ids:
            return self._of_text(name, choice, sampling)
        return self._of_ids(name, answer, token_ids, sampling)

    def _fault(self, name: str, why: str) -> EngineFault | UserError:
        return self.server.fault(f"episode {name}: {why}")

    def _check_model(self, answer: Mapping[str, Any]) -> None:
        """OpenAI answers for `gpt-4` with the dated name, `gpt-4-0613`; `gpt-4o` is another model."""
        asked, found = self.server.options.model, answer.get("model")
        if not isinstance(found, str) or not found:
            return
        date = found.removeprefix(f"{asked}-")
        if found != asked and (date == found or set(date) - set("0123456789-")):
            raise UserError(
                f"{self.server.options.url}: the model {quoted(found, 80)!r} answered, not {asked!r}; "
                f"set {self.server.options.section}.model to the one that the server has"
            )

    def _of_ids(
        self, name: str, answer: Mapping[str, Any], token_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        choice, ids = _choice(answer) or {}, _returned_ids(answer)
        if not ids or len(ids) > sampling.max_tokens:
            count = "no" if not ids else len(ids)
            raise self._fault(
                name, f"{count} token ids came back, at most {sampling.max_tokens} were asked for"
            )
        echoed, text = choice.get("prompt_token_ids"), choice.get("text")
        if echoed is not None and echoed != list(token_ids):
            raise self._fault(name, "the server generated after other token ids than those it was given")
        if isinstance(text, str) and not _spells(self.codec.decode(ids), text):
            raise self._fault(
                name, f"the token ids do not spell the text {quoted(text, 60)!r}: set model.tokenizer to the "
                "server's tokenizer"
            )  # fmt: skip
        logprobs = _logprobs(choice)
        if len(logprobs) != len(ids):
            raise self._fault(name, f"{len(logprobs)} log-probs came back for {len(ids)} token ids")
        return self._cut(ids, logprobs, sampling)

    def _cut(self, ids: Sequence[int], logprobs: Sequence[float], sampling: Sampling) -> Completion:
        """The ids through the one that completes a stop string, where the server went on."""
        decode, end = self.codec.decode, len(ids)
        if any(stop in decode(ids[:-1]) for stop in sampling.stop):
            end = next(n for n in range(1, end) if any(stop in decode(ids[:n]) for stop in sampling.stop))
        kept = tuple(ids[:end])
        return Completion(kept, tuple(logprobs[:end]), stop_reason(kept, sampling.stop, self.codec))

    def _of_text(self, name: str, choice: Mapping[str, Any], sampling: Sampling) -> Completion:
        text = _said(choice)
        if text is None:
            raise self._fault(name, f"the answer has no text: {quoted(json.dumps(choice), 120)}")
        text, reason = _ended(text, choice, sampling.stop)
        ids = self.codec.encode_text(text)
        kept = tuple(ids[: sampling.max_tokens])
        return Completion(kept, (0.0,) * len(kept), reason if len(kept) == len(ids) else "length")


class _Chat:
    """The messages of an episode so far, and how many of its tokens they hold."""

    def __init__(self) -> None:
        self.said: list[dict[str, str]] = []
        self.tokens = 0

    def messages(self, new: str, tokens: int) -> list[dict[str, str]]:
        """All messages, the last with the text `new`; a repeated request changes nothing."""
        if tokens > self.tokens:
            self.said.append({"role": "user", "content": new})
            self.tokens = tokens
        return self.said

    def answered(self, text: str, tokens: int) -> None:
        self.said.append({"role": "assistant", "content": text})
        self.tokens += tokens


_UNKNOWN = re.compile(r"(?i)support|unrecogni|unknown|permitted|unexpected|extra")


def _about_sampling(sampling: Sampling, said: str) -> str:
    """What to set where the server's message is about a value that decides what is sampled."""
    keys = {"temperature": "--temperature 1 (eval.temperature)", "top_p": "--set rollout.top_p=1"}
    named = [key for key in keys if _names(said, key)] if _UNKNOWN.search(said) else []
    told = (f"it was asked for {key} = {getattr(sampling, key):g}; type {keys[key]}" for key in named)
    return "; ".join(told)


def _refused(payload: Mapping[str, Any], said: str) -> list[str]:
    """The parameters that the server's message names, and that a turn can do without.

    Stop strings are also looked for here. `max_tokens` has another name on some servers.
    """
    keys = [*_OPTIONAL, *(("stop", "max_tokens") if _UNKNOWN.search(said) else ())]
    return [key for key in keys if key in payload and _names(said, key)]


def _names(said: str, key: str) -> bool:
    return re.search(rf"(?<!\w){key}(?!\w)", said) is not None


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, Mapping) else None


def _returned_ids(answer: Mapping[str, Any]) -> list[int] | None:
    ids = (_choice(answer) or {}).get("token_ids")
    valid = isinstance(ids, list) and all(type(token) is int and 0 <= token < _MANY for token in ids)
    return ids if valid else None


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    found = choice.get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, Mapping) else None
    numbers = values if isinstance(values, list) else []
    return [float(value) for value in numbers if type(value) in (int, float) and abs(value) < _MANY]


def _said(choice: Mapping[str, Any]) -> str | None:
    """The text of a completion or of a chat's message, whose content may be a list of parts."""
    message = choice.get("message")
    text = message.get("content") or "" if isinstance(message, Mapping) else choice.get("text")
    if isinstance(text, list):
        parts = [part.get("text", "") for part in text if isinstance(part, Mapping)]
        text = "".join(part for part in parts if isinstance(part, str))
    return text if isinstance(text, str) else None


def _spells(decoded: str, text: str) -> bool:
    """Whether `decoded` is `text` and perhaps the rest of the token in which a stop string ended.

    Servers leave out bytes that are no character yet, and a tokenizer's first space.
    """
    return decoded.strip().startswith(text.strip().rstrip("\ufffd").strip())


def _ended(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> tuple[str, StopReason]:
    """The text through its first stop string, put back where the server cut it off, and why it ended."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        return text[: min(ends)], "stop"
    if choice.get("finish_reason") == "length":
        return text, "length"
    told = [choice[key] for key in ("stop_reason", "matched_stop") if key in choice]
    cut = next((stop for stop in told if stop in stops), None) if told else _open_tag(text, stops)
    return (text + cut, "stop") if cut else (text, "eos")


def _open_tag(text: str, stops: Sequence[str]) -> str | None:
    """The closing tag, of `stops`, of the tag that `text` opened last: servers cut it off without a word."""
    opened = {stop: text.rfind(stop.replace("</", "<", 1).rstrip(">")) for stop in stops}
    last = max(opened, key=lambda stop: opened[stop], default=None)
    return last if last is not None and opened[last] >= 0 else None
