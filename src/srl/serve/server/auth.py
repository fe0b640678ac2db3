"""Access control: the bearer token; without one, checks of `Host` and `Origin` against attacks by web pages.

A web page in a browser on this machine can send requests to a server on loopback. The browser sends the
page's site as `Origin`. As `Host` it sends the host name of the request, which is the page's own if that name
was made to resolve to 127.0.0.1 (DNS rebinding). Programs send no `Origin`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

from starlette.types import Scope

from srl.errors import UserError
from srl.safe import one_line
from srl.serve.wire import RequestError, is_loopback

OPEN_PATHS = ("/health", "/healthz")
_AUTHORITY = re.compile(rb"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253}?)\.?(?::[0-9]{1,5})?")
_KEPT = 64
"""Size of the cache of checked `Host` values."""
_SHOWN = 80

Headers = Sequence[tuple[bytes, bytes]]


class Guard:
    """Decides whether a request is allowed.

    With a `token`, every request must carry it, except those to /health. With `hosts`, the `Host` of a
    request must be one of them or loopback, with any port, since tunnels and containers change the port. Its
    `Origin`, which only browsers send, must equal `Host` or be on one of the `hosts`. None allows any.
    Raises UserError for an invalid host name.
    """

    def __init__(self, token: str = "", hosts: Iterable[str] | None = None) -> None:
        self.token = token.encode()
        self.hosts = None if hosts is None else frozenset(map(host_name, hosts))
        self._is_ours = lru_cache(_KEPT)(partial(_is_one_of, self.hosts or frozenset()))

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why a request is refused; None if it is allowed."""
        headers: Headers = scope["headers"]
        if self.token and not _is_open(scope["path"]) and not self._has_token(headers):
            return RequestError("send the token of this server: Authorization: Bearer …", 401)
        return None if self.hosts is None else self._foreign(headers, scope.get("http_version", "1.1"))

    def _has_token(self, headers: Headers) -> bool:
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, given = sent.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token)

    def _foreign(self, headers: Headers, version: str) -> RequestError | None:
        """Checks `Host` and `Origin`. Only HTTP/1.0, which browsers do not use, may omit `Host`."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            return RequestError(f"{len(hosts) or 'no'} Host headers; expected one", 400)
        host = hosts[0] if hosts else b""
        if hosts and not self._is_ours(host):
            return _refused(f"the host {_shown(host)}", host)
        for name, origin in headers:
            if name == b"origin" and not self._is_same(origin.lower(), host.lower()):
                return _refused(f"pages of {_shown(origin)}", origin.partition(b"://")[2])
        return None

    def _is_same(self, origin: bytes, host: bytes) -> bool:
        scheme, _, authority = origin.partition(b"://")
        known = authority == host or _name(authority) in (self.hosts or ())
        return known and bool(authority) and scheme in (b"http", b"https")


def host_name(given: str) -> str:
    """A host name or address in lower case, without brackets and port. Raises UserError if invalid."""
    bare_ipv6 = given.count(":") > 1 and not given.startswith("[")
    name = _name((f"[{given}]" if bare_ipv6 else given).encode())
    if not name:
        raise UserError(f"{given!r} is not a host name; expected one such as search.example.org")
    return name


def _is_one_of(hosts: frozenset[str], authority: bytes) -> bool:
    name = _name(authority)
    return is_loopback(name) or name in hosts


def _name(authority: bytes) -> str:
    """The host in `host:port`, in lower case; empty if invalid."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].decode().strip("[]") if match else ""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/health/")


def _refused(whom: str, authority: bytes) -> RequestError:
    name = _name(authority) or "NAME"
    return RequestError(
        f"this server does not answer {whom}; start it with --allow-host {name}, or with SRL_SEARCH_TOKEN "
        "set",
        403,
    )


def _shown(value: bytes) -> str:
    return repr(one_line(value.decode("latin-1"), _SHOWN))
