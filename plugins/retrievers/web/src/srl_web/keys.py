"""API keys: read from the environment, and added to a request in the last step before the socket.

httpx logs the URL of each request, and its exceptions contain the request. So requests are built without
keys, and the transport sends a copy with the keys.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from srl.errors import UserError, parsing
from srl.safe import keep_secret
from srl_web.api import Api, secret_part

logging.getLogger("httpcore").setLevel(logging.INFO)
"""Its DEBUG lines show response headers, and that of a redirect may contain the URL with the key."""


def read_keys(api: Api) -> dict[str, str]:
    """The environment variables that `api` needs; from now on their values are hidden in errors and logs.

    Raises UserError that names a variable that is not set, or that cannot be sent.
    """
    keep_secret(api.environment())
    keys = {name: os.environ.get(name, "").strip() for name in api.environment()}
    for name, value in keys.items():
        if not value:
            raise UserError(
                f"web search needs the environment variable {name}, and it is not set",
                key="retriever.web.key_env",
                hint=f"export {name}=…, or name another variable with key_env",
            )
        if not value.isascii() or not value.isprintable():
            raise UserError(
                f"{name} has characters that are not allowed in a key", key="retriever.web.key_env"
            )
    return keys


def check_named(api: Api, names: Collection[str | None]) -> None:
    """Raise UserError if the `api` of an index sends environment variables that are not in `names`.

    An index says which API it asks, and an API which variables are sent to its host. So an index of somebody
    else could send any of the user's secrets anywhere.
    """
    unnamed = [name for name in api.environment() if name not in names]
    if unnamed:
        raise UserError(
            f"the api of this index sends {', '.join(unnamed)} to {urlsplit(api.url).hostname}",
            key="retriever.web.env",
            hint=f"if you trust it: --set env=[{','.join(api.environment())}]",
        )


class SigningTransport(httpx.BaseTransport):
    """Sends a copy of each request with the keys added, through the proxy of the environment if there is one.

    `inner` replaces the connection in tests. Raises UserError if proxy or certificates are invalid.
    """

    def __init__(self, api: Api, keys: Mapping[str, str], inner: httpx.BaseTransport | None = None) -> None:
        self._params, self._headers, _ = secret_part(api, keys)
        host, scheme = urlsplit(api.url).hostname or "", urlsplit(api.url).scheme
        proxy = None if proxy_bypass(host) else getproxies().get(scheme)
        with parsing(f"connecting to {host} with {scheme.upper()}_PROXY and SSL_CERT_FILE"):
            self._inner = inner or httpx.HTTPTransport(proxy=proxy)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = httpx.Headers(request.headers)
        headers.update(self._headers)
        url = request.url.copy_merge_params(self._params)
        signed = httpx.Request(
            request.method, url, headers=headers, stream=request.stream, extensions=request.extensions
        )
        return self._inner.handle_request(signed)

    def close(self) -> None:
        self._inner.close()
