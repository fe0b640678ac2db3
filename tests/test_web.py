"""The pages of `srl inspect web`: who gets them, what is sent with them, and what they show."""

from __future__ import annotations

import re
import shutil
from html import unescape
from types import SimpleNamespace

import pyarrow as pa
import pytest
from starlette.testclient import TestClient
from tests.store_builder import KLEE, episode, new_log, question, record, search, write_step

import srl.store
from srl.browse.web.app import create_app
from srl.browse.web.heat import _colour, largest_advantage
from srl.browse.web.rendering import HERE, link
from srl.browse.web.report import Choice, write_report
from srl.cli import main
from srl.store.prune import prune
from srl.store.rescores import rescore_file, writing_rescores
from srl.store.schema import RESCORE_SCHEMA
from srl.trajectory import Passage, Question, Segment
from srl.workspace import Workspace

GRPO, PPO = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"
LATER = "20250104T030405Z-tiny-grpo-s1-02ac"
HOSTILE = {
    "script": "<script>alert(1)</script>",
    "end of style": "</style></pre><img src=x onerror=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x="',
    "template": "{{ 7 * 191 }}{% include 'base.html' %}",
    "right to left": "abc\u202edef\u2066",
    "null": "a\x00b",
    "ansi": "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "emoji": "👩\u200d🚀 naïve 日本語",
    "lone surrogate": "x\ud800y",
    "entity": "&lt;b&gt; &amp;",
    "url": "javascript:alert(1)",
}


SECRET = "Zx9QWv7Kt3"


@pytest.fixture
def get(workspace):
    """Asks for a page of this test's workspace as a browser on this machine does."""
    client = TestClient(create_app(Workspace(workspace)), base_url="http://127.0.0.1:7007")
    return client.get


@pytest.fixture
def logged(workspace):
    """A finished run and one that is being written; gives the ids of the later one's step 2."""
    runs = workspace / "runs"
    with new_log(runs / GRPO) as log:
        for step in (1, 2, 3):
            write_step(log, step, "val")
    log = new_log(runs / PPO)
    write_step(log, 1)
    made = [
        episode(0, step=2, answer="Münchenbuchsee"),
        episode(0, step=2, sample=1, answer=None),
        episode(1, step=2, answer="Bern", asked=question(1, hops=3)),
    ]
    log.write(2, "train", [record(one) for one in made], {"train/em": 0.25})
    return [one.id for one in made]


def test_a_copy_of_a_run_is_left_out_where_all_runs_are_read(get, logged, workspace):
    shutil.copytree(workspace / "runs" / GRPO, workspace / "runs" / LATER)
    query = {
        "run": "all",
        "q": "SELECT count(*) AS episodes, count(DISTINCT run_id) AS runs FROM trajectories",
    }
    once = re.findall(r"<td[^>]*>\s*(\d+)\s*<", get("/sql", params=query).text)
    shutil.rmtree(workspace / "runs" / LATER)
    assert re.findall(r"<td[^>]*>\s*(\d+)\s*<", get("/sql", params=query).text) == once != []
    shutil.copytree(workspace / "runs" / GRPO, workspace / "runs" / LATER)
    assert "is left out: it is a copy of the run" in get("/").text


def test_a_link_keeps_the_number_0():
    assert (
        link("run", "r", "trajectories", hops=0, page=None, q="", wide=False) == "/run/r/trajectories?hops=0"
    )


def hostile(text):
    """A trajectory that has `text` in every field that a model, a passage or a question can write."""
    prompt = ({"role": "user", "content": text},)
    asked = Question(f"q{len(text)}", text, (text,), text, text, prompt, {"hops": 2})
    made = episode(0, answer=text, asked=asked)
    written = Segment("policy", (1, 2), f"<think>{text}</think><search>{text}</search>", 0, (-0.5, -0.5))
    made.segments[1:2] = [written]
    made.searches[:] = [search(text, Passage(text, f"{text}\n{text}"), error=text)]
    return made


def test_every_page_answers_with_the_policy_on_content(get, logged):
    run = f"/run/{PPO}"
    for path in (
        "/",
        run,
        f"{run}/trajectories",
        f"{run}/trajectory/{logged[0]}",
        "/nowhere",
        "/assets/page.js",
    ):
        answer = get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.status_code == (404 if path == "/nowhere" else 200), path


def test_templates_have_nothing_that_the_policy_forbids():
    for template in (HERE / "templates").iterdir():
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"<script(?! src=\"/assets/)|<style|\son\w+=|\sstyle=|//(?!\w*\")\w+\.", text), (
            template
        )
        assert "|safe" not in text.replace(" ", "")
        assert "autoescape" not in text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost:7007"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:7007"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-dest": "empty"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "same-origin", "sec-fetch-dest": "empty"}, 200),
    ],
)
def test_only_this_machine_is_answered(get, logged, headers, status):
    answer = get("/", headers=headers)
    assert answer.status_code == status
    assert (GRPO in answer.text) == (status == 200)
    assert "content-security-policy" in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_pages_can_only_be_read(workspace, logged, method):
    client = TestClient(create_app(Workspace(workspace)), base_url="http://127.0.0.1")
    assert client.request(method, "/").status_code == 405


@pytest.fixture(scope="module")
def hostile_pages(tmp_path_factory):
    """Asks for the pages of a run whose texts are `HOSTILE`, and a last one of a megabyte."""
    folder = tmp_path_factory.mktemp("hostile")
    with new_log(folder / "runs" / GRPO) as log:
        made = [hostile(text) for text in (*HOSTILE.values(), "x" * 1_000_000)]
        log.write(1, "train", [record(one) for one in made], {"train/em": 0.5})
    get = TestClient(create_app(Workspace(folder)), base_url="http://127.0.0.1").get
    return lambda place, page="": get(f"/run/{GRPO}/trajectory/{made[place].id}{page}")


@pytest.mark.parametrize("page", ["", "?heat=logprob", "/../../trajectories"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_changes_nothing(hostile_pages, name, page):
    answer = hostile_pages(list(HOSTILE).index(name), page)
    assert answer.status_code == 200
    assert re.findall(r"<script[^>]*>", answer.text) == ['<script src="/assets/page.js">']
    assert not re.search(r"<[^>]*\son\w+\s*=|<img|<style|href=\"javascript|1337", answer.text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", answer.text)
    plain = HOSTILE[name].encode("utf-8", "replace").decode()
    if plain.isprintable() and page == "":
        assert plain in unescape(answer.text)


@pytest.mark.parametrize("page", ["", "?heat=logprob", "/../../trajectories"])
def test_text_of_a_megabyte_is_cut_with_a_note(hostile_pages, page):
    answer = hostile_pages(-1, page)
    assert answer.status_code == 200
    assert len(answer.text) < 1_000_000
    assert "950,000 more characters" in answer.text or page.endswith("trajectories")


def test_no_page_alters_a_text_to_hide_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", SECRET)
    with new_log(tmp_path / "runs" / GRPO) as log:
        log.write(1, "train", [record(one := hostile(f"the key {SECRET} is"))], {"train/em": 0.5})
    get = TestClient(create_app(Workspace(tmp_path)), base_url="http://127.0.0.1").get
    with srl.store.open(log.directory) as opened:
        write_report(opened, log.directory.parent, Choice(), tmp_path / "report.html")
    pages = [get(f"/run/{GRPO}/trajectory/{one.id}"), get(f"/run/{GRPO}/trajectories")]
    pages += [get("/sql", params={"q": "SELECT question, answer FROM trajectories"})]
    texts = [page.text for page in pages] + [(tmp_path / "report.html").read_text(encoding="utf-8")]
    assert all(f"the key {SECRET} is" in text for text in texts)


def test_runs_are_listed_with_curves_the_latest_first(get, logged):
    page = get("/").text
    assert page.index(f">{PPO}<") < page.index(f">{GRPO}<")
    assert "<svg" in page
    assert "<polyline" in page
    assert GRPO not in get("/", params={"q": "ppo"}).text


def test_transcript_shows_authors_hits_and_siblings(get, logged):
    page = get(f"/run/{PPO}/trajectory/{logged[0]}").text
    assert '<span class="thought">' in page
    assert '<span class="search">' in page
    assert '<span class="answer">' in page
    assert 'class="segment observation masked"' in page
    assert KLEE.title in page
    assert "has a golden answer" in page
    assert f"/run/{PPO}/trajectory/{logged[1]}" in page
    assert "advantage +0.500" in page


def test_tokens_are_coloured_by_what_the_log_has(get, logged):
    path = f"/run/{PPO}/trajectory/{logged[0]}"
    plain, coloured = get(path).text, get(f"{path}?heat=logprob").text
    assert "heat=logprob" in plain
    assert "heat=advantage" in plain
    assert 'class="t h' not in plain
    assert 'class="t h' in coloured
    assert "log-prob -0.250; advantage +0.500" in coloured
    assert "ids stand for tokens" in coloured


def test_advantages_that_are_no_numbers_have_no_colour():
    made = record(episode(), advantage=0.5)
    values = [float("nan"), float("inf"), -0.5, *made.advantages[3:]]
    step = SimpleNamespace(advantages=values)
    assert largest_advantage([step]) == 0.5
    assert [_colour("advantage", value, 0.5) for value in values[:3]] == ["h0", "h0", "n4"]


def test_next_and_previous_follow_the_listing_of_the_address(get, logged):
    found = re.findall(
        r"/trajectory/(\w{12})\?sort=searches", get(f"/run/{PPO}/trajectories?sort=searches").text
    )
    assert len(found) == 5
    page = get(f"/run/{PPO}/trajectory/{found[1]}?sort=searches").text
    assert f'rel="prev" href="/run/{PPO}/trajectory/{found[0]}?sort=searches"' in page
    assert f'rel="next" href="/run/{PPO}/trajectory/{found[2]}?sort=searches"' in page


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/run/none", 404, "no run 'none' with a log"),
        ("/run/..%2f..%2fetc/trajectories", 404, "no page"),
        (f"/run/{PPO}/trajectory/ffff", 404, "no trajectory 'ffff'"),
        (f"/run/{PPO}/trajectories?steps=x", 400, "steps x: expected a step"),
        (f"/run/{PPO}/trajectories?em=%27%20OR%201", 400, "expected a number"),
        (f"/run/{PPO}/trajectories?hops=x", 400, "hops x: expected a whole number"),
        (f"/run/{PPO}/trajectories?verdict=good", 400, "no verdict"),
        (f"/run/{PPO}/trajectories?sort=prompt", 400, "no listing is sorted by"),
        (f"/run/{PPO}/trajectories?after=x", 400, "page"),
        (f"/run/{PPO}?metric=loss", 404, "no metric"),
        ("/assets/../app.py", 404, ""),
        ("/assets/app.py", 404, ""),
    ],
)
def test_mistaken_address_gets_one_line(get, logged, path, status, said):
    answer = get(path)
    assert answer.status_code == status
    assert said in unescape(answer.text)


def test_page_is_sent_again_only_when_the_log_changed(get, workspace, logged):
    tag = get(f"/run/{PPO}").headers["etag"]
    unchanged = get(f"/run/{PPO}", headers={"if-none-match": tag})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    write_step(new_log(workspace / "runs" / PPO), 3)
    later = get(f"/run/{PPO}", headers={"if-none-match": tag})
    assert later.status_code == 200
    assert "0.300 at step 3" in later.text


@pytest.mark.parametrize("page", ["", "/trajectories"])
def test_page_of_the_latest_run_is_sent_again_after_a_step_and_a_new_run(get, workspace, logged, page):
    def again(tag):
        return get(f"/run/last{page}", headers={"if-none-match": tag})

    tag = get(f"/run/last{page}").headers["etag"]
    assert again(tag).status_code == 304
    write_step(new_log(workspace / "runs" / PPO), 3)
    after_step = again(tag)
    assert after_step.status_code == 200
    write_step(new_log(workspace / "runs" / LATER), 1)
    after_run = again(after_step.headers["etag"])
    assert after_run.status_code == 200
    assert LATER in after_run.text


def test_page_of_a_query_is_sent_again_when_a_known_reward_scored_more(get, workspace, logged):
    """The directory of the rescores is there before, so nothing else in the log changes."""
    file = rescore_file(workspace / "runs" / PPO / "log", "f1=1")
    row = {"run_id": PPO, "trajectory_id": logged[0], "step": 2, "phase": "train", "rewards": "f1=1"}
    row |= {"measure": "f1", "value": 0.25, "written": None}
    address = {"run": PPO, "q": "SELECT sum(value) AS total FROM rescores"}
    found = []
    for count in (1, 2):
        with writing_rescores(file) as write:
            write(pa.Table.from_pylist([row] * count, RESCORE_SCHEMA))
        tag = {"if-none-match": found[-1].headers["etag"]} if found else {}
        found.append(get("/sql", params=address, headers=tag))
    assert [answer.status_code for answer in found] == [200, 200]
    assert "0.5" in found[1].text
    assert get("/sql", params=address, headers={"if-none-match": found[1].headers["etag"]}).status_code == 304


def test_damaged_run_is_named_and_the_others_are_shown(get, workspace, logged):
    (workspace / "runs" / GRPO / "log" / "manifest.json").write_text("{")
    page = get("/").text
    assert PPO in page
    assert 'class="warning"' in page
    assert "manifest.json" in page
    assert get(f"/run/{GRPO}").status_code == 400
    assert get(f"/run/{PPO}").status_code == 200


def test_workspace_without_runs_says_what_to_type(get):
    answer = get("/")
    assert answer.status_code == 200
    assert "start one with `srl train`" in answer.text


def test_taken_port_is_one_line(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["inspect", "web", "--port", str(taken.getsockname()[1])]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_samples_of_a_question_stand_side_by_side(get, logged):
    page = get(f"/run/{PPO}/siblings/{logged[1]}").text
    for sample, one in enumerate(logged[:2]):
        assert f'/run/{PPO}/trajectory/{one}">sample {sample}</a>' in page
    assert logged[2] not in page
    assert page.count("advantage +0.500") == 2
    assert "standard deviation 0.500" in page


def test_question_is_followed_over_steps_and_runs(get, logged):
    page = get("/question", params={"id": "nq-0"}).text
    assert page.index(f">{GRPO}</a></h2>") < page.index(f">{PPO}</a></h2>")
    assert re.findall(r'<td>(?:val|train)</td><td class="n">(\d)</td>', page) == [
        "1",
        "2",
        "3",
        "1",
        "2",
        "2",
    ]
    assert '<span class="search">painter 0</span>' in page
    only = get("/question", params={"id": "nq-0", "run": GRPO}).text
    assert f">{PPO}</a></h2>" not in only
    assert get("/question", params={"id": "nq-99"}).status_code == 404


def test_comparison_names_flipped_questions_and_changed_queries(get, workspace):
    with new_log(workspace / "runs" / GRPO) as log:
        for step, answer in ((1, "Münchenbuchsee"), (2, "Bern")):
            made = [episode(0, step=step, phase="val", answer=answer), episode(1, step=step, phase="val")]
            if step == 2:
                made[1].searches[:] = [search("another query", KLEE)]
            log.write(step, "val", [record(one) for one in made], {"val/em": 0.5})
    path = {"a": GRPO, "b": GRPO, "step_a": "1", "step_b": "2", "phase": "val"}
    page = get("/compare", params=path).text
    assert page == get("/compare", params={"a": GRPO, "b": GRPO}).text
    assert "2 questions are in both. Exact match 0.500 → 0.000." in page
    assert "worse in b: 1" in page
    assert "better in b: 0" in page
    assert "other queries: 1" in page
    assert "where was painter 0 born?" in page
    assert "where was painter 1 born?" not in page
    other = get("/compare", params=path | {"show": "queries"}).text
    assert '<span class="search changed">another query</span>' in other


def test_comparison_begins_and_ends_with_steps_that_are_not_pruned(get, workspace):
    run = workspace / "runs" / GRPO
    with new_log(run) as log:
        for step, answer in enumerate(("Bern", "Bern", "Münchenbuchsee", "Bern"), start=1):
            log.write(step, "val", [record(episode(0, step=step, phase="val", answer=answer))], {})
    prune(run / "log", {(1, "val"), (4, "val")})
    page = get("/compare").text
    assert "1 questions are in both. Exact match 0.000 → 1.000." in page
    for side, step in (("a", 2), ("b", 3)):
        assert f'name="step_{side}" size="6" inputmode="numeric" value="{step}"' in page


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"a": "none"}, 404),
        ({"step_a": "99"}, 400),
        ({"step_a": "x"}, 400),
        ({"phase": "sft"}, 400),
        ({"show": "x"}, 400),
        ({"a": PPO, "b": PPO, "step_a": "1", "step_b": "1"}, 400),
        ({"a": PPO, "b": PPO, "step_a": "2", "step_b": "2"}, 400),
    ],
)
def test_comparison_that_cannot_be_is_one_line(get, logged, params, status):
    answer = get("/compare", params={"a": GRPO, "b": PPO} | params)
    assert answer.status_code == status
    assert 'class="problem"' in answer.text


def test_rows_of_a_query_open_trajectories(get, logged):
    query = "SELECT id, step, answer FROM trajectories WHERE step = 2 ORDER BY position"
    page = get("/sql", params={"q": query, "run": PPO}).text
    assert [f'href="/run/{PPO}/trajectory/{one}"' in page for one in logged] == [True] * 3
    everywhere = get("/sql", params={"q": "SELECT run_id, id FROM trajectories", "run": "all"}).text
    assert f'href="/run/{GRPO}/trajectory/' in everywhere
    assert f'href="/run/{PPO}/trajectory/' in everywhere


@pytest.mark.parametrize(
    "query",
    [
        "DROP VIEW trajectories", "COPY (SELECT 1) TO 'x.csv'", "SELECT 1; SELECT 2", "SELEC 1",
        "FROM read_csv('/etc/passwd')", "FROM read_text('/etc/passwd')", "ATTACH 'x.db'", "SET threads = 1",
        "CREATE TABLE t AS SELECT 1", "FROM nowhere", "INSTALL httpfs", "PRAGMA database_list",
    ],
)  # fmt: skip
def test_query_that_does_more_than_read_the_log_is_refused(get, logged, query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    answer = get("/sql", params={"q": query, "run": PPO})
    assert answer.status_code == 200
    assert 'role="alert"' in answer.text
    assert "root:" not in answer.text
    assert "--unsafe" not in answer.text
    assert sorted(tmp_path.rglob("*")) == before


def test_long_answer_of_a_query_is_cut_and_a_slow_query_stopped(get, logged, monkeypatch):
    page = get("/sql", params={"q": "FROM range(5000)", "run": PPO}).text
    assert "1,000 rows" in page
    large = get("/sql", params={"q": "SELECT {'a': range(5000000)}", "run": PPO})
    assert large.status_code == 200
    assert 'role="alert"' in large.text
    assert len(large.content) < 100_000
    monkeypatch.setattr("srl.browse.web.pages.QUERY_S", 0.05)
    slow = "SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range + b.range = 7"
    assert "stopped after" in get("/sql", params={"q": slow, "run": PPO}).text


@pytest.mark.parametrize(
    "address",
    [
        "/compare?from={digits}", "/compare?step_a={digits}", "/run/last/trajectories?hops={digits}",
        "/run/last/trajectories?steps=1:{digits}", "/run/last/trajectories?min_searches={digits}",
        "/run/last/trajectories?after={brackets}", "/run/{name}", "/run/{name}/trajectories",
    ],
)  # fmt: skip
def test_an_odd_address_is_the_askers_error(get, logged, address):
    odd = {"digits": "9" * 5000, "brackets": "[" * 5000, "name": "n" * 5000}
    answer = get(address.format(**odd))
    assert 400 <= answer.status_code < 500
