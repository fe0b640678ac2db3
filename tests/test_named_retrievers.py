"""Several retrievers in one run: how the policy names one, where the query goes, what it is told."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scripts import PAGE, TableSearch, play
from tests.tiny_models import byte_level_tokenizer

from srl.protocol import TEMPLATES, Action, parse_action, search_tag
from srl.rollout.codec import Codec
from srl.serve.named_retrievers import NamedRetrievers
from srl.trajectory import Passage, Search

PAPER = Passage("paper", '"On lighthouses"\nOssa Trell built nine of them.')
ASKS_WEB = '<think>I ask the web.</think><search engine="web"> lighthouse </search>'
ASKS = "<think>I search.</think><search>lighthouse</search>"
ANSWERS = "<think>Now I know.</think><answer>Ossa Trell</answer>"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(byte_level_tokenizer())


READ = [
    '<search engine="web">', "<search engine=web>", '<search \n engine\t=  " web "  >',
]  # fmt: skip
UNREAD = [
    '<search k="3">q</search>', '<search engine="web" k="3">q</search>', "<search engine=>q</search>",
    '<search engine="a" engine="b">q</search>', "<search engine>q</search>", '<search engine="web>q</search>',
    "<search engine=a b>q</search>", '<searchengine="web">q</search>', '<search engine="a<b">q</search>',
    "<search >q</search>", '<answer engine="web">q</answer>', '<search engine="web">q</answer>',
    '<search engine="web">q',
]  # fmt: skip


def test_a_search_tag_names_its_retriever_and_anything_else_in_it_is_no_action():
    for tag in READ:
        assert parse_action(f"<think>so</think>{tag} q </search>") == Action("search", "q", "web")
    for text in UNREAD:
        assert (text, parse_action(text)) == (text, None)


@given(st.text(string.ascii_lowercase + string.digits + "_-", min_size=1))
def test_the_tag_that_prompts_show_is_the_tag_that_is_read(name):
    assert parse_action(f"{search_tag(name)}q</search>") == Action("search", "q", name)


def test_each_search_goes_to_the_retriever_that_it_names(codec):
    default, web = TableSearch([PAGE]), TableSearch([PAPER])
    trajectory = play(codec, [ASKS_WEB, ASKS, ANSWERS], NamedRetrievers(default, {"web": web}))
    assert (default.queries, web.queries) == (["lighthouse"], ["lighthouse"])
    assert [(search.retriever, search.turn) for search in trajectory.searches] == [("web", 0), ("", 1)]
    assert [search.hits[0].passage for search in trajectory.searches] == [PAPER, PAGE]
    assert "On lighthouses" in trajectory.segments[2].text
    assert (trajectory.end, trajectory.valid_searches, trajectory.valid_actions) == ("answered", 2, 3)
    assert trajectory.segments[1].text == ASKS_WEB


def test_a_retriever_that_there_is_not_is_the_policys_own_mistake(codec):
    web = TableSearch()
    searcher = NamedRetrievers(TableSearch(), {"web": web, "papers": TableSearch()})
    told = TEMPLATES["search-r1"].naming({"web": "", "papers": ""})
    asks = ASKS_WEB.replace('"web"', '"wbe"')
    trajectory = play(codec, [asks, ANSWERS], searcher, template=told)
    (search,) = trajectory.searches
    assert (search.status, search.retriever, search.is_fault, search.attempts) == (
        "rejected",
        "wbe",
        False,
        0,
    )
    assert search.error == "no search engine 'wbe': there are web, papers"
    assert web.queries == []
    assert [segment.kind for segment in trajectory.segments] == ["prompt", "policy", "feedback", "policy"]
    assert '(for another search engine: <search engine="web">, <search engine="papers">)' in (
        trajectory.segments[2].text
    )
    assert (trajectory.valid, trajectory.valid_actions, trajectory.valid_searches) == (True, 1, 0)


def test_a_fault_of_one_retriever_fails_the_episode_and_says_which(codec):
    web = TableSearch(outcomes=[Search("lighthouse", status="timed_out", error="no answer")])
    trajectory = play(codec, [ASKS_WEB, ANSWERS], NamedRetrievers(TableSearch(), {"web": web}))
    assert (trajectory.end, trajectory.searches[-1].retriever) == ("failed", "web")
