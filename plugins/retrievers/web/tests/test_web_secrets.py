"""The key is in the request and nowhere else: not in a log, an error, a manifest, a cache or a ledger."""

from __future__ import annotations

import logging
import traceback

import httpx
import pytest

from srl.errors import UserError
from srl.index import build_index, live_index, open_index
from srl.index.retriever import Fault
from srl_web.api import Api
from srl_web.options import Options
from srl_web.providers import PROVIDERS
from srl_web.retriever import WebRetriever
from srl_web.secrets import Secrets
from srl_web.trusted_apis import check_trusted, trust


def clear(text: str) -> bool:
    return "s3cr3t" not in text


def echo(request):
    """An API that repeats the whole request, key and all, wherever it can."""
    seen = f"{request.url} {dict(request.headers)} {request.content!r}"
    payload = {
        "organic_results": [{"title": seen, "snippet": seen, "link": f"https://a.test/?{request.url}"}],
        "organic": [{"title": seen, "snippet": seen, "link": f"https://a.test/?{request.url}"}],
        "items": [{"title": seen, "snippet": seen, "link": str(request.url)}],
        "web": {"results": [{"title": seen, "description": seen, "url": str(request.url)}]},
        "results": [{"title": seen, "content": seen, "url": str(request.url)}],
    }
    return httpx.Response(200, json=payload)


def scold(request):
    return httpx.Response(401, json={"error": f"Invalid key in {request.url} {dict(request.headers)}"})


def redirect(request):
    return httpx.Response(302, headers={"Location": str(request.url) + "&again=1"})


def fall_over(request):
    raise httpx.ConnectError(f"cannot reach {request.url}", request=request)


def break_off(request):
    raise httpx.ReadError(f"lost {request.url}", request=request)


def html(request):
    return httpx.Response(200, html=f"<h1>{request.url}</h1>")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("answer", [scold, redirect, fall_over, break_off, html])
def test_the_key_is_in_no_log_error_or_file(web, caplog, capfd, tmp_path, provider, answer):
    caplog.set_level(logging.DEBUG)
    retriever = web(
        answer,
        provider=provider,
        cache=tmp_path / "cache.sqlite",
        ledger=tmp_path / "spent.sqlite",
        attempts=2,
    )
    (outcome,) = retriever.outcomes(["x"], 3)
    shown = [repr(outcome), str(outcome), repr(retriever), repr(retriever.options)]
    shown += [repr(value) for name, value in vars(retriever).items() if name != "asked"]
    if isinstance(outcome, Fault):
        shown += traceback.format_exception(outcome)
    retriever.close()
    assert retriever.asked
    assert any(not clear(f"{request.url} {request.headers.raw}") for request in retriever.asked)
    written = "".join(path.read_bytes().decode("latin-1") for path in tmp_path.iterdir() if path.is_file())
    assert clear("".join(shown)), shown
    assert clear(caplog.text)
    assert clear("".join(capfd.readouterr()))
    assert clear(written)


def test_the_key_is_in_no_log_when_a_real_server_redirects(web, loopback, caplog, key):
    caplog.set_level(logging.DEBUG)

    def handle(connection):
        path = connection.recv(65536).split(b" ")[1]
        head = (
            b"HTTP/1.1 301 Moved\r\nLocation: https://elsewhere.test"
            + path
            + b"\r\nContent-Length: 0\r\n\r\n"
        )
        connection.sendall(head)
        connection.close()

    server = loopback(handle)
    api = {"url": server.url, "params": {"q": "{query}", "api_key": "{key}"}, "key_env": "MY_KEY"}
    (fault,) = web(api=api).outcomes(["x"], 3)
    assert fault.status == "failed"
    assert "HTTP Request: GET" in caplog.text
    assert clear(caplog.text)
    assert clear(str(fault))


def test_an_index_that_was_built_and_searched_has_no_key_in_it(tmp_path, key):
    build_index(None, tmp_path / "index", "web", {"provider": "google", "country": "us"})
    open_index(tmp_path / "index")
    files = [path for path in (tmp_path / "index").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"manifest.json", ".verified.json"}
    assert all(clear(path.read_text()) for path in files)


def test_results_are_not_altered_to_hide_a_key(web, key):
    ((hit, *_),) = web(echo, provider="serper").search(["x"], 3)
    assert key in hit.passage.contents


def test_the_repr_of_secrets_has_no_values(key):
    assert repr(Secrets({"K": key})) == "Secrets(K)"


@pytest.mark.parametrize(
    ("provider", "variable"),
    [
        ("serpapi", "SERPAPI_API_KEY"),
        ("google", "GOOGLE_API_KEY"),
        ("google", "GOOGLE_CSE_ID"),
        ("serper", "SERPER_API_KEY"),
        ("brave", "BRAVE_API_KEY"),
        ("tavily", "TAVILY_API_KEY"),
    ],
)
def test_a_missing_key_is_said_when_opening(monkeypatch, provider, variable):
    for value in (None, "", "  "):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
        with pytest.raises(UserError, match=f"web search needs {variable}.*export {variable}=…"):
            WebRetriever(Options(provider=provider)).open(None)


def test_a_key_with_a_line_break_in_it_is_not_repeated(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "first\nsecond")
    with pytest.raises(UserError, match="SERPER_API_KEY has characters") as caught:
        WebRetriever(Options(provider="serper")).open(None)
    assert "second" not in str(caught.value)


def test_another_variable_may_hold_the_key(web, monkeypatch, key):
    monkeypatch.delenv("SERPER_API_KEY")
    retriever = web(echo, key_env="MY_KEY")
    retriever.search(["x"], 1)
    assert retriever.asked[0].headers["X-API-KEY"] == key


def test_the_name_of_that_variable_is_no_part_of_the_index(tmp_path):
    digests = {
        build_index(None, tmp_path / name, "web", {"provider": "serper", **options}).digest
        for name, options in {"a": {}, "b": {"key_env": "MY_KEY", "rate": 1, "cache": None}}.items()
    }
    assert len(digests) == 1
    assert (
        build_index(None, tmp_path / "c", "web", {"provider": "serper", "country": "us"}).digest
        not in digests
    )


def test_an_index_of_somebody_else_gets_no_key_that_the_user_does_not_name(tmp_path, monkeypatch):
    """Another cache directory stands for another account."""
    monkeypatch.setenv("CLOUD_SECRET", "s3cr3t-of-the-cloud")
    headers = {"X-Key": "{key}", "X-Other": "{env:CLOUD_SECRET}"}
    api = {
        "url": "https://api.test/find",
        "headers": headers,
        "params": {"q": "{query}"},
        "key_env": "MY_KEY",
    }
    build_index(None, tmp_path / "index", "web", {"api": api})
    open_index(tmp_path / "index", {"cache": None})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    for named in ([], ["MY_KEY"]):
        with pytest.raises(
            UserError, match=r"sends .*CLOUD_SECRET to api\.test, and the index was not built"
        ) as told:
            open_index(tmp_path / "index", {"cache": None, "env": named})
    assert "--set env=[MY_KEY,CLOUD_SECRET]" in str(told.value)
    assert clear(str(told.value))
    open_index(tmp_path / "index", {"cache": None, "env": ["MY_KEY", "CLOUD_SECRET"]})
    live_index("web", {"api": api, "cache": None})


def test_a_changed_address_or_variable_is_not_the_one_that_is_trusted(tmp_path):
    api = Api(url="https://a.test/x", headers={"X-Key": "{key}"}, key_env="MY_KEY")
    trust(api)
    check_trusted(api, [])
    for other in (
        api.model_copy(update={"url": "https://b.test/x"}),
        api.model_copy(update={"key_env": "HOME_KEY"}),
    ):
        with pytest.raises(UserError, match="was not built here"):
            check_trusted(other, [])
