"""A server with OpenAI's API on a free port of this machine, as good or as bad as a test wants it.

`FakeServer` runs any function from a request to an answer. `torch_app` makes one that generates with a model.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.torch_engine import TorchEngine

MODEL = "made-up"


@dataclass(frozen=True)
class Reply:
    """An answer."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        lines = [f"HTTP/1.1 {self.status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body


App = Callable[[str, dict[str, Any], dict[str, str]], Awaitable[Reply]]
"""(path, body, headers) -> answer."""


class FakeServer:
    """Runs `app` in a thread; `requests` are the bodies that came in, `keys` their Authorization headers."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._last: int | None = None

    @contextmanager
    def running(self) -> Iterator[str]:
        """The base URL while the server runs."""
        started = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        thread.start()
        assert started.wait(60)
        try:
            yield f"http://127.0.0.1:{self.port}/v1"
        finally:
            self.kill()
            thread.join(60)

    def kill(self) -> None:
        """Close every connection in the middle of its answer, and accept no more."""
        with suppress(RuntimeError):  # its loop has ended: it is dead already
            self._loop.call_soon_threadsafe(self._die)

    def kill_after(self, requests: int) -> None:
        """Die when so many more requests have come in."""
        self._last = len(self.requests) + requests

    def _die(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        self._over.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        started.set()
        await self._over.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while not self._over.is_set():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])
                }
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw) if raw else {}
                self.requests.append(body)
                self.keys.append(headers.get("authorization", ""))
                if self._last is not None and len(self.requests) >= self._last:
                    self._die()
                reply = await self.app(head[0].split()[1].removeprefix("/v1/"), body, headers)
                writer.write(reply.encoded())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()


def listing(*models: str, **known: Any) -> Reply:
    return Reply({"object": "list", "data": [{"id": name, **known} for name in models or (MODEL,)]})


def completion(text: str, finish: str = "stop", **choice: Any) -> Reply:
    return Reply(
        {
            "model": MODEL,
            "choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5},
        }
    )


def torch_app(model: PreTrainedModel, codec: Codec, max_model_len: int = 96) -> App:
    """Answers as vLLM does: token ids in and out, the text without its stop string."""
    engine: list[TorchEngine] = []
    count = iter(range(10**6))

    async def app(path: str, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        if path == "models":
            return listing(max_model_len=max_model_len)
        if not engine:
            engine.append(TorchEngine(model, codec, max_num_seqs=4, max_model_len=10 * max_model_len))
        ids = body["prompt"] if isinstance(body["prompt"], list) else codec.encode_text(body["prompt"])
        sampling = Sampling(
            max_tokens=body["max_tokens"], temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0), stop=tuple(body.get("stop", ())), key=(next(count),),
        )  # fmt: skip
        name = f"request {next(count)}"
        found = await engine[0].generate(name, ids, sampling)
        engine[0].finish(name)
        return completion(
            cut_text(codec.decode(found.token_ids), sampling.stop),
            "length" if found.stop_reason == "length" else "stop",
            token_ids=list(found.token_ids), prompt_token_ids=list(ids),
            logprobs={"token_logprobs": list(found.logprobs)},
        )  # fmt: skip

    return app


def cut_text(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=None)]
