"""Dense retrieval for srl: a Hugging Face encoder turns passages and queries into vectors."""

from __future__ import annotations

from srl.plugins import hookimpl


@hookimpl
def srl_retrievers(register):
    register(
        "e5",
        "srl_e5.retriever:DenseRetriever",
        "Dense retrieval with any Hugging Face encoder (e5, bge, contriever, MiniLM) and faiss.",
        options="srl_e5.options:Options",
    )
