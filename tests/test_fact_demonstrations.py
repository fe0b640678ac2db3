"""Demonstrations from supporting facts: chains of searches in a small corpus, and properties on real data."""

import asyncio
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cli_mistakes import Shell, shell  # noqa: F401 - a fixture
from tests.shared_data import shared_data

from srl.answers import exact_match
from srl.config import Config, load_config
from srl.data.demonstration_file import Demonstrations, read_demonstrations
from srl.data.demonstration_texts import COMMON_WORDS, QUOTED_WORDS, words_of
from srl.data.parquet import read_questions, write_questions
from srl.data.prepare import parse_input, prepare
from srl.data.stated_values import find_value
from srl.data.supporting_facts import NoDemonstration
from srl.errors import CheckFailed
from srl.index import build_index, open_index
from srl.protocol import parse_action, template
from srl.rollout.codec import TextCodec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import Key
from srl.serve.in_process import LocalSearch
from srl.train.demonstrations import THOUGHT_WORDS, Chain, fact_chain, make_demonstrations
from srl.train.load_components import episode_options
from srl.trajectory import Passage, Question, Trajectory
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")

PAGES = {
    "The Silver Pass": "The Silver Pass is a 1938 western film. It was directed by Arno Rusk for Lumen.",
    "Arno Rusk": "Arno Rusk (24 August 1886 to 1960) was an Indian film director. He died in Quenton.",
    "Glass Orchard (film)": "Glass Orchard is a drama film directed by Tovan Hesk and made in Faro.",
    "Tovan Hesk": "Tovan Hesk (born March 3, 1911) was a director from India.",
    "Quenton": "Quenton is a market town on the Lenn. The mayor of Quenton is Mira Oswin.",
    "Mira Oswin": "Mira Oswin is a politician who keeps bees.",
    "Beekeeping": 'Beekeeping is the care of bees. Arno Rusk wrote on it for Ada "Finch" Bell.',
    "Lenn": "The Lenn is a river. Floods of the Lenn are called reedwash by those who live near it.",
}
PASSAGES = [Passage(f"p{number}", f'"{title}"\n{text}') for number, (title, text) in enumerate(PAGES.items())]
IDS = dict(zip(PAGES, (passage.id for passage in PASSAGES), strict=True))
DIRECTED = ["The Silver Pass", "director", "Arno Rusk"]
BORN = ["Arno Rusk", "date of birth", "24 August 1886"]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    build_index(PASSAGES, folder / "index")
    return folder / "index"


def asks(text: str, answer: str, *titles: str, name: str = "q", **metadata: Any) -> Question:
    known = {"supporting_titles": list(titles), "supporting_ids": [IDS[title] for title in titles]}
    return Question(f"made/{name}", text, (answer,), "made", metadata={**known, **metadata})


def chain_of(question: Question, index: Path, topk: int = 1, **options: Any) -> Chain:
    """The demonstration of a question where all hits are shown."""
    search = LocalSearch(open_index(index), topk)
    return asyncio.run(fact_chain(question, search, lambda found: found, **{"recovery": 0.0, **options}))


def test_a_question_whose_chain_cannot_be_right_is_left_out_for_a_stated_reason(index):
    mayor = [["Quenton", "mayor", "Mira Oswin"]]
    birth = [["Tovan Hesk", "date of birth", "3 March 1911"]]
    lost = {"supporting_ids": ["p99"]}
    for question, options, reason in [
        (Question("q", "Who?", ("x",)), {}, "no supporting facts"),
        (Question("q", "Who is mayor?", ("Mira Oswin",), metadata=lost), {}, "no wording brings a passage"),
        (TWO_HOPS, {"max_searches": 1}, "more searches than an episode has"),
        (asks("Who is the mayor?", "Mira Oswin", "Quenton", evidences=mayor), {},
         "a name that nothing before it says"),
        (asks("When was Tovan Hesk born?", "3 March 1911", "Tovan Hesk", evidences=birth), {},
         "the passages do not have the answer"),
    ]:  # fmt: skip
        with pytest.raises(NoDemonstration) as dropped:
            chain_of(question, index, **options)
        assert str(dropped.value) == reason


def answer_of(chain: Chain) -> str:
    action = parse_action(chain.turns[-1])
    assert action is not None
    assert action.kind == "answer"
    return action.content


TWO_HOPS = asks(
    "When was the director of film The Silver Pass born?", "24 August 1886", "The Silver Pass", "Arno Rusk",
    evidences=[DIRECTED, BORN],
)  # fmt: skip


TITLES = asks(
    "Who is the mayor of the town where the director Arno Rusk died?", "Mira Oswin", "Arno Rusk", "Quenton"
)
STEPS = asks(
    "Where did the director of The Silver Pass die?", "Quenton", "The Silver Pass", "Arno Rusk",
    question_decomposition=[
        {"question": "The Silver Pass >> director", "answer": "Arno Rusk", "id": IDS["The Silver Pass"]},
        {"question": "Where did #1 die?", "answer": "Quenton", "id": IDS["Arno Rusk"]},
    ],
)  # fmt: skip


@pytest.mark.parametrize(
    ("question", "queries", "read"),
    [
        (TWO_HOPS, ["The Silver Pass director", "Arno Rusk date of birth"], "Arno Rusk"),
        (TITLES, ["Arno Rusk", "Quenton"], "He died in Quenton"),
        (STEPS, ["The Silver Pass director", "Where did Arno Rusk die"], "Arno Rusk"),
    ],
    ids=["triples", "titles", "decomposition"],
)
def test_facts_become_a_search_each_and_thoughts_that_say_what_was_read(index, question, queries, read):
    """Each name is known from the question or from what was read before."""
    chain = chain_of(question, index)
    assert chain.queries == queries
    assert answer_of(chain) == question.golden_answers[0]
    thoughts = [turn.partition("</think>")[0] for turn in chain.turns]
    assert chain.turns[0] == f"<search> {queries[0]} </search>", "nothing was read before"
    assert read in thoughts[1]
    assert question.golden_answers[0] not in thoughts[1] or question is STEPS
    assert "Doc 1" in thoughts[2]


def test_search_that_misses_is_reworded_and_with_recovery_kept_as_it_was(index):
    question = asks("In Quenton, which politician keeps bees?", "Mira Oswin", "Mira Oswin")
    plain, kept = chain_of(question, index), chain_of(question, index, recovery=1.0)
    assert len(plain.queries) == 1
    assert (kept.queries[0], len(kept.queries)) == ("Quenton", 2)
    found = asyncio.run(LocalSearch(open_index(index), 1).search(kept.queries[0]))
    assert found.hits[0].passage.id != IDS["Mira Oswin"]
    assert kept.docs[0].passage == found.hits[0].passage
    assert answer_of(kept) == "Mira Oswin"


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [
        ("24 August 1886", "born August 24, 1886 in", "August 24, 1886"),
        ("24 August 1886", "born 24th August 1886", "24th August 1886"),
        ("August 1886", "born 24 August 1886", "August 1886"),
        ("India", "an Indian director", "Indian"),
        ("India", "of Indiana Jones", "Indiana"),
        ("New York", "in NEW YORK.", "NEW YORK"),
        ("art", "a party", None),
        ("United States", "an American pilot", "American"),
        ("French", "from France", "France"),
        ("25 August 1886", "born August 24, 1886", None),
        ("$5", "for $5 each", "$5"),
    ],
)  # fmt: skip
def test_value_is_found_as_a_text_states_it(value, text, found):
    span = find_value(value, text)
    assert (text[slice(*span)] if span else None) == found


async def played(item: Question, config: Config, search: LocalSearch) -> Trajectory:
    """A demonstration as fine-tuning runs it."""
    codec = TextCodec()
    engine = ScriptedEngine(codec, lambda request, turn: item.metadata["turns"][turn])
    environment = Environment(codec, template("search-r1"), episode_options(config), search)
    return await environment.play(engine, item, Key(phase="sft"))


def settings(index: Path, *more: str) -> Config:
    return load_config(preset=None, sets=[f"search.index={index}", "trainer.seed=3", *more]).config


@pytest.fixture
def asked(tmp_path: Path, index: Path) -> Path:
    questions = [
        TWO_HOPS,
        asks("What are floods of the Lenn called?", "reedwash", "Lenn", name="r"),
        Question("made/s", "Who?", ("x",), "made"),
    ]
    write_questions(tmp_path / "q.parquet", questions)
    return tmp_path / "q.parquet"


def test_command_writes_demonstrations_and_says_what_became_of_the_questions(shell: Shell, asked, index):  # noqa: F811
    typed = (
        *["data", "demonstrations", "--from", "facts", "--out", "d.jsonl", "--data"],
        asked,
        "--index",
        index,
    )
    code, out, err = shell.typed(*typed)
    assert code == 0, err
    assert out.splitlines()[0].split()[:2] == ["d.jsonl", "2"]
    assert re.search(r"made +1 +no supporting facts", out)
    assert [item.id for item in read_demonstrations(Path("d.jsonl"))] == ["made/q", "made/r"]
    first = Path("d.jsonl").read_bytes()
    code, out, _ = shell.typed(*typed, "--overwrite", "--json")
    report = json.loads(out)
    assert (report["demonstrations"], report["sources"]) == (2, {"made": 2})
    assert report["left_out"] == [{"source": "made", "reason": "no supporting facts", "count": 1}]
    assert Path("d.jsonl").read_bytes() == first


def test_a_chain_whose_episode_shows_less_is_left_out(asked, index, tmp_path):
    """Where the episode has less room than an observation, a chain may not name what is no longer shown."""
    search, seen, rooms = LocalSearch(open_index(index), 3), set[tuple[Any, ...]](), list[int]()
    lengths = ("rollout.max_turn_tokens=80", "rollout.max_obs_length=130")
    for room in range(80, 410, 20):
        config = settings(index, f"data.max_response_length={room}", *lengths)
        file = tmp_path / f"{room}.jsonl"
        with suppress(CheckFailed):
            make_demonstrations(config, "facts", [str(asked)], file, Workspace(tmp_path))
            for item in read_demonstrations(file):
                episode = asyncio.run(played(item, config, search))
                seen.add((item.id, *(found.shown for found in episode.searches)))
                rooms.append(room)
    assert seen == {("made/q", 3), ("made/r", 2)}
    assert 80 < min(rooms) < 300, "with less room there is no demonstration"


REAL = {
    "squad": "squad/university-of-notre-dame.v1.1.json",
    "2wikimultihopqa": "2wiki/train-500.json",
    "hotpotqa": "hotpotqa/train-600.json",
    "musique": "musique/train-100.jsonl",
}


def beginning_of(source: str, name: str, folder: Path) -> Path:
    """The last 60 questions of a file (SQuAD's are all read), with their paragraphs."""
    path, out = shared_data(name), folder / Path(name).name
    if path.suffix == ".jsonl":
        out.write_text(
            "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[-60:]), encoding="utf-8"
        )
    elif source == "squad":
        out.write_bytes(path.read_bytes())
    else:
        out.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))[-60:]), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Demonstrations, dict[str, Question]]:
    folder = tmp_path_factory.mktemp("real")
    inputs = [
        parse_input(f"{source}:train={beginning_of(source, name, folder)}") for source, name in REAL.items()
    ]
    prepare(inputs, folder / "data", limit=60)
    build_index(folder / "data" / "corpus.jsonl", folder / "index", "bm25", {})
    config = settings(folder / "index")
    files = [str(folder / "data" / "train.parquet")]
    written = make_demonstrations(config, "facts", files, folder / "d.jsonl", Workspace(folder))
    return config, written, {item.id: item for item in read_questions(folder / "data" / "train.parquet")}


@pytest.fixture(scope="module")
def episodes(real) -> list[Trajectory]:
    """The demonstrations as fine-tuning runs them."""
    config, written, _ = real
    search = LocalSearch(open_index(Path(config.search.index)), config.search.topk)
    return [asyncio.run(played(item, config, search)) for item in read_demonstrations(written.file)]


def texts_before(episode: Trajectory, turn: int) -> str:
    """The question and all that was shown before a turn."""
    shown = [text for search in episode.searches if search.turn < turn for text in search.shown_texts]
    return "\n".join([episode.question.text, *shown])


def test_most_real_questions_get_a_demonstration_and_every_one_is_right(real, episodes):
    _, written, questions = real
    asked = Counter(question.data_source for question in questions.values())
    share = {source: count / asked[source] for source, count in written.written.items()}
    assert share["squad"] > 0.7
    assert share["2wikimultihopqa"] > 0.8
    assert share["hotpotqa"] > 0.7
    assert share["musique"] > 0.4
    for episode in episodes:
        assert episode.end == "answered"
        assert exact_match(episode.answer, episode.question.golden_answers) == 1
        assert all(search.status == "ok" for search in episode.searches)


def test_real_answers_stand_in_what_was_shown_or_compare_things_that_were(real, episodes):
    _, _, questions = real
    for episode in episodes:
        question, everything = questions[episode.question.id], texts_before(episode, 99)
        shown = {hit.passage.id for search in episode.searches for hit in search.shown_hits}
        titles = {hit.passage.title for search in episode.searches for hit in search.shown_hits}
        gold = set(question.metadata["supporting_ids"])
        assert gold & shown
        assert gold <= shown or set(question.metadata["supporting_titles"]) <= titles, question.id
        if episode.answer in ("yes", "no"):
            continue
        words = r"\W+".join(map(re.escape, re.findall(r"\w+", str(episode.answer))))
        assert re.search(rf"(?<!\w){words}(?!\w)", everything, re.IGNORECASE), question.id


def test_real_queries_use_only_words_that_were_known(real, episodes):
    """A word is in the question or a text that was shown before, up to its ending, or names nothing."""
    asked = 0
    for episode in episodes:
        for search in episode.searches:
            known = texts_before(episode, search.turn).lower()
            for word in words_of(search.query):
                low = word.lower()
                begins = low.removesuffix("'s")[: max(3, len(low) - 3)]
                assert low in COMMON_WORDS or re.search(rf"(?<!\w){re.escape(begins)}", known), (
                    episode.question.id, search.query, word,
                )  # fmt: skip
                asked += 1
    assert asked > 500


def test_real_thoughts_are_short_and_quote_what_was_shown(real, episodes):
    quoted = 0
    for episode in episodes:
        for turn, text in enumerate(segment.text for segment in episode.segments if segment.is_policy):
            thought = text.partition("<think>")[2].partition("</think>")[0]
            assert len(thought.split()) <= THOUGHT_WORDS
            known = " ".join(texts_before(episode, turn).replace('"', "'").split())
            for words in re.findall(r'"([^"]*)"', thought):
                assert " ".join(words.split()) in known, (episode.question.id, words)
                assert len(words.split()) <= max(
                    QUOTED_WORDS, max(len(g.split()) for g in episode.question.golden_answers) + 1
                )
                quoted += 1
    assert quoted > 100
