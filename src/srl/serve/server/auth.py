"""Who may ask: whoever has the token; where there is none, whoever asks this machine by its own name.

A web page in a browser on this machine can send requests to a server on loopback. The browser names the
page's site in `Origin`. In `Host` it names the host that it asks, which is the page's own where that name has
been made to point at 127.0.0.1 (DNS rebinding). Programs send no `Origin`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

from starlette.types import Scope

from srl.errors import UserError
from srl.safe_text import one_line
from srl.serve.wire import RequestError, is_loopback

OPEN_PATHS = ("/health", "/healthz")
_AUTHORITY = re.compile(rb"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253}?)\.?(?::[0-9]{1,5})?")
_KEPT = 64
"""Values of `Host` whose verdict is remembered."""
_SHOWN = 80

Headers = Sequence[tuple[bytes, bytes]]


class Guard:
    """Asks each request for the `token`, if there is one, but not those for health.

    With `hosts` a request must name one of them, or loopback, as its host, at any port: tunnels and
    containers change it. Its origin, where a browser names one, must be the server as the request calls it,
    or on one of the `hosts`. None asks for nothing. Raises UserError for what is no name of a host.
    """

    def __init__(self, token: str = "", hosts: Iterable[str] | None = None) -> None:
        self.token = token.encode()
        self.hosts = None if hosts is None else frozenset(map(host_name, hosts))
        self._is_ours = lru_cache(_KEPT)(partial(_is_one_of, self.hosts or frozenset()))

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why a request is not answered; None where it is."""
        headers: Headers = scope["headers"]
        if self.token and not _is_open(scope["path"]) and not self._has_token(headers):
            return RequestError("send the token of this server: Authorization: Bearer …", 401)
        return None if self.hosts is None else self._foreign(headers, scope.get("http_version", "1.1"))

    def _has_token(self, headers: Headers) -> bool:
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, given = sent.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token)

    def _foreign(self, headers: Headers, version: str) -> RequestError | None:
        """Why host and origin will not do. Only HTTP/1.0, which no browser speaks, may leave the host out."""
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
    """A name or address in lower case, without brackets and port. Raises UserError for anything else."""
    bare_ipv6 = given.count(":") > 1 and not given.startswith("[")
    name = _name((f"[{given}]" if bare_ipv6 else given).encode())
    if not name:
        raise UserError(f"{given!r} is no name of a host; expected one such as search.example.org")
    return name


def _is_one_of(hosts: frozenset[str], authority: bytes) -> bool:
    name = _name(authority)
    return is_loopback(name) or name in hosts


def _name(authority: bytes) -> str:
    """The host in `host:port`, lower-case; empty where it is none."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].decode().strip("[]") if match else ""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/health/")


def _refused(whom: str, authority: bytes) -> RequestError:
    name = _name(authority) or "NAME"
    return RequestError(
        f"start this server with --allow-host {name}, or with SRL_SEARCH_TOKEN set: without, it does not "
        f"answer {whom}",
        403,
    )


def _shown(value: bytes) -> str:
    return repr(one_line(value.decode("latin-1"), _SHOWN))
