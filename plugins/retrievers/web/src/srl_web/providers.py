"""The search APIs included in srl, in the same form as a user's own `api`.

Sources: serpapi.com/search-api, developers.google.com/custom-search/v1/reference/rest/v1/cse/list,
serper.dev/playground, api.search.brave.com/app/documentation/web-search (query, responses),
docs.tavily.com/documentation/api-reference/endpoint/search.
"""

from __future__ import annotations

from srl_web.api import Api, DirectAnswer

serpapi = Api(
    url="https://serpapi.com/search.json",
    params={
        "engine": "google",
        "q": "{query}",
        "num": "{k}",
        "hl": "{language}",
        "gl": "{country}",
        "api_key": "{key}",
    },
    key_env="SERPAPI_API_KEY",
    results="organic_results",
    empty="search_information",
    answers=(
        DirectAnswer(at="answer_box", text=("answer", "snippet")),
        DirectAnswer(at="knowledge_graph", text="description", link="source.link"),
    ),
    max_k=100,
)

google = Api(
    url="https://www.googleapis.com/customsearch/v1",
    params={
        "q": "{query}",
        "num": "{k}",
        "hl": "{language}",
        "lr": "lang_{language}",
        "gl": "{country}",
        "cx": "{env:GOOGLE_CSE_ID}",
        "key": "{key}",
    },
    key_env="GOOGLE_API_KEY",
    results="items",
    empty="queries",
    max_k=10,
)

serper = Api(
    url="https://google.serper.dev/search",
    method="POST",
    body={"q": "{query}", "num": "{k}", "hl": "{language}", "gl": "{country}"},
    headers={"X-API-KEY": "{key}"},
    key_env="SERPER_API_KEY",
    results="organic",
    empty="searchParameters",
    answers=(
        DirectAnswer(at="answerBox", text=("answer", "snippet")),
        DirectAnswer(at="knowledgeGraph", text="description", link="descriptionLink"),
    ),
    max_k=100,
)

brave = Api(
    url="https://api.search.brave.com/res/v1/web/search",
    params={
        "q": "{query}",
        "count": "{k}",
        "search_lang": "{language}",
        "country": "{country}",
        "text_decorations": False,
        "result_filter": "web",
    },
    headers={"Accept": "application/json", "X-Subscription-Token": "{key}"},
    key_env="BRAVE_API_KEY",
    results="web.results",
    empty="type",
    text=("description", "extra_snippets"),
    link="url",
    max_k=20,
    max_chars=400,
    max_words=50,
)

tavily = Api(
    url="https://api.tavily.com/search",
    method="POST",
    body={
        "query": "{query}",
        "max_results": "{k}",
        "search_depth": "basic",
        "include_answer": "{answers}",
        "country": "{country}",
    },
    headers={"Authorization": "Bearer {key}"},
    key_env="TAVILY_API_KEY",
    text="content",
    link="url",
    answers=(DirectAnswer(title="query", text="answer", link=""),),
    max_k=20,
    max_chars=400,
)


PROVIDERS = {"serpapi": serpapi, "google": google, "serper": serper, "brave": brave, "tavily": tavily}
