"""The key is in the request and nowhere else: not in a log, an error, a manifest or a cache."""

import logging
import traceback

import httpx
import pytest

from srl.errors import UserError
from srl.index import build_index, live_index, open_index
from srl.index.retriever import Fault
from srl_web.options import Options
from srl_web.providers import PROVIDERS
from srl_web.retriever import WebRetriever


def clear(*texts: object) -> bool:
    return "s3cr3t" not in "".join(map(str, texts))


def breaks(error: type[httpx.RequestError]):
    def answer(request):
        raise error(f"cannot reach {request.url}", request=request)

    return answer


ANSWERS = {
    "scolds": lambda r: httpx.Response(401, json={"error": f"Invalid key in {r.url} {dict(r.headers)}"}),
    "redirects": lambda r: httpx.Response(302, headers={"Location": f"{r.url}&again=1"}),
    "is a page": lambda r: httpx.Response(200, html=f"<h1>{r.url} {dict(r.headers)}</h1>"),
    "is not reached": breaks(httpx.ConnectError),
    "breaks off": breaks(httpx.ReadError),
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_key_is_in_no_log_error_or_file(web, caplog, capfd, tmp_path, provider, answer):
    caplog.set_level(logging.DEBUG)
    retriever = web(answer, provider=provider, cache=tmp_path / "cache.sqlite", attempts=2)
    (outcome,) = retriever.outcomes(["x"], 3)
    assert isinstance(outcome, Fault)
    assert any(not clear(request.url, request.headers.raw) for request in retriever.asked)
    assert clear(repr(outcome), outcome, *traceback.format_exception(outcome), repr(retriever.options))
    assert clear(caplog.text, *capfd.readouterr())
    assert clear(*(path.read_bytes().decode("latin-1") for path in tmp_path.iterdir() if path.is_file()))


def test_an_index_has_no_key_and_is_the_same_whatever_variable_has_it(tmp_path):
    def build(name, **options):
        return build_index(None, tmp_path / name, "web", {"provider": "google", **options})

    one, same = build("one"), build("same", key_env="MY_KEY", rate=1, cache=None)
    assert one.digest == same.digest != build("other", country="us").digest
    open_index(tmp_path / "one")
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert files
    assert clear(*(path.read_text() for path in files))


@pytest.mark.parametrize("value", [None, "", "  ", "first\nsecond"])
@pytest.mark.parametrize(
    ("provider", "variable"),
    [(name, variable) for name, api in PROVIDERS.items() for variable in api.environment()],
)
def test_a_key_that_is_missing_or_cannot_be_sent_is_named(monkeypatch, provider, variable, value):
    monkeypatch.delenv(variable)
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=variable) as caught:
        WebRetriever(Options(provider=provider)).open(None)
    assert "second" not in str(caught.value)


def test_the_api_of_an_index_gets_no_key_that_the_user_does_not_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CLOUD_SECRET", "s3cr3t-of-the-cloud")
    api = {
        "url": "https://api.test/find",
        "headers": {"X-Key": "{key}", "X-Other": "{env:CLOUD_SECRET}"},
        "params": {"q": "{query}"},
        "key_env": "MY_KEY",
    }
    build_index(None, tmp_path / "index", "web", {"api": api})
    for named in ([], ["MY_KEY"]):
        with pytest.raises(UserError, match="CLOUD_SECRET") as caught:
            open_index(tmp_path / "index", {"cache": None, "env": named})
        assert caught.value.key == "retriever.web.env"
        assert clear(caught.value)
    open_index(tmp_path / "index", {"cache": None, "env": ["MY_KEY", "CLOUD_SECRET"]})
    open_index(tmp_path / "index", {"cache": None, "env": ["CLOUD_SECRET"], "key_env": "MY_KEY"})
    live_index("web", {"api": api, "cache": None})


def test_httpcore_shows_no_headers_in_debug_logs():
    assert not logging.getLogger("httpcore.http11").isEnabledFor(logging.DEBUG)
