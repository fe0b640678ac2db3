"""An engine that asks a server with OpenAI's API: vLLM, SGLang, llama.cpp, OpenAI.

Prompts are sent as token ids where the server returns the sampled ids (vLLM, SGLang), else as text. Nothing
is left to a server's defaults: many take them from the model's `generation_config.json`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import httpx
import tenacity

from srl.errors import UserError, error_line
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Engine, EngineFault, Sampling, check_turn, stop_reason
from srl.safe import header_secret, quoted, refusal
from srl.serve.http import exchange, new_client, retry_after

log = logging.getLogger(__name__)

FAILED_IN_A_ROW = 20
"""Turns that fail one after the other before the server is given up."""
MAX_WAIT_S = 60.0
"""The longest wait before another try, whatever the server asks."""
_UNREACHED = (httpx.TransportError, TimeoutError)
_FAULTS = (httpx.HTTPError, TimeoutError, ValueError, RecursionError)
"""What a request may raise; the last two for an answer that is too large or not JSON."""
_QUOTED = 200
"""Characters of a server's answer that a message quotes."""


class RefusedError(UserError):
    """The server does not take such a request (HTTP 400, 404, 405, 413, 422); it may take others."""


@dataclass
class OpenAiServer:
    """The HTTP side: requests with retries, and what they have used.

    `model` may be empty until `find_model`. Prices are of a million tokens. `section` begins the keys of the
    configuration that messages name.
    """

    url: str
    model: str = ""
    api: str = "completions"
    key: str = field(default="", repr=False)
    timeout_s: float = 300.0
    retries: int = 5
    max_concurrent: int = 128
    price_in: float | None = None
    price_out: float | None = None
    section: str = "rollout.openai"
    transport: httpx.AsyncBaseTransport | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._used = dict.fromkeys(("requests", "failed_requests", "prompt_tokens", "completion_tokens"), 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_there = False  # whether it has answered

    def used(self) -> dict[str, float]:
        """Requests and tokens so far; with prices also the `cost`, in their currency."""
        used = {name: float(value) for name, value in self._used.items()}
        if (self.price_in, self.price_out) != (None, None):
            prompt, completion = used["prompt_tokens"], used["completion_tokens"]
            used["cost"] = (prompt * (self.price_in or 0) + completion * (self.price_out or 0)) / 1e6
        return used

    async def ask(self, method: str, path: str, payload: Any = None) -> Any:
        """The answer's JSON. A server that has never answered is asked once.

        Raises EngineFault where there is none, RefusedError, or UserError if the server is not there.
        """
        self._enter_loop()
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: self._is_there and _may_pass(error)),
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=_wait_s,
            sleep=self.sleep,
            before_sleep=tenacity.before_sleep_log(log, logging.INFO),
            reraise=True,
        )
        async with self._slots:
            try:
                return await retrying(self._attempt, method, path, payload)
            except _FAULTS as error:
                raise self._error(error) from error

    def _enter_loop(self) -> None:
        """Have client and slots of the running event loop; those of an earlier loop died with it."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._slots = loop, asyncio.Semaphore(self.max_concurrent)
            self._client = new_client([self.url], self.key, self.transport, follow_redirects=False)

    async def _attempt(self, method: str, path: str, payload: Any) -> Any:
        """One request. Raises httpx's errors, or ValueError for no JSON."""
        self._used["requests"] += 1
        self._used["failed_requests"] += 1  # until there is an answer
        body = None if payload is None else json.dumps(payload).encode()
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await exchange(self._client, method, f"{self.url.rstrip('/')}/{path}", body)
        except _FAULTS as error:
            self._is_there |= not isinstance(error, _UNREACHED)
            raise
        self._is_there = True
        response.request = httpx.Request(method, self.url)
        answer = response.raise_for_status().json()
        self._used["failed_requests"] -= 1
        usage = answer.get("usage") if isinstance(answer, dict) else None
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = usage.get(name) if isinstance(usage, dict) else None
            self._used[name] += tokens if isinstance(tokens, int) else 0
        return answer

    def _error(self, error: Exception) -> EngineFault | UserError:
        if not isinstance(error, httpx.HTTPStatusError):
            message = f"{self.url}: no answer: {quoted(error_line(error), _QUOTED)}"
            hint = f"; start the server, or correct {self.section}.url"
            return EngineFault(message) if self._is_there else UserError(message + hint)
        status = error.response.status_code
        message = f"{self.url}: {refusal(status, error.response.content, _QUOTED)}"
        if _may_pass(error) and status != 429:
            return EngineFault(message)
        kind = RefusedError if status in (400, 404, 405, 413, 422) else UserError
        return kind(f"{message}; check {self.section}.url, .model and .key_variable")


_back_off = tenacity.wait_random_exponential(max=MAX_WAIT_S)


def _wait_s(state: tenacity.RetryCallState) -> float:
    """The back-off before another try, or as long as the server asks, within limits."""
    error = state.outcome.exception() if state.outcome is not None else None
    headers = error.response.headers if isinstance(error, httpx.HTTPStatusError) else {}
    return max(_back_off(state), min(retry_after(headers.get("Retry-After", "")) or 0.0, MAX_WAIT_S))


def _may_pass(error: BaseException) -> bool:
    """Whether another try may help."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (408, 425, 429) or error.response.is_server_error
    return isinstance(error, _FAULTS)


def find_key(variable: str | None, section: str = "rollout.openai") -> str:
    """The key in the environment `variable`, or in OPENAI_API_KEY or SRL_API_KEY. Raises UserError."""
    key = header_secret(*((variable,) if variable else ("OPENAI_API_KEY", "SRL_API_KEY")))
    if variable and not key:
        raise UserError(f"the environment variable {variable} ({section}.key_variable) is not set")
    return key


async def find_model(server: OpenAiServer, max_model_len: int) -> str:
    """The model to ask for: the server's `model`, or the only one that it lists.

    Raises UserError where the server is not there, refuses the key, or has a shorter context.
    """
    try:
        answer = await server.ask("GET", "models")
    except RefusedError:  # some servers do not list their models
        if not server.model:
            raise
        answer = []
    entries = answer.get("data") if isinstance(answer, dict) else answer
    models = {str(model.get("id")): model for model in entries or () if isinstance(model, dict)}
    if not server.model and len(models) != 1:
        names = quoted(", ".join(models), _QUOTED)
        raise UserError(
            f"{server.url} lists {len(models)} models ({names}): name one, --set {server.section}.model=NAME"
        )
    name = server.model or next(iter(models))
    context = models.get(name, {}).get("max_model_len")
    if isinstance(context, int) and context < max_model_len:
        raise UserError(
            f"{server.url}: the server's context is {context:,} tokens, and an episode may have "
            f"{max_model_len:,} (data.max_prompt_length + data.max_response_length): lower one of them"
        )
    return name


async def returns_ids(server: OpenAiServer, codec: Codec) -> bool:
    """Whether the server takes a prompt as token ids and returns the sampled ids; asks for one token."""
    prompt = codec.encode_text("who", after=())
    payload = {"model": server.model, "prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    with suppress(RefusedError, LookupError, TypeError):
        answer = await server.ask("POST", "completions", payload)
        return isinstance(answer["choices"][0]["token_ids"], list)
    return False


def _spells(decoded: str, text: str) -> bool:
    """Whether `decoded` begins with `text`, without the bytes and spaces that servers cut off its ends."""
    return decoded.strip().startswith(text.strip().rstrip("\ufffd").strip())


def _cut_off(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> str:
    """The stop string that ended `text` where the server cut it off; empty if the policy ended it.

    vLLM and SGLang tell it. Where nothing is told, it closes the tag that was opened last, if there is one.
    """
    reasons = [choice[key] for key in ("stop_reason", "matched_stop") if key in choice]
    if reasons:
        return next((stop for stop in stops if stop in reasons), "")
    opened = {text.rfind(stop.replace("</", "<", 1).rstrip(">")): stop for stop in stops}
    return opened[last] if (last := max(opened, default=-1)) >= 0 else ""


_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters, which not every server has, with the values that change nothing."""
_UNKNOWN = re.compile(r"(?i)support|unrecogni|unknown|permitted|unexpected|extra")


def _dispensable(payload: Mapping[str, Any], message: str) -> set[str]:
    """The parameters that the server's message names, and that a turn can do without.

    Stop strings are also looked for here. `max_tokens` has another name on some servers.
    """
    names = [name for name, value in _NEUTRAL.items() if payload.get(name) == value]
    names += [name for name in ("stop", "max_tokens") if name in payload and _UNKNOWN.search(message)]
    return {name for name in names if re.search(rf"(?<!\w){name}(?!\w)", message)}


class OpenAiEngine(Engine):
    """Asks the server for one turn at a time.

    With `token_ids` ids are sent and come back; without, texts, which are encoded here: good for evaluation,
    not for training. Log-probs are the server's: vLLM's are those at temperature 1 unless it was started with
    `--logprobs-mode processed_logprobs`. `note` is told of each parameter that the server refuses, once.
    """

    def __init__(
        self,
        codec: Codec,
        server: OpenAiServer,
        *,
        token_ids: bool,
        max_model_len: int,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        self.codec, self.server, self.max_model_len, self.note = codec, server, max_model_len, note
        self.token_ids = token_ids
        self._failed = 0  # turns in a row
        self._dropped: set[str] = set()
        self._seams: dict[str, list[int]] = {}  # where the turns of an episode begin and end

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn. Raises EngineFault if the server fails, UserError if it refuses or the turn is long."""
        check_turn(request_id, token_ids, sampling, self.max_model_len)
        try:
            completion = self._completion(await self._ask(request_id, token_ids, sampling), sampling)
        except EngineFault as error:
            self._failed += 1
            if self._failed < FAILED_IN_A_ROW:
                raise
            raise UserError(f"{self._failed} turns in a row failed, the last: {error}") from error
        self._failed, end = 0, len(token_ids)
        self._seams.setdefault(request_id, []).extend((end, end + len(completion.token_ids)))
        return completion

    def finish(self, request_id: str) -> None:
        self._seams.pop(request_id, None)

    async def _ask(self, name: str, token_ids: Sequence[int], sampling: Sampling) -> Mapping[str, Any]:
        """The server's answer. A parameter that it refuses by its name is left out from then on."""
        parameters: dict[str, Any] = {
            **_NEUTRAL, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "model": self.server.model, "max_tokens": sampling.max_tokens,
        }  # fmt: skip
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        path = "completions"
        if self.server.api == "chat":
            path, cuts = "chat/completions", [0, *self._seams.get(name, ()), len(token_ids)]
            texts = [self.codec.decode(token_ids[start:end]) for start, end in pairwise(cuts)]
            messages = zip(cycle(("user", "assistant")), texts, strict=False)
            parameters["messages"] = [{"role": role, "content": text} for role, text in messages]
        elif self.token_ids:
            parameters |= {"prompt": list(token_ids), "return_token_ids": True, "logprobs": 1}
        else:
            parameters["prompt"] = self.codec.spelled(token_ids)
        while True:
            if "max_tokens" in self._dropped:
                parameters["max_completion_tokens"] = sampling.max_tokens
            payload = {key: value for key, value in parameters.items() if key not in self._dropped}
            try:
                return await self.server.ask("POST", path, payload)
            except RefusedError as error:
                names = _dispensable(payload, str(error))
                if not names:
                    raise
                for key in names - self._dropped:
                    self.note(f"the parameter {key} is left out: {error}")
                self._dropped |= names

    def _completion(self, answer: Mapping[str, Any], sampling: Sampling) -> Completion:
        """The turn in an answer, through the end of its first stop string. Raises EngineFault."""
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or "" if "message" in choice else choice["text"]
            if choice.get("finish_reason") in ("abort", "error"):
                raise ValueError("it was aborted")
            return (self._of_ids if self.token_ids else self._of_text)(text, choice, sampling)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            message = f"not a completion ({error_line(error)}): {quoted(json.dumps(answer), _QUOTED)}"
            raise EngineFault(f"{self.server.url}: {message}") from error

    def _of_text(self, text: str, choice: Mapping[str, Any], sampling: Sampling) -> Completion:
        is_long = choice.get("finish_reason") == "length"
        text += "" if is_long else _cut_off(text, choice, sampling.stop)
        ends = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = tuple(self.codec.encode_text(text[: min(ends, default=None)]))
        reply = ids[: sampling.max_tokens]
        is_long = reply != ids or (is_long and not ends)
        return Completion(reply, (0.0,) * len(reply), "length" if is_long else "stop" if ends else "eos")

    def _of_ids(self, text: str, choice: Mapping[str, Any], sampling: Sampling) -> Completion:
        """Through the token that completes a stop string, also where the server went on."""
        ids, decode = tuple(choice["token_ids"]), self.codec.decode
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        if not 0 < len(ids) == len(logprobs) <= sampling.max_tokens:
            raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probs")
        if not _spells(decode(ids), text):
            raise ValueError("the ids do not spell the text; set model.tokenizer to the server's tokenizer")
        end = 1 + bisect_left(
            range(1, len(ids)), True, key=lambda end: any(stop in decode(ids[:end]) for stop in sampling.stop)
        )
        return Completion(ids[:end], logprobs[:end], stop_reason(ids[:end], sampling.stop, self.codec))
