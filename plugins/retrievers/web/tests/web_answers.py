"""What an API answers in the tests, and the fault that comes of it."""

from __future__ import annotations

import httpx

from srl.index.retriever import Fault

GOOD = {
    "searchParameters": {},
    "organic": [{"title": "One", "link": "https://one.test/", "snippet": "First."}],
}


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


def fault_of(retriever, query="x", k=3) -> Fault:
    (fault,) = retriever.outcomes([query], k)
    assert isinstance(fault, Fault), fault
    assert "\n" not in str(fault)
    return fault
