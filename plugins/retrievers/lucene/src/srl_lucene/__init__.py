"""Lucene for srl: BM25 for corpora larger than memory, and for indexes built by pyserini."""

from __future__ import annotations

from srl.plugins import hookimpl


@hookimpl
def srl_retrievers(register):
    register(
        "lucene",
        "srl_lucene.retriever:LuceneRetriever",
        "BM25 with Lucene (pyserini, needs Java 21): corpora larger than memory, indexes built by pyserini.",
        options="srl_lucene.options:Options",
    )
