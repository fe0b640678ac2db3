"""The tools `open` and `find`: documents of an index, a server or a cassette; faults are no mistakes."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.live_server import free_port, running
from tests.native_models import NativeEngine, family_codec
from tests.scripts import QUESTION, TableSearch

from srl.data.split_passages import Splitter
from srl.index import Index, build_index, open_index
from srl.protocol import TEMPLATES, ToolCall
from srl.rollout.codec import Codec
from srl.rollout.documents import Document, Documents, FindCall, OpenCall
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.rollout.native import Native
from srl.rollout.protocol import SearchCall
from srl.serve import HttpSearch, LocalSearch
from srl.serve.cassette import MissingFromCassette, Recorder, Replay
from srl.serve.named_retrievers import NamedRetrievers, aclose
from srl.serve.server import create_app
from srl.trajectory import FAULTS, Hit, Passage, Search, SearchStatus, Trajectory

LONG = Passage(
    "velmar", '"Velmar"\n' + " ".join(f"Sentence {n} tells of the lighthouse." for n in range(900))
)
PARTS = Splitter(40).split(LONG)
SHORT = Passage("isle", '"Isle"\nThe isle of Orm has no lighthouse. Its ferry sails at dawn.')
CALLS = {"open": {"id": "velmar#3"}, "find": {"id": "velmar", "text": "SENTENCE 700"}}


@pytest.fixture(scope="module")
def codec() -> Codec:
    return family_codec("qwen2.5")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = tmp_path_factory.mktemp("index") / "i"
    build_index([*PARTS, SHORT], directory)
    return open_index(directory)


@pytest.fixture(scope="module", params=["index", "server", "named", "cassette"])
def search(request: pytest.FixtureRequest, index: Index, tmp_path_factory: Any) -> Iterator[Any]:
    """A search tool of each sort over the same passages."""
    if request.param == "server":
        with running(create_app(index)) as url:
            yield HttpSearch(url, 3)
    elif request.param == "named":
        yield NamedRetrievers(TableSearch(), {"isle": LocalSearch(index, 3)})
    elif request.param == "cassette":
        tape = tmp_path_factory.mktemp("tape") / "t"
        asyncio.run(document(Recorder(LocalSearch(index, 3), tape), PARTS[2]))
        yield Replay(tape)
    else:
        yield LocalSearch(index, 3)


async def document(search: Any, passage: Passage, retriever: str = "") -> Search:
    try:
        return await search.document(passage, retriever)
    finally:
        await aclose(search)


def test_every_search_tool_has_the_parts_of_a_document_in_their_order(search, index):
    retriever = "isle" if isinstance(search, NamedRetrievers) else ""
    outcome = asyncio.run(document(search, PARTS[2], retriever))
    assert len(PARTS) > 64
    assert [hit.passage.contents for hit in outcome.hits] == [part.contents for part in PARTS]
    assert (outcome.status, outcome.retriever) == ("ok", retriever)
    if isinstance(search, Replay):
        with pytest.raises(MissingFromCassette):
            asyncio.run(document(search, SHORT))
        return
    assert [hit.passage.id for hit in asyncio.run(document(search, SHORT, retriever)).hits] == ["isle"]
    assert asyncio.run(document(search, Passage("gone#1", ""), retriever)).status == "empty"


def test_a_server_without_documents_says_so_before_it_is_asked_for_one(index):
    live = open_index(index.directory)
    live.live = True

    async def lacks(search: Any) -> str:
        try:
            return await search.lacks_documents()
        finally:
            await aclose(search)

    with running(create_app(index)) as url:
        assert asyncio.run(lacks(HttpSearch(url, 3))) == ""
        assert asyncio.run(lacks(HttpSearch(url.replace("/retrieve", "/elsewhere/retrieve"), 3))) != ""
    assert asyncio.run(lacks(HttpSearch(f"http://127.0.0.1:{free_port()}", 3, retries=0))) != ""
    with running(create_app(live)) as url:
        assert asyncio.run(lacks(HttpSearch(url, 3))) != ""
    assert asyncio.run(lacks(LocalSearch(index, 3))) == ""
    assert asyncio.run(lacks(LocalSearch(live, 3))) != ""
    assert asyncio.run(lacks(NamedRetrievers(LocalSearch(index, 3), {"table": TableSearch()}))) != ""


class Faulty(TableSearch):
    """A search that finds two passages, whose documents have such a fate."""

    def __init__(self, status: SearchStatus = "ok") -> None:
        super().__init__([PARTS[2], SHORT])
        self.status, self.opened = status, list[str]()

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        self.opened.append(passage.id)
        hits = [Hit(part, 0.0) for part in (PARTS if passage is PARTS[2] else [passage])]
        return Search(passage.id, tuple(hits) if self.status == "ok" else (), self.status, error="why")

    async def lacks_documents(self) -> str:
        return ""


def play(
    codec: Codec, search: Any, *turns: Sequence[ToolCall] | str, longest: int = 300, only: str = ""
) -> Trajectory:
    """An episode that makes these calls turn by turn; it may use all tools, or `only` search."""
    documents = Documents(search, lambda text: len(codec.encode_text(text)), longest)
    tools = {"search": SearchCall(search), "open": OpenCall(documents), "find": FindCall(documents)}
    tools = {"search": tools["search"]} if only else tools
    native = Native.of(codec, TEMPLATES["tools"], tools)
    texts = [turn if isinstance(turn, str) else native.glue.format.write(turn) for turn in turns]
    options = EpisodeOptions(max_turns=6, max_turn_tokens=2000, max_obs_length=longest,
                             max_prompt_length=4096, max_response_length=9000)  # fmt: skip

    async def run() -> Trajectory:
        try:
            return await run_episode(
                QUESTION, NativeEngine(native, texts), protocol=native, options=options,
            )  # fmt: skip
        finally:
            await aclose(search)

    return asyncio.run(run())


SEARCH = [ToolCall("search", {"query": "lighthouse sentence"})]


def observations(trajectory: Trajectory) -> list[str]:
    return [segment.text for segment in trajectory.segments if segment.kind == "observation"]


def test_an_episode_opens_and_searches_a_document_that_was_shown(codec, index):
    turns = (
        [ToolCall("search", {"query": "ferry dawn"})],
        [ToolCall("open", {"id": "isle"})],
        SEARCH,
        [ToolCall("open", {"id": "velmar", "page": 2})],
        [ToolCall("find", {"id": "velmar", "text": "TENCE 700"})],
        "Ossa Trell",
    )
    trajectory = play(codec, LocalSearch(index, 1), *turns, longest=700)
    assert (trajectory.end, trajectory.malformed) == ("answered", 0)
    found = [(search.tool, search.status, search.cut) for search in trajectory.searches]
    assert found == [(name, "ok", None) for name in ("search", "open", "search", "open", "find")]
    first, opened, _, page, excerpt = observations(trajectory)
    assert 'Doc 1(Title: "Isle", id: isle) The isle of Orm' in first
    assert 'page 1 of 1 of "Isle"\nThe isle of Orm has no lighthouse.' in opened
    assert "page 2 of" in page
    assert "Sentence 700 tells" in excerpt


def test_passages_have_no_ids_where_nothing_takes_them(codec):
    (shown,) = observations(play(codec, Faulty(), SEARCH, "done", only="search", longest=900))
    assert 'Doc 1(Title: "Velmar") ' in shown
    assert "velmar#3" not in shown


MISTAKES = {
    "not shown": ToolCall("open", {"id": "gold"}),
    "not shown to find": ToolCall("find", {"id": "gold", "text": "Trell"}),
    "no such page": ToolCall("open", {"id": "isle", "page": 9}),
    "no page 0": ToolCall("open", {"id": "isle", "page": 0}),
    "no text": ToolCall("find", {"id": "isle", "text": "  "}),
    "megabytes": ToolCall("find", {"id": "isle", "text": "x" * 1_000}),
    "no id": ToolCall("open", {}),
    "an odd page": ToolCall("open", {"id": "isle", "page": "two"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_policy_is_an_error_result_and_the_episode_goes_on(codec, name):
    search = Faulty()
    trajectory = play(codec, search, SEARCH, [MISTAKES[name]], "Ossa Trell")
    assert (trajectory.end, trajectory.searches[1].status) == ("answered", "rejected")
    assert "error: " in observations(trajectory)[1]
    assert "gold" not in search.opened


def test_what_did_not_fit_was_not_shown(codec):
    trajectory = play(codec, Faulty(), SEARCH, [ToolCall("open", {"id": "isle"})], "x", longest=130)
    assert [search.status for search in trajectory.searches] == ["ok", "rejected"]


@pytest.mark.parametrize("tool", CALLS)
@pytest.mark.parametrize("status", get_args(SearchStatus))
def test_a_fault_of_a_document_is_not_the_policys_mistake(codec, tool, status):
    calls = [ToolCall(tool, CALLS[tool])]
    for turn in (calls, [ToolCall("search", {"query": "lighthouse"}), *calls]):
        trajectory = play(codec, Faulty(status), SEARCH, turn, "Ossa Trell", longest=900)
        assert trajectory.searches[-1].status == status
        assert (trajectory.end, trajectory.valid) == (
            ("failed", False) if status in FAULTS else ("answered", True)
        )


words = st.text("ab .!?\n", max_size=400) | st.text(max_size=80)


@given(st.lists(words, min_size=1, max_size=4), st.integers(1, 60))
def test_pages_have_the_whole_text_once_and_room_for_it(texts, room):
    parts = [Passage(f"d#{n}", f'"D"\n{text}') for n, text in enumerate(texts, start=1)]
    found = asyncio.run(Document.paged(parts, room, len))
    pages = [found.page(number).partition("\n")[2] for number in range(1, len(found.starts) + 1)]
    assert "".join("".join(pages).split()) == "".join(
        "".join(part.text or part.contents for part in parts).split()
    )
    assert all(len(page) <= max(room, 400) for page in pages)


def test_excerpts_are_where_the_text_stands_whatever_its_case(codec):
    found = asyncio.run(Document.paged(PARTS, 300, lambda text: len(codec.encode_text(text))))
    (excerpt,) = found.excerpts("sentence 700 TELLS")
    assert "Sentence 700 tells" in excerpt
    number = int(excerpt.removeprefix("page ").partition(":")[0])
    assert "Sentence 700 tells" in found.page(number)
    assert found.excerpts("(unclosed") == []
    assert len(found.excerpts("e")) <= 10


def test_other_episodes_go_on_while_a_long_document_is_paged():
    """Counting the tokens of a document in one go would let nothing else happen for a second."""
    counted = list[int]()

    async def page_and_watch() -> list[int]:
        paging = asyncio.create_task(Document.paged([LONG] * 10, 300, lambda text: counted.append(1) or 1))
        seen = list[int]()
        while not paging.done():
            await asyncio.sleep(0)
            seen.append(len(counted))
        return [after - before for before, after in pairwise(seen)]

    assert max(asyncio.run(page_and_watch())) <= 100 < len(counted)
