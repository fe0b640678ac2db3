"""Web search for srl: a search API instead of a corpus."""

from __future__ import annotations

from srl.plugins import hookimpl


@hookimpl
def srl_retrievers(register):
    register(
        "web",
        "srl_web.retriever:WebRetriever",
        "Web search through SerpAPI, Google, Serper, Brave, Tavily, or any JSON API.",
        options="srl_web.options:Options",
    )
