"""`srl inspect report`: one file with everything in it, of the trajectories that were asked for."""

import re
from base64 import b64encode
from hashlib import sha256
from html import unescape

import pytest
from tests.store_builder import GRPO, episode, new_log, question, record, write_step
from tests.test_web import HOSTILE, hostile

from srl.cli import main

GROUPS = 11


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with a validation and a step of `GROUPS` questions, two samples each; the ids of the step."""
    workspace = tmp_path_factory.mktemp("logged")
    log = new_log(workspace / "runs" / GRPO)
    write_step(log, 1, "val")
    made = [
        episode(number, step=2, sample=sample, answer=answer, asked=question(number))
        for number in range(GROUPS)
        for sample, answer in enumerate(("Münchenbuchsee", "Bern"))
    ]
    records = [record(one, advantage=1.5 - 2 * one.sample) for one in made]
    log.write(2, "train", records, {"critic/score/mean": 0.5})
    return workspace, [one.id for one in made]


def written(folder, *arguments):
    """The report that the command writes with these arguments."""
    assert main(["inspect", "report", *arguments, "-o", str(folder / "r.html")]) == 0
    return (folder / "r.html").read_text(encoding="utf-8")


def test_the_file_loads_nothing_and_its_links_lead_into_itself(workspace):
    """The trajectories have hostile text in all fields."""
    made = [hostile(text) for text in (*HOSTILE.values(), "https://evil.example/x.png")]
    new_log(workspace / "runs" / GRPO).write(1, "train", [record(one) for one in made], {"train/em": 0.5})
    page, ids = written(workspace, "--limit", "100"), [one.id for one in made]
    tags = re.findall(r"<[a-z][^>]*>", page)
    names = {re.match(r"<[a-z]+", tag)[0][1:] for tag in tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form", "input"})
    assert not [tag for tag in tags if re.search(r"\s(on\w+|src\w*|style|data|action|xlink:href)=", tag)]
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"url\(|@import|https?:", style)
    links, places = (re.findall(rf'\s{name}="([^"]*)"', " ".join(tags)) for name in ("href", "id"))
    assert {f"#t-{one}" for one in ids} <= set(links) <= {f"#{place}" for place in places}
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        in unescape(page)
    )


def test_chosen_trajectories_are_whole_and_their_groups_rows_with_advantages(logged, tmp_path, monkeypatch):
    workspace, ids = logged
    monkeypatch.setenv("SRL_WORKSPACE", str(workspace))
    page = written(tmp_path, "--where", "phase = 'train' AND em = 0", "--sort", "question_id")
    assert re.findall(r'id="t-(\w+)"', page) == sorted(ids[1::2], key=lambda one: f"nq-{ids.index(one) // 2}")
    assert page.count("+1.500") == GROUPS
    assert page.count("standard deviation 0.500") == GROUPS
    assert all(page.count(one) == 1 for one in ids[::2])
    assert page.count("turn 1: policy") == GROUPS
