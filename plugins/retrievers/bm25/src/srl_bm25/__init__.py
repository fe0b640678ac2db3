"""BM25 for srl, in process."""

from __future__ import annotations

from srl.plugins import hookimpl


@hookimpl
def srl_retrievers(register):
    register(
        "bm25",
        "srl_bm25.retriever:BM25Retriever",
        "BM25 on the CPU (numba): exact, needs no model.",
        options="srl_bm25.options:Options",
    )
