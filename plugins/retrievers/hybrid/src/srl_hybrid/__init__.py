"""Retrievers that combine others: fuse several rankings, or rerank the hits of one."""

from __future__ import annotations

from srl.plugins import hookimpl


@hookimpl
def srl_retrievers(register):
    register(
        "hybrid",
        "srl_hybrid.hybrid:HybridRetriever",
        "Reciprocal-rank fusion of several retrievers over one corpus.",
        options="srl_hybrid.options:HybridOptions",
    )
    register(
        "rerank",
        "srl_hybrid.rerank:RerankRetriever",
        "The hits of another retriever, reranked by a cross-encoder.",
        options="srl_hybrid.options:RerankOptions",
    )
