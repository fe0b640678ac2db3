"""An API of one's own, described by a mapping, and the options around it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import httpx
import pytest
import yaml

from srl.config.keys import takes
from srl.errors import UserError
from srl.plugins import manager
from srl.testing import check_provider, checks
from srl_web.api import Api, at, open_part, read_results, secret_part
from srl_web.options import Options, provided
from srl_web.providers import PROVIDERS


def replies(payload):
    return lambda request: httpx.Response(200, json=payload)


OWN = """
url: http://api.test/v2/find
method: POST
headers: {Authorization: "Bearer {key}"}
key_env: MY_KEY
body: {text: "{query}", limit: "{k}", filter: {lang: "{language}", where: "{country}"}, tags: [a, "{k}"]}
results: data.hits
title: document.title
text: [document.abstract, document.highlights]
link: document.links.0.url
max_k: 50
"""


def test_any_json_api_is_asked_by_a_mapping_in_a_file(web, key, tmp_path):
    (tmp_path / "my-api.yaml").write_text(OWN)
    document = {
        "title": "T",
        "abstract": "A.",
        "highlights": ["h1", "h2"],
        "links": [{"url": "https://u.test/"}],
    }
    retriever = web(
        replies({"data": {"hits": [{"document": document}]}}),
        api=str(tmp_path / "my-api.yaml"),
        language="it",
    )
    (hit,) = retriever.search(["{key} {k}"], 4)[0]
    assert (hit.passage.id, hit.passage.contents) == ("https://u.test/", '"T"\nA. h1 h2')
    (request,) = retriever.asked
    assert json.loads(request.content) == {
        "text": "{key} {k}",
        "limit": 4,
        "filter": {"lang": "it"},
        "tags": ["a", 4],
    }
    assert request.headers["Authorization"] == f"Bearer {key}"


def test_the_mapping_that_the_readme_shows_is_one():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    block = readme.split("`my-api.yaml`, for an imaginary API:\n\n")[1].split("\n\n")[0]
    api = Api.model_validate(yaml.safe_load(textwrap.dedent(block)))
    assert api.environment() == ["EXAMPLE_KEY"]
    assert api.uses("language")


def test_a_key_may_stand_anywhere_in_the_body(web, key):
    api = {
        "url": "http://api.test/",
        "method": "POST",
        "body": {
            "request": {"q": "{query}", "auth": {"token": "{key}", "kind": "plain"}},
            "ids": ["{env:GOOGLE_CSE_ID}", "fixed"],
        },
        "key_env": "MY_KEY",
    }
    retriever = web(replies({"results": []}), api=api)
    retriever.search(["x"], 1)
    assert json.loads(retriever.asked[0].content) == {
        "request": {"q": "x", "auth": {"token": key, "kind": "plain"}},
        "ids": ["engine-id", "fixed"],
    }
    assert retriever.asked[0].headers["Content-Length"] == str(len(retriever.asked[0].content))


def test_the_open_part_of_a_request_has_no_key():
    values = {"query": "QUERY", "k": 3, "language": None, "country": None, "answers": False}
    for api in PROVIDERS.values():
        secret = secret_part(api, dict.fromkeys(api.environment(), "SECRET"))
        assert "SECRET" in repr(secret)
        assert "QUERY" not in repr(secret)
        assert "QUERY" in repr(open_part(api, {**values, "key": None}))
        assert "key" not in repr(open_part(api, values)).lower()


@pytest.mark.parametrize(
    ("path", "found"),
    [("", {"a": [{"b": 1}]}), ("a.0.b", 1), ("a.1.b", None), ("a.b", None), ("a.0.b.c", None)],
)
def test_dotted_paths_lead_into_objects_and_lists(path, found):
    assert at({"a": [{"b": 1}]}, path) == found


def test_items_that_are_no_objects_are_passed_over():
    api = Api(url="http://api.test/")
    assert len(read_results(api, {"results": [None, 3, {"title": "a"}, []]})) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "choose one provider (brave, google, serpapi, serper, tavily)"),
        ({"provider": "bing"}, "no provider 'bing': installed are brave, google, serpapi, serper, tavily"),
        ({"provider": "serper", "api": {"url": "http://a.test"}}, "choose one provider"),
        ({"provider": "tavily", "language": "en"}, "tavily has no language"),
        ({"provider": "brave", "answers": True}, "brave gives no direct answers"),
        ({"provider": "serper", "max_cost": 5}, "max_cost needs cost_per_request"),
        ({"api": {"url": "ftp://a.test"}}, "expected http://HOST/PATH"),
        ({"api": {"url": "https://a.test/{query}"}}, "placeholders into params"),
        ({"api": {"url": "https://a.test/?api_key=s3cr3t"}}, "keys into the environment"),
        ({"api": {"url": "https://s3cr3t@a.test/"}}, "keys into the environment"),
        (
            {"api": {"url": "https://a.test/", "headers": {"X-API-KEY": "s3cr3t"}}},
            "'X-API-KEY' contains a key",
        ),
        ({"api": {"url": "https://a.test/", "params": {"api_key": "s3cr3t"}}}, "write {key} there"),
        (
            {"api": {"url": "https://a.test/", "body": {"auth": {"token": "s3cr3t"}}}},
            "'token' contains a key",
        ),
        ({"api": {"url": "https://a.test/", "headers": {"Authorization": "Bearer s3cr3t"}}}, "set key_env"),
        ({"api": {"url": "https://a.test/", "headers": {"X-Key": "{key}"}}}, "add key_env"),
        (
            {"api": {"url": "https://a.test/", "params": {"q": "{key}-{query}"}, "key_env": "K"}},
            "'{key}-{query}' contains a key and other placeholders",
        ),
        ({"api": {"url": "https://a.test/", "result": "x"}}, "no option retriever.web.api.result"),
        ({"api": "no-such-file.yaml"}, "no-such-file.yaml cannot be read: No such file"),
        ({"provider": "serper", "concurency": 3}, "did you mean 'concurrency'?"),
    ],
)
def test_options_that_do_not_fit_are_one_clear_line(options, said):
    with pytest.raises(UserError) as caught:
        manager.load("retriever", "web", options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_money_is_turned_into_requests():
    def cap(**options):
        return Options(provider="serper", **options).cap

    assert cap() == 1000
    assert cap(max_requests=None) is None
    assert cap(max_cost=3, cost_per_request=0.001) == 1000
    assert cap(max_requests=None, max_cost=0.3, cost_per_request=0.1) == 3
    assert cap(max_requests=2, max_cost=0.3, cost_per_request=0.1) == 2


def test_every_option_can_be_written_into_the_docs():
    for field in Options.model_fields.values():
        assert takes(field)
        assert json.dumps(field.default)
        assert field.description


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_conforms_and_is_a_plugin(name):
    check_provider(name)
    assert manager.load("provider", name) is PROVIDERS[name]


@pytest.mark.parametrize(
    ("description", "check"),
    [
        ({"url": "http://a.test/", "params": {"q": "{query}", "n": "{k}"}}, "asks over https"),
        ({"url": "https://a.test/", "params": {"n": "{k}"}}, "sends the query"),
        (
            {"url": "https://a.test/", "params": {"q": "{query}", "n": "{k}"}, "key_env": "K"},
            "names the variable of its key",
        ),
    ],
)
def test_provider_that_lacks_something_is_found_out(description, check):
    assert [one.name for one in checks("provider", Api(**description)) if not one.passed] == [check]


@pytest.mark.parametrize("host", ["127.0.0.1:8888", "localhost:8888", "192.168.0.7"])
def test_provider_on_this_network_may_be_http_and_need_not_be_told_how_many(host):
    found = checks("provider", Api(url=f"http://{host}/search", params={"q": "{query}"}))
    assert all(one.passed for one in found)


def test_provider_of_the_users_own_module_is_asked_and_fixes_the_identity(web, tmp_path, monkeypatch):
    source = "from srl_web.api import Api\nown = Api(url='https://own.test/', params={'q': '{query}'})"
    (tmp_path / "provider_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = {"results": [{"title": "T", "snippet": "S", "link": "https://t.test"}]}
    retriever = web(lambda request: httpx.Response(200, json=answer), provider="provider_of_a_test:own")
    ((hit,),) = retriever.search(["lighthouse"], 3)
    assert hit.passage.id == "https://t.test"
    assert str(retriever.asked[0].url) == "https://own.test/?q=lighthouse"
    assert list(retriever.identity()) == ["provider"]
    assert web(lambda request: httpx.Response(200, json=answer)).identity() == {}
    with pytest.raises(UserError, match=r"^sys:path is not a valid provider: expected an srl_web\.api\.Api$"):
        provided("sys:path")
