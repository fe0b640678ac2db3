"""A search server of the form that Search-R1's users run: FastAPI in front of pyserini, one query at a time.

It is what `bench/server.py` measures srl's server against, written for that: the same endpoint, Lucene
asked for one query at a time in the thread that got the request, passages from Lucene's stored texts.

    python bench/search_r1_server.py INDEX PORT
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from srl_lucene import java

java.start("4g")
os.environ.setdefault("OPENAI_API_KEY", "none")  # pyserini makes a client of it on import
from pyserini.search.lucene import LuceneSearcher  # noqa: E402

app = FastAPI()
searcher = LuceneSearcher(sys.argv[1])
searcher.set_bm25(0.9, 0.4)


class Request(BaseModel):
    queries: list[str]
    topk: int | None = 3
    return_scores: bool = False


@app.post("/retrieve")
def retrieve(request: Request) -> dict[str, Any]:
    return {"result": [_answer(query, request.topk or 3) for query in request.queries]}


def _answer(query: str, topk: int) -> list[dict[str, Any]]:
    answer = []
    for hit in searcher.search(query, topk):
        contents = json.loads(searcher.doc(hit.docid).raw())["contents"]
        title, _, text = contents.partition("\n")
        document = {"title": title.strip('"'), "text": text, "contents": contents}
        answer.append({"document": document, "score": hit.score})
    return answer


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
