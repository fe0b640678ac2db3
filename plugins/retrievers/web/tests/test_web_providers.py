"""What each API is asked and what is made of its answers; an API of one's own; options that do not fit."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from web_answers import ANSWERS, EMPTY, replies

from srl.errors import UserError
from srl.index.retriever import Fault
from srl.plugins import manager
from srl_web.api import read_answers, read_results
from srl_web.hits import cleaned, hits_of
from srl_web.providers import PROVIDERS

QUESTION = "where is the lighthouse?"
REQUESTS = {  # options, method and URL, parameters, body, the header with the key
    "serpapi": (
        {"language": "en", "country": "us"},
        "GET https://serpapi.com/search.json",
        {"engine": "google", "q": QUESTION, "num": "3", "hl": "en", "gl": "us", "api_key": "KEY"},
        None,
        None,
    ),
    "google": (
        {"language": "en", "country": "us"},
        "GET https://www.googleapis.com/customsearch/v1",
        {"q": QUESTION, "num": "3", "hl": "en", "lr": "lang_en", "gl": "us", "cx": "engine-id", "key": "KEY"},
        None,
        None,
    ),
    "serper": (
        {"country": "us"},
        "POST https://google.serper.dev/search",
        {},
        {"q": QUESTION, "num": 3, "gl": "us"},
        ("X-API-KEY", "KEY"),
    ),
    "brave": (
        {"language": "en", "country": "US"},
        "GET https://api.search.brave.com/res/v1/web/search",
        {
            "q": QUESTION, "count": "3", "search_lang": "en", "country": "US", "text_decorations": "false",
            "result_filter": "web",
        },
        None,
        ("X-Subscription-Token", "KEY"),
    ),
    "tavily": (
        {"answers": True, "country": "italy"},
        "POST https://api.tavily.com/search",
        {},
        {
            "query": QUESTION, "max_results": 3, "search_depth": "basic", "include_answer": True,
            "country": "italy",
        },
        ("Authorization", "Bearer KEY"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
def test_each_api_is_asked_as_it_documents(web, key, provider):
    options, where, params, body, header = REQUESTS[provider]
    retriever = web(replies(ANSWERS[provider]), provider=provider, **options)
    retriever.search([QUESTION], 3)
    (request,) = retriever.asked
    assert f"{request.method} {request.url.copy_with(query=None)}" == where
    assert dict(request.url.params) == {
        name: key if value == "KEY" else value for name, value in params.items()
    }
    assert (json.loads(request.content) if request.content else None) == body
    assert header is None or request.headers[header[0]] == header[1].replace("KEY", key)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_results_are_hits_in_the_form_of_passages(web, provider):
    first, second = web(replies(ANSWERS[provider]), provider=provider).search(["x"], 3)[0]
    assert (first.passage.id, first.passage.contents) == ("https://one.test/", '"One"\nThe first.')
    assert (second.passage.id, second.passage.contents) == ("https://two.test/", '"Two"\nThe second.')
    assert (first.score, second.score) == (1.0, 0.5)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_results_are_an_empty_list_and_json_of_another_shape_is_a_fault(web, provider):
    assert web(replies(EMPTY[provider]), provider=provider).outcomes(["x"], 3) == [[]]
    for payload in ({}, [], None, "text", 3, {"results": "none"}, {"organic": {}}, {"error": "we broke"}):
        (fault,) = web(replies(payload), provider=provider).outcomes(["x"], 3)
        assert isinstance(fault, Fault), payload
        assert fault.status == "failed"
        assert "we broke" in str(fault) or payload != {"error": "we broke"}


@pytest.mark.parametrize(
    ("title", "snippet", "contents"),
    [
        ("A <b>bold</b> title", "it&#39;s <strong>x</strong> &amp; y", '"A bold title"\nit\'s x & y'),
        ("two\nlines", "tab\there\x00and\x1bthere", '"two lines"\ntab here and there'),
        ("if a < b > c", "vector<int> stays", '"if a < b > c"\nvector<int> stays'),
        ("lone \ud800 surrogate", "ok", '"lone ? surrogate"\nok'),
        (None, 42, '""\n42'),
        ("only a title", None, '"only a title"\n'),
    ],
)
def test_texts_are_plain_and_can_be_written(web, title, snippet, contents):
    body = json.dumps({"organic": [{"title": title, "snippet": snippet, "link": "https://a.test/"}]})
    (hit,) = web(lambda request: httpx.Response(200, content=body.encode())).search(["x"], 3)[0]
    assert hit.passage.contents == contents
    hit.passage.contents.encode()


NAMES = [name for payload in (*ANSWERS.values(), {"title": 0, "snippet": 0, "url": 0}) for name in payload]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150)
@given(payload=json_values, provider=st.sampled_from(sorted(PROVIDERS)), answers=st.booleans())
def test_whatever_json_comes_it_has_hits_that_can_be_written_or_is_refused(payload, provider, answers):
    api = PROVIDERS[provider]
    try:
        results = cleaned(read_results(api, payload) + (read_answers(api, payload) if answers else []))
    except ValueError:
        return
    hits = hits_of(results, 3)
    assert len({hit.passage.id for hit in hits}) == len(hits) <= 3
    for hit in hits:
        assert hit.passage.id.strip()
        (hit.passage.id + hit.passage.contents).encode()


OWN = """
url: http://api.test/v2/find
method: POST
headers: {Authorization: "Bearer {key}"}
params: {engine: "{env:GOOGLE_CSE_ID}"}
key_env: MY_KEY
body: {text: "{query}", limit: "{k}", filter: {lang: "{language}", where: "{country}"}, tags: [a, "{k}"]}
results: data.hits
title: document.title
text: [document.abstract, document.highlights]
link: document.links.0.url
"""


def test_any_json_api_is_asked_by_a_mapping_in_a_file(web, key, tmp_path):
    (tmp_path / "my-api.yaml").write_text(OWN)
    document = {
        "title": "T",
        "abstract": "A.",
        "highlights": ["h1", "h2"],
        "links": [{"url": "https://u.test"}],
    }
    answer = replies({"data": {"hits": [{"document": document}, None, 3]}})
    retriever = web(answer, api=str(tmp_path / "my-api.yaml"), language="it")
    (hit,) = retriever.search(["{key} {k}"], 4)[0]
    assert (hit.passage.id, hit.passage.contents) == ("https://u.test", '"T"\nA. h1 h2')
    (request,) = retriever.asked
    body = {"text": "{key} {k}", "limit": 4, "filter": {"lang": "it"}, "tags": ["a", 4]}
    assert json.loads(request.content) == body
    assert request.headers["Authorization"] == f"Bearer {key}"
    assert dict(request.url.params) == {"engine": "engine-id"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"provider": "bing"},
        {"provider": "serper", "api": {"url": "http://a.test"}},
        {"provider": "brave", "answers": True},
        {"api": {"url": "ftp://a.test"}},
        {"api": {"url": "https://a.test/?api_key=s3cr3t"}},
        {"api": {"url": "https://a.test/", "headers": {"X-API-KEY": "s3cr3t"}}},
        {"api": {"url": "https://a.test/", "body": {"auth": {"token": "s3cr3t"}}}},
        {"api": {"url": "https://a.test/", "body": {"auth": {"token": "{key}"}}, "key_env": "K"}},
        {"api": {"url": "https://a.test/", "headers": {"X-Key": "{key}"}}},
        {"api": {"url": "https://a.test/", "params": {"q": "{key}-{query}"}, "key_env": "K"}},
        {"api": "no-such-file.yaml"},
        {"provider": "serper", "concurency": 3},
    ],
)
def test_options_that_do_not_fit_are_one_line_without_the_key(options):
    with pytest.raises(UserError) as caught:
        manager.load("retriever", "web", options)
    assert "s3cr3t" not in str(caught.value)
