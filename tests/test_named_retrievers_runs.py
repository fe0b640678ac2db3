"""Runs and evaluations with several retrievers: what is searched, logged and said."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from tests.live_server import running
from tests.training import Said, train
from tests.two_retrievers import PAPERS, only_run, script, searched, settings, write_place

import srl.store
from srl.config import Config
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.index import build_index, open_index
from srl.protocol import template
from srl.serve.named_retrievers import NamedRetrievers, digest_of
from srl.serve.server import bind, create_app, url_of
from srl.train import search as searching
from srl.train.evaluate_model import evaluate_model
from srl.train.load_components import load_policy
from srl.train.model_settings import settings_of
from srl.train.questions import choose_template, load_questions, warn_about_unlisted_retrievers
from srl.train.run import resume
from srl.train.search import IndexDigests, load_search
from srl.trajectory import Hit, Question
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrievers")
    write_place(folder)
    return folder


@pytest.fixture
def scripted(monkeypatch):
    script(monkeypatch)


# Training with two retrievers


def test_a_training_run_searches_two_retrievers_and_says_which_in_its_log(place, tmp_path, scripted):
    train(settings(place), tmp_path)
    run = only_run(tmp_path)
    assert searched(run) == [
        ("", "velmar", "ok", 1),
        ("papers", "lighthouse", "ok", 1),
        ("wbe", "lighthouse", "rejected", 0),
    ]
    pages, papers = (open_index(place / name).digest for name in ("pages", "papers"))
    with srl.store.open(run) as log:
        digests = log.execute("SELECT DISTINCT retriever, index_digest FROM searches ORDER BY ALL").fetchall()
        (prompt,) = log.execute("SELECT DISTINCT text FROM segments WHERE kind = 'prompt'").fetchone()
        (told,) = log.execute("SELECT DISTINCT text FROM segments WHERE kind = 'feedback'").fetchone()
    assert digests == [("", pages), ("papers", papers), ("wbe", "")]
    assert '<search engine="papers"> query </search> (papers). Question: Who built' in prompt
    assert '<search engine="papers">' in told
    known = json.loads((run / "checkpoints" / "step-000001" / "srl.json").read_text(encoding="utf-8"))
    assert (known["index_digest"], known["retriever_digests"]) == (pages, {"papers": papers})
    inputs = json.loads((run / "run.json").read_text(encoding="utf-8"))["inputs"]
    assert (inputs["index"], inputs["index of papers"]) == (pages, papers)


def test_another_index_of_a_named_retriever_is_said_aloud(place, tmp_path, scripted, capsys):
    from srl.cli.eval.run import _show

    train(settings(place, "search.digest=" + open_index(place / "pages").digest[:12]), tmp_path)
    run = only_run(tmp_path)
    model = run / "checkpoints" / "step-000001"
    files, workspace = [str(place / "train.parquet")], Workspace(tmp_path)
    same = evaluate_model(settings_of(model, None, None, {}, []), files, workspace)
    assert same.changed_indexes == []
    assert same.settings["search"].metrics["eval/em"] == 1
    sets = [f"search.retrievers.papers.index={place / 'pages'}", f"search.index={place / 'papers'}"]
    other = evaluate_model(settings_of(model, None, None, {}, sets), files, workspace)
    _show(other, as_json=True)
    out, err = capsys.readouterr()
    trained = IndexDigests.read(json.loads((model / "srl.json").read_text(encoding="utf-8")))
    pages, papers = trained.index_digest, trained.retriever_digests["papers"]
    assert f"warning: trained with the index {pages[:12]}, evaluated with {papers[:12]}" in err
    assert (
        f"trained with the index of the retriever 'papers' {papers[:12]}, evaluated with {pages[:12]}" in err
    )
    found = json.loads(out)
    assert found["retriever_digests"] == {"papers": pages}
    assert [item["retriever"] for item in found["other_indexes"]] == ["", "papers"]
    _show(same, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["searches", "per", "question", "2.000"] in rows
    assert ["by", "papers", "1.000"] in rows


def test_a_resumed_run_says_that_a_retriever_has_another_index(place, tmp_path, scripted):
    moved = tmp_path / "papers"
    build_index(place / "papers.jsonl", moved, "bm25", {})
    train(settings(place, f"search.retrievers.papers.index={moved}"), tmp_path)
    build_index(place / "pages.jsonl", moved, "bm25", {}, overwrite=True)
    said = Said()
    resume(only_run(tmp_path), workspace=Workspace(tmp_path), terminal=said, steps=2)
    assert "started with the index of the retriever 'papers'" in said.text
    assert "started with another index" not in said.text


# What is loaded


def loaded(config: Config, workspace: Path) -> object:
    return load_search(config, Workspace(workspace), lambda text: None)


def test_one_retriever_is_not_wrapped_and_several_are(place, tmp_path):
    several = loaded(settings(place), tmp_path)
    assert isinstance(several, NamedRetrievers)
    assert several.retrievers == ("papers",)
    alone = loaded(settings(place, "search.retrievers={}"), tmp_path)
    assert not hasattr(alone, "retrievers")
    assert loaded(settings(place, rollout__search=False, data__template="r1"), tmp_path) is None


def test_retrievers_over_http_find_what_they_find_in_this_process(place, tmp_path, scripted):
    train(settings(place), tmp_path / "here")
    app = create_app({name: open_index(place / name) for name in ("pages", "papers")})
    with running(app) as url:
        papers = ["search.retrievers.papers.index=null", f"search.retrievers.papers.url={url}/papers"]
        train(settings(place, *papers, search__index=None, search__url=[url]), tmp_path / "there")
    here, there = only_run(tmp_path / "here"), only_run(tmp_path / "there")
    assert searched(there) == searched(here)
    inputs = json.loads((there / "run.json").read_text())["inputs"]
    assert inputs["index of papers"] == open_index(place / "papers").digest


def test_a_retriever_that_does_not_answer_is_said_before_the_run_begins(place, tmp_path):
    with bind(port=0) as listener:
        gone = ["search.retrievers.papers.index=null", f"search.retrievers.papers.url={url_of(listener)}"]
        with pytest.raises(UserError, match="no search server answers"):
            train(settings(place, *gone), tmp_path)


@dataclass
class Outside:
    """A live index, whose retriever searches something outside."""

    name: str
    options: dict[str, object]
    digest: str = "f" * 32
    live: bool = True

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        return [[Hit(PAPERS[0], 1.0)] * k for _ in queries]


def test_a_live_retriever_needs_no_index(place, tmp_path, monkeypatch, scripted):
    made = []
    monkeypatch.setattr(searching, "live_index", lambda *given: made.append(Outside(*given)) or made[-1])
    live = settings(
        place, "search.retrievers.papers.index=null", "search.retrievers.papers.retriever=bm25",
        "search.retrievers.papers.options.k1=1.5", "search.retrievers.papers.topk=2",
    )  # fmt: skip
    train(live, tmp_path)
    assert ("papers", "lighthouse", "ok", 2) in searched(only_run(tmp_path))
    assert (made[0].name, made[0].options["k1"]) == ("bm25", 1.5)


class Api(BaseHTTPRequestHandler):
    """A search API on this machine that always finds one page."""

    def do_GET(self) -> None:
        found = [{"title": "Velmar", "snippet": "Built by Ossa Trell.", "link": "http://x.example/velmar"}]
        body = json.dumps({"results": found}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        """Nothing to say."""


def test_the_web_is_a_retriever_of_a_run_and_a_cassette_stands_for_it(place, tmp_path, scripted):
    pytest.importorskip("srl_web")
    web = ["search.retrievers.papers.index=null", "search.retrievers.papers.retriever=web",
           "search.retrievers.papers.options.cache=null"]  # fmt: skip
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/search"
        api = f"search.retrievers.papers.options.api={{url: '{url}', params: {{q: '{{query}}'}}}}"
        cassette = f"search.cassette=record {tmp_path / 'run.cassette'}"
        train(settings(place, *web, api, cassette), tmp_path / "there")
        server.shutdown()
    train(settings(place, *web, api, cassette.replace("record", "replay")), tmp_path / "later")
    there, later = only_run(tmp_path / "there"), only_run(tmp_path / "later")
    assert ("papers", "lighthouse", "ok", 1) in searched(there)
    assert searched(later) == searched(there)
    assert json.loads((there / "run.json").read_text()) | {"started": ""} == (
        json.loads((later / "run.json").read_text()) | {"started": ""}
    )
    with srl.store.open(later) as log:
        (page,) = log.execute(
            "SELECT DISTINCT contents FROM hits WHERE title = 'Velmar' AND search = 1"
        ).fetchone()
    assert "Ossa Trell" in page


def test_a_retriever_that_needs_an_index_is_no_retriever_without_one(place, tmp_path):
    live = settings(place, "search.retrievers.papers.index=null", "search.retrievers.papers.retriever=bm25")
    with pytest.raises(UserError, match="bm25 searches an index"):
        loaded(live, tmp_path)


def test_the_index_must_be_the_expected_one(place, tmp_path):
    digest = open_index(place / "pages").digest
    assert digest_of(loaded(settings(place, search__digest=digest[:12]), tmp_path)) == digest
    with pytest.raises(UserError, match=f"search.digest: expected digest {'0' * 12}, found {digest}"):
        loaded(settings(place, search__digest="0" * 12), tmp_path)


async def nameless(scope: Any, receive: Any, send: Any) -> None:
    """A search server that answers everything with nothing, and names no index, as Search-R1's does."""
    if scope["type"] != "http" or scope["path"] != "/retrieve":
        await PlainTextResponse("", 404)(scope, receive, send)
        return
    queries = json.loads((await receive())["body"])["queries"]
    await JSONResponse({"result": [[] for _ in queries]})(scope, receive, send)


def test_a_server_that_names_no_index_is_not_taken_for_the_expected_one(place, tmp_path):
    with running(nameless) as url:
        served = {"search__index": None, "search__url": [url]}
        assert digest_of(loaded(settings(place, "search.retrievers={}", **served), tmp_path)) == ""
        expected = settings(place, "search.retrievers={}", search__digest="0" * 12, **served)
        with pytest.raises(UserError, match=f"search.digest: expected digest {'0' * 12}, found none"):
            loaded(expected, tmp_path)


def test_an_older_description_knows_no_retrievers():
    older = IndexDigests.read({"index_digest": "a"})
    assert IndexDigests("b", {"web": "c"}).changed_since(older)[0].now == "b"
    assert IndexDigests("", {"web": "c"}).changed_since(older) == []
    assert IndexDigests.read({}) == IndexDigests()


# What the policy is told


def untold(config: Config, tmp_path: Path) -> list[str]:
    """What is said of the training prompts that leave retrievers out."""
    said: list[str] = []
    codec = load_policy(config.model, lambda text: None).codec
    warn_about_unlisted_retrievers(
        load_questions(config.data.train_files, config, codec, said.append), config, said.append
    )
    return said


def test_prompts_as_the_files_have_them_leave_retrievers_out_and_that_is_said(place, tmp_path):
    (said,) = untold(settings(place, data__template=None), tmp_path)
    assert said.startswith("warning: 1 of 1 prompts do not name every retriever of search.retrievers")
    assert untold(settings(place), tmp_path) == []
    assert untold(settings(place, "search.retrievers={}", data__template=None), tmp_path) == []


def test_a_run_and_an_evaluation_say_what_their_prompts_leave_out(place, tmp_path, scripted):
    said = Said()
    train(settings(place, data__template=None), tmp_path, terminal=said)
    assert "1 of 1 prompts do not name every retriever" in " ".join(said.text.split())
    notes: list[str] = []
    files = [str(place / "train.parquet")]
    own = settings(place, data__template=None)
    evaluate_model(own, files, Workspace(tmp_path), note=notes.append)
    assert "1 of 1 prompts do not name every retriever" in " ".join(notes)


def test_prompts_that_name_the_retrievers_themselves_are_left_in_peace(place, tmp_path):
    prompt = ({"role": "user", "content": "Ask papers or the default. Question: Who?"},)
    write_questions(tmp_path / "own.parquet", [Question("q", "Who?", ("x",), prompt=prompt)])
    own = settings(place, data__template=None, data__train_files=[str(tmp_path / "own.parquet")])
    assert untold(own, tmp_path) == []


def test_a_template_file_without_its_place_for_retrievers_is_said(place, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Use <search>. Question: {question}", encoding="utf-8")
    assert len(untold(settings(place, data__template=str(file)), tmp_path)) == 1
    file.write_text("Use <search>. {retrievers} Question: {question}", encoding="utf-8")
    assert untold(settings(place, data__template=str(file)), tmp_path) == []


def test_without_search_no_prompt_names_a_retriever(place):
    off = settings(place, rollout__search=False, data__template="r1")
    assert choose_template(off) == template("r1")
