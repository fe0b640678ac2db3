"""What is asked of a body before anybody reads it: its kind, its size and its pace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from srl.serve.wire import Limits, RequestError

_CURL = "application/x-www-form-urlencoded"


class BodyReader:
    """Reads bodies of at most `limits.body_bytes`, together at most `limits.buffered_bytes` at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.buffered = 0

    async def read(self, headers: Sequence[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """The body. Raises RequestError where it is no JSON, too large, too slow, or one too many.

        Raises ClientDisconnect when the client goes away before its end.
        """
        _check_headers(headers, self._limits)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    body += chunk
                    self.buffered += len(chunk)
                    self._check_size(len(body))
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {self._limits.body_s:g} s", 408) from None
        finally:
            self.buffered -= len(body)
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._limits.body_bytes:
            raise _too_large(self._limits)
        if self.buffered > self._limits.buffered_bytes:
            raise RequestError("too many large requests at once; try again later", 503)


def _too_large(limits: Limits) -> RequestError:
    return RequestError(f"the body is larger than {limits.body_bytes:,} bytes", 413)


def _check_headers(headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> None:
    for name, value in headers:
        if name == b"content-type":
            _check_kind(value.decode("latin-1"))
        elif name == b"content-length":
            if value.isdigit() and int(value[:20]) > limits.body_bytes:
                raise _too_large(limits)
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise RequestError(
                f"the body is encoded as {value.decode('latin-1')[:40]}; send it as it is", 415
            )


def _check_kind(value: str) -> None:
    """JSON, said or unsaid; curl calls whatever it sends a form unless told otherwise."""
    kind = value.partition(";")[0].strip().lower()
    if kind and kind != _CURL and not kind.endswith(("/json", "+json")):
        raise RequestError(f"the body is {kind[:80]}; send application/json", 415)
