"""BM25 for srl: words in common, weighted by how rare they are."""

from __future__ import annotations

from srl.plugins import hookimpl


@hookimpl
def srl_retrievers(register):
    register(
        "bm25",
        "srl_bm25.retriever:BM25Retriever",
        "BM25 over words (numba): exact, on the CPU, no model needed.",
        options="srl_bm25.options:Options",
    )
