"""A search API that is a function, and retrievers that ask it."""

import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from srl_web import caller
from srl_web.options import Options
from srl_web.retriever import WebRetriever

sys.path.insert(0, str(Path(__file__).parent))  # for web_answers

KEY = "s3cr3t/key+of=tests"
QUICK = {"cache": None, "rate": None, "timeout_s": 60}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Keys for every provider, no proxy, no pause between attempts, and a user's cache of the test's own."""
    for name in ("SERPAPI_API_KEY", "GOOGLE_API_KEY", "SERPER_API_KEY", "BRAVE_API_KEY", "TAVILY_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("GOOGLE_CSE_ID", "engine-id")
    monkeypatch.setenv("MY_KEY", KEY)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(caller, "BACKOFF_S", 0)


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def web() -> Callable[..., WebRetriever]:
    """`web(answer, **options)`: an open retriever whose API is the function `answer(request)`.

    The requests as they leave this machine, keys and all, are in its `asked`.
    """

    def make(answer: Callable[[httpx.Request], httpx.Response] | None = None, **options) -> WebRetriever:
        if not {"provider", "api"} & set(options):
            options["provider"] = "serper"
        asked: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return answer(request)

        transport = httpx.MockTransport(handle) if answer else None
        retriever = WebRetriever(Options(**{**QUICK, **options}), transport).open(None)
        retriever.asked = asked
        return retriever

    return make
