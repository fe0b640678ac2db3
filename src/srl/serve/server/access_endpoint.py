"""`POST /access`: passages by their id or web address, as ASearcher requests them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from srl.index import Index
from srl.serve.server.answer_cache import document
from srl.serve.wire import Limits, RequestError, read_json
from srl.trajectory import Passage


def read_urls(body: bytes, limits: Limits) -> list[str]:
    """The urls of a request. Raises RequestError."""
    found = read_json(body)
    urls = found.get("urls") if isinstance(found, dict) else None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise RequestError('the body must be a JSON object like {"urls": ["…"]}')
    if len(urls) > limits.queries:
        raise RequestError(f"{len(urls):,} urls; at most {limits.queries:,} per request", 413)
    return urls


def write_pages(urls: Sequence[str], indexes: Sequence[Index]) -> bytes:
    """`{"result": [{"id", "contents", "url"} or null, …]}`; `errors` lists every unknown url."""
    pages = {url: _page(url, indexes) for url in urls}
    sent = {url: b"null" if page is None else document(page, url) for url, page in pages.items()}
    parts = [b'{"result": [', b", ".join([sent[url] for url in urls]), b"]"]
    unknown = [url for url, page in pages.items() if page is None]
    if unknown:
        errors = [{"url": url, "detail": "no passage has this id"} for url in unknown]
        parts += [b', "errors": ', json.dumps(errors).encode()]
    return b"".join([*parts, b"}"])


def _page(url: str, indexes: Iterable[Index]) -> Passage | None:
    """The passage with this id in the first index that has it; also tries MediaWiki's other URL form."""
    for name in dict.fromkeys((url, url.replace("index.php/", "index.php?title="))):
        for index in indexes:
            try:
                return index.passage(name)
            except (KeyError, UnicodeEncodeError):
                continue
    return None
