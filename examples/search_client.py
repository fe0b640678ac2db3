"""Call srl's search server from another trainer: the requests of Search-R1's and verl's clients, in httpx.

    srl serve retriever --index own-documents/index       # prints its URL once it answers
    python examples/search_client.py http://127.0.0.1:8000/retrieve "Where was Kromel Dunil born ?"

own-documents/index is what examples/own_documents/train.py builds. A batch of queries is one request; an
answer has one list of hits for each query, in their order.
"""

import sys

import httpx


def search(url: str, queries: list[str], topk: int = 3) -> list[str]:
    """For each query its passages, in the form in which Search-R1's models read them."""
    answer = httpx.post(url, json={"queries": queries, "topk": topk, "return_scores": True}, timeout=30)
    answer.raise_for_status()
    return [observation(hits) for hits in answer.json()["result"]]


def observation(hits: list[dict]) -> str:
    passages = [hit["document"]["contents"].partition("\n") for hit in hits]
    return "\n".join(
        f"Doc {n}(Title: {title}) {text}" for n, (title, _, text) in enumerate(passages, start=1)
    )


if __name__ == "__main__":
    for text in search(sys.argv[1], sys.argv[2:]):
        print(text, end="\n\n")
