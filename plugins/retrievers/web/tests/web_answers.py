"""What APIs answer in the tests, in the shapes that they document, and the fault that comes of an answer."""

import httpx

from srl.index.retriever import Fault

GOOD = {
    "searchParameters": {},
    "organic": [{"title": "One", "link": "https://one.test/", "snippet": "First."}],
}
_TWO = [
    {"title": "One", "link": "https://one.test/", "snippet": "The first.", "position": 1},
    {"title": "Two", "link": "https://two.test/", "snippet": "The second.", "position": 2},
]
_BOX = {"title": "Genoa", "link": "https://a.test/"}
_GRAPH = {"title": "Lanterna", "description": "A lighthouse"}

ANSWERS = {
    "serpapi": {
        "search_metadata": {"status": "Success"},
        "search_information": {"organic_results_state": "Results for exact spelling"},
        "answer_box": {**_BOX, "type": "organic_result", "snippet": "Since 1128"},
        "knowledge_graph": {**_GRAPH, "source": {"name": "Wikipedia", "link": "https://w.test/"}},
        "organic_results": _TWO,
    },
    "google": {"kind": "search", "queries": {"request": [{"totalResults": "2"}]}, "items": _TWO},
    "serper": {
        "searchParameters": {"q": "x", "type": "search"},
        "answerBox": {**_BOX, "answer": "1128"},
        "knowledgeGraph": {**_GRAPH, "descriptionLink": "https://w.test/"},
        "organic": _TWO,
        "credits": 1,
    },
    "brave": {
        "type": "search",
        "web": {
            "type": "search",
            "results": [{"title": r["title"], "url": r["link"], "description": r["snippet"]} for r in _TWO],
        },
    },
    "tavily": {
        "query": "x",
        "answer": "In 1128.",
        "results": [
            {"title": r["title"], "url": r["link"], "content": r["snippet"], "raw_content": None}
            for r in _TWO
        ],
    },
}
EMPTY = {
    "serpapi": {"search_information": {"organic_results_state": "Fully empty"}, "error": "No results."},
    "google": {"kind": "search", "queries": {"request": [{"totalResults": "0"}]}},
    "serper": {"searchParameters": {"q": "x"}, "organic": []},
    "brave": {"type": "search"},
    "tavily": {"query": "x", "results": []},
}


def replies(payload):
    """An API that gives this answer to every request."""
    return lambda request: httpx.Response(200, json=payload)


def in_turn(*responses):
    """An API that gives these answers one after the other, the last one for ever."""
    left = list(responses)

    def answer(request):
        response = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)

    return answer


def good():
    return httpx.Response(200, json=GOOD)


def fault_of(retriever) -> Fault:
    (fault,) = retriever.outcomes(["x"], 3)
    assert isinstance(fault, Fault), fault
    assert "\n" not in str(fault)
    return fault
