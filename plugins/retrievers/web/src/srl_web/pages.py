"""Fetches the pages of results, and extracts their text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import httpx

from srl.errors import UserError
from srl.install import pip_install
from srl_web.addresses import PublicTransport
from srl_web.api import Result
from srl_web.cache import Cache
from srl_web.hits import around, encodable, plain, share_of
from srl_web.options import Options
from srl_web.secrets import no_cookies

log = logging.getLogger("srl.web")

MAX_TEXT = 200_000
"""Maximum length of a page's text in characters, also in the cache."""
_LEAST_SHARE = 0.3
_READABLE = ("text/html", "application/xhtml+xml", "text/plain")


def check_extractor() -> None:
    """Import the library that extracts text, before the first query. Raises UserError if it is missing."""
    try:
        import trafilatura  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"pages=true needs trafilatura ({error}); type: {pip_install('pages', of='srl-search-web')}"
        ) from error


class PageReader:
    """Finds the parts of pages that contain the results' snippets. For one event loop."""

    def __init__(self, options: Options, cache: Cache) -> None:
        self._options, self._cache = options, cache
        self._slots = asyncio.Semaphore(options.concurrency)
        self._client = httpx.AsyncClient(
            transport=PublicTransport(options.allow_private),
            timeout=options.page_timeout_s,
            follow_redirects=True,
            max_redirects=5,
            cookies=no_cookies(),
            headers={"User-Agent": "srl-search-web", "Accept-Encoding": "gzip"},
        )

    async def parts(self, results: Iterable[Result], query: str) -> dict[str, str]:
        """By URL, the part of each page around its snippet. Pages without one are logged and omitted.

        `page_timeout_s` limits the time for all pages together.
        """
        by_url = {result.url: result for result in results if result.url.startswith(("http://", "https://"))}
        tasks = {asyncio.create_task(self._part(one, query), name=url) for url, one in by_url.items()}
        if not tasks:
            return {}
        done, late = await asyncio.wait(tasks, timeout=self._options.page_timeout_s)
        for task in late:
            task.cancel()
            log.debug("%s: too slow, its snippet is used", task.get_name())
        await asyncio.gather(*late, return_exceptions=True)
        return {task.get_name(): task.result() for task in done if task.result()}

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _part(self, result: Result, query: str) -> str:
        """The part of the page around its snippet; empty if the page is unreadable or lacks the snippet."""
        try:
            text = self._cache.page(result.url)
            if text is None:
                async with self._slots:
                    text = await self._text(result.url)
                self._cache.keep_page(result.url, text)
        except Exception as error:  # foreign data may raise anything; the snippet is used instead
            log.debug("%s: %s, its snippet is used", result.url, str(error) or type(error).__name__)
            return ""
        wanted = result.text or query
        part = around(text, wanted, self._options.page_chars)
        if share_of(part, wanted) < _LEAST_SHARE:
            log.debug("%s: the page does not contain its snippet, which is used", result.url)
            return ""
        return part

    async def _text(self, url: str) -> str:
        async with self._client.stream("GET", url) as response:
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if response.status_code != 200:
                raise _UnreadableError(f"HTTP {response.status_code}")
            if kind not in _READABLE:
                raise _UnreadableError(f"{kind or 'no content type'} is not supported")
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) >= self._options.page_bytes:
                    break
            encoding = response.charset_encoding
        page = bytes(body[: self._options.page_bytes])
        text = await asyncio.to_thread(readable, page, encoding, kind == "text/plain")
        return encodable(text)[:MAX_TEXT]


class _UnreadableError(Exception):
    """Why the text of a page cannot be used."""


def readable(page: bytes, encoding: str | None, is_plain: bool = False) -> str:
    """The main text of a page, one paragraph per line; may be empty."""
    content: Any = page
    if encoding or is_plain:
        try:
            content = page.decode(encoding or "utf-8", "replace")
        except LookupError:
            content = page.decode("utf-8", "replace")
    if is_plain:
        return plain(content)
    import trafilatura

    try:
        return plain(trafilatura.extract(content, include_comments=False) or "")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
