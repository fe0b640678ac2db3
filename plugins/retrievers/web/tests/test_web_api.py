"""What each API is asked, and what is made of its answers."""

from __future__ import annotations

import json

import httpx
import pytest

from srl.index.retriever import Fault
from srl_web.providers import PROVIDERS

SERPAPI = {
    "search_metadata": {"status": "Success"},
    "search_information": {"organic_results_state": "Results for exact spelling"},
    "answer_box": {
        "type": "organic_result",
        "title": "Genoa",
        "snippet": "Since 1128",
        "link": "https://a.test/",
    },
    "knowledge_graph": {
        "title": "Lanterna",
        "description": "A lighthouse",
        "source": {"name": "Wikipedia", "link": "https://w.test/"},
    },
    "organic_results": [
        {"position": 1, "title": "One", "link": "https://one.test/", "snippet": "The first."},
        {"position": 2, "title": "Two", "link": "https://two.test/", "snippet": "The second."},
    ],
}
GOOGLE = {
    "kind": "customsearch#search",
    "queries": {"request": [{"totalResults": "2"}]},
    "items": [
        {"kind": "customsearch#result", "title": "One", "link": "https://one.test/", "snippet": "The first."},
        {
            "kind": "customsearch#result",
            "title": "Two",
            "link": "https://two.test/",
            "snippet": "The second.",
        },
    ],
}
SERPER = {
    "searchParameters": {"q": "x", "type": "search"},
    "answerBox": {"title": "Genoa", "answer": "1128", "link": "https://a.test/"},
    "knowledgeGraph": {
        "title": "Lanterna",
        "description": "A lighthouse",
        "descriptionLink": "https://w.test/",
    },
    "organic": [
        {"title": "One", "link": "https://one.test/", "snippet": "The first.", "position": 1},
        {"title": "Two", "link": "https://two.test/", "snippet": "The second.", "position": 2},
    ],
    "credits": 1,
}
BRAVE = {
    "type": "search",
    "query": {"original": "x"},
    "web": {
        "type": "search",
        "results": [
            {"title": "One", "url": "https://one.test/", "description": "The first."},
            {"title": "Two", "url": "https://two.test/", "description": "The second."},
        ],
    },
}
TAVILY = {
    "query": "x",
    "answer": "In 1128.",
    "images": [],
    "results": [
        {
            "title": "One",
            "url": "https://one.test/",
            "content": "The first.",
            "score": 0.9,
            "raw_content": None,
        },
        {
            "title": "Two",
            "url": "https://two.test/",
            "content": "The second.",
            "score": 0.8,
            "raw_content": None,
        },
    ],
    "response_time": 1.1,
}
ANSWERS = {"serpapi": SERPAPI, "google": GOOGLE, "serper": SERPER, "brave": BRAVE, "tavily": TAVILY}


def replies(payload):
    return lambda request: httpx.Response(200, json=payload)


def ask(web, provider, query="where is the lighthouse?", k=3, **options):
    """The one request that a query makes: method, URL without query, parameters, headers, body."""
    retriever = web(replies(ANSWERS[provider]), provider=provider, **options)
    retriever.search([query], k)
    (request,) = retriever.asked
    body = json.loads(request.content) if request.content else None
    return (
        request.method,
        str(request.url.copy_with(query=None)),
        dict(request.url.params),
        request.headers,
        body,
    )


def test_serpapi_is_asked_as_it_documents(web, key):
    method, url, params, _, body = ask(web, "serpapi", language="en", country="us")
    assert (method, url, body) == ("GET", "https://serpapi.com/search.json", None)
    assert params == {
        "engine": "google",
        "q": "where is the lighthouse?",
        "num": "3",
        "hl": "en",
        "gl": "us",
        "api_key": key,
    }


def test_google_is_asked_as_it_documents(web, key):
    method, url, params, _, body = ask(web, "google", language="en", country="us")
    assert (method, url, body) == ("GET", "https://www.googleapis.com/customsearch/v1", None)
    assert params == {
        "q": "where is the lighthouse?",
        "num": "3",
        "hl": "en",
        "lr": "lang_en",
        "gl": "us",
        "cx": "engine-id",
        "key": key,
    }


def test_serper_is_asked_as_it_documents(web, key):
    method, url, params, headers, body = ask(web, "serper", country="us")
    assert (method, url, params) == ("POST", "https://google.serper.dev/search", {})
    assert body == {"q": "where is the lighthouse?", "num": 3, "gl": "us"}
    assert headers["X-API-KEY"] == key
    assert headers["Content-Type"] == "application/json"


def test_brave_is_asked_as_it_documents(web, key):
    method, url, params, headers, body = ask(web, "brave", language="en", country="US")
    assert (method, url, body) == ("GET", "https://api.search.brave.com/res/v1/web/search", None)
    assert params == {
        "q": "where is the lighthouse?",
        "count": "3",
        "search_lang": "en",
        "country": "US",
        "text_decorations": "false",
        "result_filter": "web",
    }
    assert headers["X-Subscription-Token"] == key


def test_tavily_is_asked_as_it_documents(web, key):
    method, url, params, headers, body = ask(web, "tavily", answers=True, country="italy")
    assert (method, url, params) == ("POST", "https://api.tavily.com/search", {})
    assert body == {
        "query": "where is the lighthouse?",
        "max_results": 3,
        "search_depth": "basic",
        "include_answer": True,
        "country": "italy",
    }
    assert headers["Authorization"] == f"Bearer {key}"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_gives_hits_in_the_form_of_passages(web, provider):
    retriever = web(replies(ANSWERS[provider]), provider=provider)
    first, second = retriever.search(["x"], 3)[0]
    assert (first.passage.id, first.passage.contents) == ("https://one.test/", '"One"\nThe first.')
    assert (second.passage.id, second.passage.contents) == ("https://two.test/", '"Two"\nThe second.')
    assert (first.score, second.score) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("provider", "first", "more"),
    [
        ("serpapi", ("https://a.test/", '"Genoa"\nSince 1128'), 1),
        ("serper", ("https://a.test/", '"Genoa"\n1128'), 1),
        ("tavily", (None, '"x"\nIn 1128.'), 0),
    ],
)
def test_a_direct_answer_comes_first_when_it_is_wanted(web, provider, first, more):
    retriever = web(replies(ANSWERS[provider]), provider=provider, answers=True)
    (hits,) = retriever.search(["x"], 9)
    assert hits[0].passage.contents == first[1]
    assert hits[0].passage.id == first[0] or hits[0].passage.id.startswith("web:")
    assert len(hits) == 3 + more
    assert len(retriever.search(["x"], 2)[0]) == 2


@pytest.mark.parametrize(
    ("provider", "payload"),
    [
        (
            "serpapi",
            {
                "search_metadata": {"status": "Success"},
                "search_information": {"organic_results_state": "Fully empty"},
                "error": "Google hasn't returned any results for this query.",
            },
        ),
        ("google", {"kind": "customsearch#search", "queries": {"request": [{"totalResults": "0"}]}}),
        ("serper", {"searchParameters": {"q": "x"}, "organic": []}),
        ("brave", {"type": "search"}),
        ("tavily", {"query": "x", "results": []}),
    ],
)
def test_nothing_found_is_an_empty_list_and_no_fault(web, provider, payload):
    assert web(replies(payload), provider=provider).outcomes(["x"], 3) == [[]]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "payload", [{}, [], None, "text", 3, {"results": "none"}, {"organic": {}}, {"error": "we broke"}]
)
def test_json_of_another_shape_is_a_fault_and_never_silently_empty(web, provider, payload):
    (fault,) = web(replies(payload), provider=provider).outcomes(["x"], 3)
    assert isinstance(fault, Fault)
    assert fault.status == "failed"


def test_an_error_with_status_200_is_quoted(web):
    payload = {"search_metadata": {"status": "Error"}, "error": "We couldn't get valid results."}
    (fault,) = web(replies(payload), provider="serpapi").outcomes(["x"], 3)
    assert "We couldn't get valid results." in str(fault)


def test_results_without_the_fields_that_the_mapping_names_are_a_fault(web):
    api = {"url": "http://api.test/", "params": {"q": "{query}"}, "title": "name", "text": "body"}
    (fault,) = web(replies({"results": [{"headline": "x"}]}), api=api).outcomes(["x"], 3)
    assert "no result at 'results' has a title at 'name' or text at 'body'" in str(fault)


def test_no_more_hits_than_asked_for_and_no_url_twice(web):
    item = SERPER["organic"][0]
    many = [{**item, "link": f"https://{number // 2}.test/"} for number in range(14)]
    retriever = web(replies({"organic": many}))
    (hits,) = retriever.search(["x"], 3)
    assert [hit.passage.id for hit in hits] == ["https://0.test/", "https://1.test/", "https://2.test/"]
    (all_hits,) = retriever.search(["x"], 100)
    assert len(all_hits) == 7
    assert [hit.score for hit in all_hits] == sorted({hit.score for hit in all_hits}, reverse=True)


def test_an_api_is_never_asked_for_more_than_it_gives(web):
    assert ask(web, "google", k=50)[2]["num"] == "10"
    assert ask(web, "brave", k=50)[2]["count"] == "20"


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
    retriever = web(lambda request: httpx.Response(200, content=body.encode()))
    (hit,) = retriever.search(["x"], 3)[0]
    assert hit.passage.contents == contents
    hit.passage.contents.encode()


def test_a_result_without_a_url_has_an_id_of_its_own(web):
    items = [{"title": "a", "snippet": "1"}, {"title": "a", "snippet": "2"}, {"title": "a", "snippet": "1"}]
    (hits,) = web(replies({"organic": items})).search(["x"], 5)
    assert [hit.passage.text for hit in hits] == ["1", "2"]
    assert len({hit.passage.id for hit in hits}) == 2
