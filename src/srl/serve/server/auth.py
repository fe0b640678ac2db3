"""Access control: the bearer token; without one, checks of `Host` and `Origin` against attacks by web pages.

A web page in a browser on this machine can send requests to a server on loopback. The browser sends the
page's site as `Origin`. As `Host` it sends the host name of the request, which is the page's own if that name
was made to resolve to 127.0.0.1 (DNS rebinding). Programs send no `Origin`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence

from starlette.exceptions import HTTPException
from starlette.types import Scope

from srl.errors import UserError
from srl.safe import one_line
from srl.serve.http import is_loopback

_AUTHORITY = re.compile(rb"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253}?)\.?(?::[0-9]{1,5})?")

Headers = Sequence[tuple[bytes, bytes]]


class Guard:
    """Decides whether a request is allowed.

    With a `token`, every request must carry it, except those to /health. With `hosts`, the `Host` of a
    request must be one of them or loopback, with any port, since tunnels and containers change the port. Its
    `Origin`, which only browsers send, must equal `Host` or be on one of the `hosts`. None allows any.
    Raises UserError for an invalid host name.
    """

    def __init__(self, token: str = "", hosts: Iterable[str] | None = None) -> None:
        self._token = token.encode()
        self._hosts = None if hosts is None else frozenset(map(host_name, hosts))

    def refusal(self, scope: Scope) -> HTTPException | None:
        """Why a request is refused; None if it is allowed."""
        headers: Headers = scope["headers"]
        if self._token and scope["path"] != "/health" and not self._has_token(headers):
            detail = "send the token of this server: Authorization: Bearer …"
            return HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})
        return None if self._hosts is None else self._foreign(headers, self._hosts)

    def _has_token(self, headers: Headers) -> bool:
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = sent.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)

    def _foreign(self, headers: Headers, own_hosts: frozenset[str]) -> HTTPException | None:
        """Checks `Host` and `Origin`; a request without `Host` is of no browser."""
        hosts = [value.lower() for name, value in headers if name == b"host"]
        if len(hosts) > 1:
            return HTTPException(400, "more than one Host header")
        for host in hosts:
            if not (is_loopback(_name(host)) or _name(host) in own_hosts):
                return _refused("the host", host)
        for name, value in headers:
            scheme, _, authority = value.lower().partition(b"://")
            if name == b"origin" and not (
                scheme in (b"http", b"https")
                and authority
                and ([authority] == hosts or _name(authority) in own_hosts)
            ):
                return _refused("pages of", value)
        return None


def host_name(text: str) -> str:
    """A host name or address in lower case, without brackets and port. Raises UserError if invalid."""
    bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    name = _name((f"[{text}]" if bare_ipv6 else text).encode())
    if not name:
        raise UserError(f"{text!r} is not a host name")
    return name


def _name(authority: bytes) -> str:
    """The host in `host:port`, in lower case; empty if invalid."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].decode().strip("[]") if match else ""


def _refused(what: str, value: bytes) -> HTTPException:
    excerpt = one_line(value.decode("latin-1"), 80)
    hint = "start it with --allow-host NAME, or with SRL_SEARCH_TOKEN set"
    return HTTPException(403, f"this server does not answer {what} {excerpt!r}; {hint}")
