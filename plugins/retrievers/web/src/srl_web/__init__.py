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


@hookimpl
def srl_providers(register):
    register("serpapi", "srl_web.providers:serpapi", "Google through SerpAPI.")
    register("google", "srl_web.providers:google", "Google's Custom Search JSON API.")
    register("serper", "srl_web.providers:serper", "Google through Serper.")
    register("brave", "srl_web.providers:brave", "Brave Search.")
    register("tavily", "srl_web.providers:tavily", "Tavily, basic depth.")
