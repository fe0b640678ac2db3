"""The pages of `srl inspect web`: who gets them, what is sent with them, and what they show."""

import re
import shutil
from html import unescape

import pytest
from starlette.testclient import TestClient
from tests.store_builder import (
    GRPO,
    KLEE,
    PPO,
    episode,
    new_log,
    question,
    read,
    record,
    search,
    two_runs,
    write_step,
)

from srl.browse.curve import Series
from srl.browse.listing import HEADINGS
from srl.browse.web.app import create_app
from srl.browse.web.charts import charts
from srl.trajectory import Passage, Question, Segment
from srl.workspace import Workspace

LATER = "20250104T030405Z-tiny-grpo-s1-02ac"
HOSTILE = {
    "script": "<script>alert(1)</script>", "end of style": "</style></pre><img src=x onerror=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x="', "template": "{{ 7 * 191 }}{% include 'base.html' %}",
    "right to left": "abc\u202edef\u2066", "null": "a\x00b", "ansi": "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "emoji": "👩\u200d🚀 naïve 日本語", "lone surrogate": "x\ud800y", "entity": "&lt;b&gt; &amp;",
    "url": "javascript:alert(1)",
}  # fmt: skip


def client(workspace):
    """Asks for pages of a workspace as a browser on this machine does."""
    return TestClient(create_app(Workspace(workspace)), base_url="http://127.0.0.1:7007")


@pytest.fixture
def get(workspace):
    return client(workspace).get


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A finished run and one that is being written; with the ids of the later one's step 2."""
    runs = tmp_path_factory.mktemp("written") / "runs"
    made = [
        episode(0, step=2, answer="Münchenbuchsee"),
        episode(0, step=2, sample=1, answer=None),
        episode(1, step=2, answer="Bern", asked=question(1, hops=3)),
    ]
    made[0].segments[2] = read("observation", f"<information>{KLEE.text}</information>", 0)
    two_runs(runs, made)
    return runs, [one.id for one in made]


@pytest.fixture
def logged(workspace, written):
    """The two runs in the workspace of this test; gives the ids."""
    runs, ids = written
    shutil.copytree(runs, workspace / "runs")
    return ids


def hostile(text):
    """A trajectory that has `text` in every field that a model, a passage or a question can write.

    The golden answer, which pages mark, begins with it, and stands beside the text alone.
    """
    gold = f"{text} Bern"
    asked = Question(
        f"q{len(text)}", text, (gold,), text, text, ({"role": "user", "content": text},), {"hops": 2}
    )
    made = episode(0, answer=text, asked=asked)
    made.segments[1] = Segment(
        "policy", (1, 2), f"<think>{text}</think><search>{text}</search>", 0, (-0.5, -0.5)
    )
    made.segments[2] = read("observation", f"<information>{text}; {gold}</information>", 0)
    made.searches[:] = [search(text, Passage(text, f"{text}\n{text}; {gold}"), error=text)]
    return made


def test_every_page_answers_with_the_policy_on_content(get, logged):
    run = f"/run/{PPO}"
    paths = ["/", run, f"{run}/trajectories", f"{run}/trajectory/{logged[0]}", f"{run}/group/{logged[0]}"]
    paths += ["/compare", "/assets/page.js", "/nowhere"]
    for path in paths:
        answer = get(path)
        assert answer.status_code == (404 if path == "/nowhere" else 200), path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


ASKERS = [
    ({"host": "evil.example"}, 403), ({"host": "127.0.0.1.evil.example"}, 403),
    ({"host": "localhost:7007"}, 200), ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403), ({"origin": "http://127.0.0.1:7007"}, 200),
    ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, 403),
    ({"sec-fetch-site": "same-site", "sec-fetch-dest": "empty"}, 403),
    ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 200),
    ({"sec-fetch-site": "same-origin", "sec-fetch-dest": "empty"}, 200),
]  # fmt: skip


def test_only_this_machine_is_answered(get, logged):
    for headers, status in ASKERS:
        answer = get("/", headers=headers)
        assert (headers, answer.status_code, GRPO in answer.text) == (headers, status, status == 200)
        assert "content-security-policy" in answer.headers


def test_pages_can_only_be_read(workspace, logged):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client(workspace).request(method, "/").status_code == 405


@pytest.fixture(scope="module")
def hostile_pages(tmp_path_factory):
    """Asks for the pages of a run whose texts are `HOSTILE`, and a last one of a megabyte."""
    folder = tmp_path_factory.mktemp("hostile")
    with new_log(folder / "runs" / GRPO) as log:
        made = [hostile(text) for text in (*HOSTILE.values(), "x" * 1_000_000)]
        log.write(1, "train", [record(one) for one in made], {"train/em": 0.5})
    get = client(folder).get
    return lambda place, page: get(page.format(run=f"/run/{GRPO}", id=made[place].id))


PAGES = [
    "{run}/trajectory/{id}",
    "{run}/trajectory/{id}?heat=logprob",
    "{run}/trajectories",
    "{run}/group/{id}",
]


@pytest.mark.parametrize("page", PAGES)
def test_hostile_text_is_shown_and_changes_nothing_and_a_megabyte_is_cut(hostile_pages, page):
    for place, text in enumerate(HOSTILE.values()):
        answer = hostile_pages(place, page)
        assert answer.status_code == 200
        assert re.findall(r"<script[^>]*>", answer.text) == ['<script src="/assets/page.js">']
        assert not re.search(r"<[^>]*\son\w+\s*=|<img|<style|href=\"javascript|1337", answer.text)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", answer.text)
        plain = text.encode("utf-8", "replace").decode()
        if plain.isprintable() and page == PAGES[0]:
            assert plain in unescape(answer.text)
    assert len(hostile_pages(-1, page).text) < 1_000_000


def test_runs_are_a_table_above_their_curves_the_latest_first(get, logged):
    page = get("/").text
    assert page.index(f">{PPO}<") < page.index(f">{GRPO}<") < page.index("<svg")
    assert GRPO not in get("/", params={"q": "ppo"}).text


SHOWN = {
    "{run}/trajectory/{ids[0]}": ["painter 0 born?", "<mark>Münchenbuchsee</mark>", KLEE.title, "{ids[1]}"],
    "{run}/trajectory/{ids[0]}?heat=logprob": ["log-prob -0.250; advantage +0.500"],
    "{run}/group/{ids[1]}": ["painter 0 born?", "<strong>Münchenbuchsee<", "{ids[0]}", "{ids[1]}"],
    "/question?id=nq-0": ["<strong>Münchenbuchsee<", "painter 0</span>"],
    "{run}/trajectories": [">Münchenbuchsee</td>", *(f">{heading}" for heading in HEADINGS.values())],
}  # fmt: skip
"""Question and gold answer are on every page, and the answer is marked where it stands."""


def test_what_a_page_shows(get, logged):
    for path, texts in SHOWN.items():
        page = get(path.format(run=f"/run/{PPO}", ids=logged)).text
        for text in texts:
            assert text.format(ids=logged) in page, (path, text)
    assert logged[2] not in get(f"/run/{PPO}/group/{logged[1]}").text


ADDRESSES = [
    ("/run/none", 404), ("/run/..%2f..%2fetc/trajectories", 404), ("/run/{ppo}/trajectory/ffff", 404),
    ("/run/{ppo}/trajectories?steps=x", 400), ("/run/{ppo}/trajectories?em=%27%20OR%201", 400),
    ("/run/{ppo}/trajectories?hops=x", 400), ("/run/{ppo}/trajectories?verdict=good", 400),
    ("/run/{ppo}/trajectories?sort=prompt", 400), ("/run/{ppo}/trajectories?after=x", 400),
    ("/run/{ppo}?metric=loss", 404), ("/assets/../app.py", 404), ("/assets/app.py", 404),
    ("/question?id=nq-99", 404), ("/compare?a=none", 404), ("/compare?step_a=99", 400),
    ("/compare?step_a=x", 400), ("/compare?phase=sft", 400), ("/compare?show=x", 400),
    ("/compare?a={ppo}&b={ppo}&step_a=1&step_b=1", 400), ("/compare?from={digits}", 400),
    ("/compare?step_a={digits}", 400), ("/run/last/trajectories?hops={digits}", 400),
    ("/run/last/trajectories?steps=1:{digits}", 400), ("/run/last/trajectories?after={brackets}", 400),
    ("/run/{name}", 404), ("/run/{name}/trajectories", 404),
]  # fmt: skip


def test_a_mistaken_address_is_the_askers_error(get, logged):
    for path, status in ADDRESSES:
        answer = get(path.format(ppo=PPO, digits="9" * 5000, brackets="[" * 5000, name="n" * 5000))
        assert (path, answer.status_code) == (path, status)
        assert "assets" in path or 'class="problem"' in answer.text


@pytest.mark.parametrize("page", ["", "/trajectories"])
def test_a_page_is_sent_again_only_after_a_step_and_a_new_run(get, workspace, logged, page):
    def again(tag):
        return get(f"/run/last{page}", headers={"if-none-match": tag})

    tag = get(f"/run/last{page}").headers["etag"]
    assert (again(tag).status_code, again(tag).content) == (304, b"")
    write_step(new_log(workspace / "runs" / PPO), 3)
    after_step = again(tag)
    assert after_step.status_code == 200
    assert page or "0.300 at step 3" in after_step.text
    write_step(new_log(workspace / "runs" / LATER), 1)
    assert LATER in again(after_step.headers["etag"]).text


def test_a_damaged_run_is_named_and_the_others_are_shown(get, workspace, logged):
    (workspace / "runs" / GRPO / "log" / "manifest.json").write_text("{")
    assert get("/").text.count('class="warning"') == 1
    assert [get(f"/run/{run}").status_code for run in (GRPO, PPO)] == [400, 200]
    counted = get("/sql", params={"run": "all", "q": "SELECT count(*) FROM trajectories"}).text
    assert ">5<" in counted


def test_a_question_is_followed_over_steps_and_runs(get, logged):
    page = get("/question", params={"id": "nq-0"}).text
    assert page.index(f">{GRPO}</a></h2>") < page.index(f">{PPO}</a></h2>")
    steps = re.findall(r'<td>(?:val|train)</td>\s*<td class="n">(\d)</td>', page)
    assert steps == ["1", "2", "3", "1", "2", "2"]


def test_a_comparison_opens_on_what_differs_with_interval_and_test(get, workspace):
    with new_log(workspace / "runs" / GRPO) as log:
        for step, answer in ((1, "Bern"), (2, "Münchenbuchsee")):
            made = [episode(0, step=step, phase="val", answer=answer), episode(1, step=step, phase="val")]
            if step == 2:
                made[1].searches[:] = [search("another query", KLEE)]
            log.write(step, "val", [record(one) for one in made], {"val/em": 0.5})
    path = {"a": GRPO, "b": GRPO, "step_a": "1", "step_b": "2", "phase": "val"}
    page = get("/compare", params=path).text
    assert page == get("/compare", params={"a": GRPO, "b": GRPO}).text
    [row] = re.findall(r"<tr><td>nq</td>.*?</tr>", page)
    cells = ["nq", "2", "0.000", "0.500", "+0.500", "-1.000 to +1.000", "1"]
    assert re.findall(r">([^<>]+)</td>", row) == cells
    for text in ("other score: 1", "worse in b: 0", "better in b: 1", "other queries: 1", "painter 0 born?"):
        assert text in page
    assert "painter 1 born?" not in page
    other = get("/compare", params=path | {"show": "queries"}).text
    assert '<span class="search changed">another query</span>' in other


def test_a_long_answer_of_a_query_is_cut_and_a_slow_query_stopped(get, logged, monkeypatch):
    assert get("/sql", params={"q": "FROM range(5000)", "run": PPO}).text.count("<tr>") == 1001
    large = get("/sql", params={"q": "SELECT {'a': range(5000000)}", "run": PPO})
    assert len(large.content) < 100_000
    monkeypatch.setattr("srl.browse.web.pages.QUERY_S", 0.05)
    slow = "SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range + b.range = 7"
    assert 'role="alert"' in get("/sql", params={"q": slow, "run": PPO}).text


def test_runs_that_differ_in_their_seed_share_a_colour():
    configs = {f"s{n}": f'{{"trainer": {{"seed": {n % 2}}}, "lr": {n // 2}}}' for n in range(4)}
    series = [Series(run, "val", "val/em", run, (1, 2), (0.1 * n, 0.2)) for n, run in enumerate(configs)]
    [chart] = charts({"val/em": series}, configs)
    assert [line.colour for line in chart.lines] == ["c0", "c1"]
    assert chart.svg.count('class="band"') == 2
