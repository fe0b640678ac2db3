"""Lucene for srl: BM25 over corpora larger than memory, and over indexes that pyserini built."""

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
