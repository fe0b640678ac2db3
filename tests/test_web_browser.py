"""The pages of `srl inspect web` in headless Chromium, as a person uses them: `make test-browser`."""

import os
import re
import shutil

import pytest
from tests.live_server import running
from tests.store_builder import GRPO, PPO, episode, new_log, question, two_runs, write_step

from srl.browse.web import create_app
from srl.trajectory import Passage, Question, Segment
from srl.workspace import Workspace

ASKED = os.environ.get("SRL_BROWSER") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ASKED, reason="make test-browser runs it"),
    *([pytest.mark.must_run] if ASKED else []),
]

HOSTILE = (
    "<script>document.title='taken'</script></style></pre></textarea><img src=//evil.example/x onerror=x()>"
    "\" onmouseover=\"alert(1)\" \u202edesrever\u2066 \x00 \x1b[31m 👩\u200d🚀 {{7*191}}"
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no chromium; on Debian type: apt-get install chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the pages, the log that is still written, and the ids of its step 2."""
    runs = tmp_path_factory.mktemp("site") / "runs"
    made = [episode(0, step=2, sample=0, answer="Münchenbuchsee"), episode(0, step=2, sample=1, answer=None)]
    made += [episode(1, step=2, answer="Bern", asked=question(1, hops=3)), hostile()]
    log = two_runs(runs, made, **{"critic/score/mean": 0.2})
    with running(create_app(Workspace(runs.parent))) as url:
        yield url.removesuffix("/retrieve"), log, [one.id for one in made]


def hostile():
    asked = Question("hostile", HOSTILE, (HOSTILE,), HOSTILE, "x", ({"role": "user", "content": HOSTILE},))
    passages = (Passage(HOSTILE, f"{HOSTILE}\n{HOSTILE}"),)
    made = episode(0, step=2, answer=HOSTILE, asked=asked, passages=passages)
    made.segments[1] = Segment("policy", (1,), f"<think>{HOSTILE}{'x' * 100_000}", 0, (-1.5,))
    return made


@pytest.fixture
def tab(chromium, site):
    """Opens a page in a context of its own; fails on a request elsewhere, an error and a dialog."""
    contexts, wrong = [], []

    def new(path, **options):
        context = chromium.new_context(base_url=site[0], **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda one: wrong.append(one.text) if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda one: None if one.url.startswith(site[0]) else wrong.append(one.url))
        page.goto(path)
        return page

    yield new
    for context in contexts:
        context.close()
    assert wrong == []


def paths(ids):
    run = f"/run/{PPO}"
    yield from ("/", run, f"{run}/trajectories", f"{run}/group/{ids[0]}", "/question?id=nq-0")
    yield from (f"{run}/trajectory/{ids[at]}{heat}" for at in (0, 3) for heat in ("", "?heat=logprob"))
    yield f"{run}/trajectory/{ids[0]}?heat=advantage"
    yield f"/compare?a={GRPO}&b={GRPO}&step_a=1&step_b=3&show=worse"
    yield f"/sql?run={PPO}&q=SELECT+id,+answer+FROM+trajectories"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fit_a_phone(tab, site, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = tab("/", color_scheme=scheme, viewport={"width": 390, "height": 844})
    for path in paths(site[2]):
        page.goto(path)
        violations = Axe().run(page).response["violations"]
        serious = [one["id"] for one in violations if one["impact"] in ("serious", "critical")]
        assert (path, serious) == (path, [])
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, path


def test_a_listing_is_filtered_by_facets_and_by_typing_and_sorted(tab):
    page = tab(f"/run/{PPO}/trajectories")
    page.get_by_role("complementary").get_by_role("link", name=re.compile("unanswered")).first.click()
    page.wait_for_url("**verdict=unanswered**")
    assert page.locator("tbody tr").count() == 1
    page.get_by_role("link", name="clear").click()
    page.wait_for_url("**/trajectories")
    page.keyboard.press("/")
    page.keyboard.type("painter 1")
    page.keyboard.press("Enter")
    page.wait_for_url("**contains=painter**")
    assert page.locator("tbody tr").count() == 2
    page.get_by_role("columnheader", name="reward").get_by_role("link").click()
    page.wait_for_url("**sort=-reward**")
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("reward")


def test_a_transcript_by_keys_hits_colours_and_copies(tab, site):
    page = tab(
        f"/run/{PPO}/trajectory/{site[2][0]}?sort=step", permissions=["clipboard-read", "clipboard-write"]
    )
    page.locator("details.found summary").click()
    page.get_by_text("Paul Klee was born").wait_for()
    page.get_by_role("button", name="copy id").click()
    page.get_by_role("button", name="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == site[2][0]
    first = page.url
    page.keyboard.press("n")
    page.wait_for_url(lambda url: url != first)
    page.keyboard.press("p")
    page.wait_for_url(first)
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="logprob").click()
    page.wait_for_url("**heat=logprob**")
    assert page.locator(".t[title*='log-prob']").count() > 5
    page.keyboard.press("u")
    page.wait_for_url("**/trajectories?sort=step")


def test_pages_follow_what_is_written(chromium, tab, site, tmp_path):
    page = tab(f"/run/{PPO}")
    assert "at step 2" in page.locator("#part-charts").inner_text()
    write_step(site[1], 3)
    page.get_by_text("0.300 at step 3").first.wait_for()
    assert page.locator("#live").inner_text() == "live"
    with running(create_app(Workspace(tmp_path))) as url:
        empty = chromium.new_page()
        empty.goto(url.removesuffix("/retrieve"))
        assert "Nothing to show" in empty.content()
        write_step(new_log(tmp_path / "runs" / GRPO), 1)
        empty.get_by_role("link", name=GRPO).first.wait_for(timeout=15_000)
        empty.close()
