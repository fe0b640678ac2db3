"""The retriever among threads, processes, caches, and the rest of srl."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from web_answers import replies

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.index.open import live_index


def test_what_results_depend_on_is_another_answer_and_the_key_is_not(web, tmp_path, monkeypatch):
    def requests(k=3, **options):
        retriever = web(replies({"queries": {}, "organic": []}), cache=tmp_path / "cache.sqlite", **options)
        retriever.search(["x"], k)
        return len(retriever.asked)

    assert [requests(), requests(), requests(k=4), requests(country="us"), requests(answers=True)] == [
        1,
        0,
        1,
        1,
        1,
    ]
    assert requests(provider="google") == 1
    monkeypatch.setenv("GOOGLE_API_KEY", "a newer key")
    assert requests(provider="google") == 0
    monkeypatch.setenv("GOOGLE_CSE_ID", "another engine")
    assert requests(provider="google") == 1


def test_an_index_of_the_web_is_built_opened_and_searched(tmp_path):
    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            hits = [{"title": "T", "snippet": "S", "link": "https://a.test/"}]
            self.wfile.write(json.dumps({"results": hits}).encode())

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        api = {"url": f"http://127.0.0.1:{server.server_port}", "params": {"q": "{query}"}}
        check_the_web(api, tmp_path)
        server.shutdown()


def check_the_web(api, tmp_path):
    manifest = build_index(None, tmp_path / "index", "web", {"api": api})
    assert manifest.passages == 0
    index = open_index(tmp_path / "index", {"cache": None, "max_requests": 1})
    assert index.live
    assert index.outcomes(["x"], 3)[0][0].passage.contents == '"T"\nS'
    assert index.outcomes(["y"], 3)[0].status == "refused"
    live = live_index("web", {"api": api, "cache": None})
    assert live.digest == manifest.digest
    assert live.search(["x"], 1)[0][0].passage.id == "https://a.test/"
    with pytest.raises(UserError):
        build_index(iter([]), tmp_path / "other", "web", {"provider": "serper"})
