"""What everything here that speaks HTTP shares: the client, whole answers, and when to ask again."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from ipaddress import ip_address

import httpx

MAX_ANSWER_BYTES = 64 << 20


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine; such connections never use a proxy."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def retry_after(value: str) -> float | None:
    """Seconds in a `Retry-After` header, given as a number or a date (RFC 9110, 10.2.3); None if neither."""
    if re.fullmatch("[0-9]+", value.strip()):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError, IndexError):
        return None


def new_client(
    urls: Sequence[str],
    token: str,
    transport: httpx.AsyncBaseTransport | None = None,
    *,
    follow_redirects: bool = True,
) -> httpx.AsyncClient:
    """An HTTP client for these servers that sends the token; each request sets its own time-out.

    A proxy of the environment is not used for this machine, also where other servers are reached by it.
    """
    hosts = {httpx.URL(url).host for url in urls}
    loopback = {host for host in hosts if is_loopback(host)}
    direct = {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in loopback}
    return httpx.AsyncClient(
        transport=transport,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        trust_env=loopback != hosts,
        mounts=direct,
        follow_redirects=follow_redirects,
    )


async def exchange(
    client: httpx.AsyncClient, method: str, url: str, body: bytes | None = None
) -> httpx.Response:
    """The whole answer. Raises ValueError where it is larger than `MAX_ANSWER_BYTES`."""
    content = bytearray()
    headers = {"Content-Type": "application/json"} if body is not None else None
    async with client.stream(method, url, content=body, headers=headers) as response:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError(f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes")
    plain = {name: text for name, text in response.headers.items() if name != "content-encoding"}
    return httpx.Response(response.status_code, headers=plain, content=bytes(content))
