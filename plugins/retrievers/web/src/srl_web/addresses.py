"""Restricts page downloads to public addresses, so that a result's URL cannot reach the local network."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import httpx

_LOCAL_NAT64 = b"\x00\x64\xff\x9b\x00\x01"
"""64:ff9b:1::/48 (RFC 8215), whose addresses a local network assigns."""
_EMBEDDING = b"\x00\x64\xff\x9b" + bytes(8), bytes(12), bytes(8) + b"\xff\xff\x00\x00"
"""The first 12 bytes of NAT64, of IPv4-compatible and of IPv4-translated addresses."""


class PublicTransport(httpx.AsyncBaseTransport):
    """Connects to the checked address itself, so that a second DNS answer cannot redirect the request.

    Redirects are checked too. Each request has its own connection, because a TLS connection to an address
    is for one host name and must not be reused for another.
    """

    def __init__(self, allow_private: bool = False) -> None:
        self._allow_private = allow_private
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        addresses = await resolve(host, request.url.port or (443 if request.url.scheme == "https" else 80))
        if not self._allow_private and not all(map(is_public, addresses)):
            raise httpx.UnsupportedProtocol(f"{host} is not a public address")
        for address in addresses[:-1]:
            try:
                return await self._inner.handle_async_request(_towards(request, address))
            except httpx.ConnectError:
                continue
        return await self._inner.handle_async_request(_towards(request, addresses[-1]))

    async def aclose(self) -> None:
        await self._inner.aclose()


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of `host`, in the order to try them. Raises httpx.ConnectError if it has none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpx.ConnectError(f"{host} cannot be resolved ({error})") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether the address is reachable on the public internet.

    >>> is_public("8.8.8.8"), is_public("10.1.2.3"), is_public("::ffff:127.0.0.1")
    (True, False, False)
    """
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and (ip.is_site_local or ip.packed.startswith(_LOCAL_NAT64)):
        return False
    inner = _inside(ip) if isinstance(ip, IPv6Address) else None
    return ip.is_global and not ip.is_multicast and (inner is None or is_public(str(inner)))


def _inside(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address embedded in an IPv6 address: mapped, compatible, translated, 6to4, Teredo, or NAT64
    (RFC 6052)."""
    if ip.teredo:
        return ip.teredo[1]
    if ip.packed[:12] in _EMBEDDING:
        return IPv4Address(ip.packed[12:])
    return ip.ipv4_mapped or ip.sixtofour


def _towards(request: httpx.Request, address: str) -> httpx.Request:
    """The request with the host replaced by `address`; `Host` and the TLS handshake keep the host name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )
