"""API keys: read from the environment, added to requests by the transport, hidden in errors and logs.

httpx logs the URL of each request, and its exceptions contain the request. So requests are built without
keys, and the transport sends a copy with the keys.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.request import getproxies, proxy_bypass

import httpx

from srl.errors import UserError
from srl.safe_text import keep_secret
from srl.serve.client import is_loopback
from srl_web.api import Api, Call, merged, secret_part

logging.getLogger("httpcore").setLevel(logging.INFO)
"""Its DEBUG lines show response headers, and that of a redirect may contain the URL with the key."""


class Secrets:
    """The values of the environment variables that an API needs. Its `repr` has no values."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = dict(values)

    @classmethod
    def of(cls, api: Api) -> Secrets:
        """Those of `api`, which are from now on hidden in errors and logs.

        Raises UserError that names a variable that is not set.
        """
        keep_secret(api.environment())
        found = {name: os.environ.get(name, "").strip() for name in api.environment()}
        for name, value in found.items():
            if not value:
                raise UserError(
                    f"web search needs {name}, and it is not set; type: export {name}=… "
                    "(or name another variable with the option key_env)"
                )
            if not value.isascii() or not value.isprintable():
                raise UserError(f"{name} has characters that are not allowed in a key; set it again")
        return cls(found)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self.values)})"


class SigningTransport(httpx.AsyncBaseTransport):
    """Sends a copy of each request with the keys added."""

    def __init__(self, api: Api, secrets: Secrets, inner: httpx.AsyncBaseTransport) -> None:
        self._secret: Call = secret_part(api, secrets.values)
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._inner.handle_async_request(self._signed(request))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _signed(self, request: httpx.Request) -> httpx.Request:
        headers = httpx.Headers(request.headers)
        headers.update(self._secret.headers)
        content = request.content
        if self._secret.body:
            content = json.dumps(merged(json.loads(content), self._secret.body)).encode()
            headers["Content-Length"] = str(len(content))
        url = request.url.copy_merge_params(self._secret.params)
        return httpx.Request(
            request.method, url, headers=headers, content=content, extensions=request.extensions
        )


def api_transport(url: str) -> httpx.AsyncBaseTransport:
    """A transport to the API's host, through the proxy of the environment if there is one.

    Raises UserError if the environment's proxy or certificates are invalid.
    """
    parsed = httpx.URL(url)
    direct = is_loopback(parsed.host) or bool(proxy_bypass(parsed.host))
    proxy = None if direct else getproxies().get(parsed.scheme)
    try:
        return httpx.AsyncHTTPTransport(proxy=proxy)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(
            f"no connection to {parsed.host} can be prepared ({error}); check the variables "
            f"{parsed.scheme.upper()}_PROXY and SSL_CERT_FILE"
        ) from error


def no_cookies() -> CookieJar:
    """A cookie jar that stores no cookies, so that requests are independent of each other."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))
