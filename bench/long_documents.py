"""What `open` and `find` are worth where documents are longer than what a search shows of them.

    python bench/long_documents.py [--questions 500] [--out RESULTS]

The made-up world with long pages: the facts of an entity stand at random places among facts of others, and
an observation has room for about two fifths of a page. A script plays the policy: it searches for the entity
of a one-hop question, and answers with the fact once that stands in what it was shown. Until then it asks
`find` for the sentence without its end, or `open` for page after page; where nothing is left it answers
with the entity. What it writes goes through a tokenizer, the chat template and the tools as a model's turns
do. Measured is EM, apart for facts that the search shows and those that stand beyond.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)

from bench.base import hermes_tokenizer  # noqa: E402
from tokenizers import AddedToken  # noqa: E402

from srl.answers import exact_match  # noqa: E402
from srl.data.demonstrations import guess_turn, look_up  # noqa: E402
from srl.data.world import Hop, make_world, questions, way_of  # noqa: E402
from srl.files import write_json  # noqa: E402
from srl.index import build_index, open_index  # noqa: E402
from srl.protocol import ToolCall, template  # noqa: E402
from srl.rollout.codec import Codec  # noqa: E402
from srl.rollout.documents import Documents, FindCall, OpenCall  # noqa: E402
from srl.rollout.engine import Completion, Sampling, ScriptedEngine  # noqa: E402
from srl.rollout.environment import Environment  # noqa: E402
from srl.rollout.episode import EpisodeOptions  # noqa: E402
from srl.rollout.native import Native  # noqa: E402
from srl.rollout.protocol import SearchCall, Tool  # noqa: E402
from srl.serve.in_process import LocalSearch  # noqa: E402
from srl.trajectory import Passage, Question, Trajectory  # noqa: E402

ARMS = [("search",), ("search", "open"), ("search", "find"), ("search", "open", "find")]
OTHERS = 24
"""Sentences of a page about other entities."""
OPTIONS = EpisodeOptions(max_turns=8, max_turn_tokens=48, max_obs_length=100, max_response_length=1200)
PARTS_OF_CALLS = [
    '<tool_call>\n{"name": "open", "arguments": {"id": "', '", "page": ', "}}\n</tool_call>",
    '<tool_call>\n{"name": "find", "arguments": {"id": "', '", "text": "',
]  # fmt: skip


class Reader(ScriptedEngine):
    """The policy in an episode: what it says depends on the question and on what it was shown."""

    def __init__(self, native: Native, question: Question) -> None:
        super().__init__(native.codec, self._says, native.encode)
        self.entity, self.write = way_of(question)[0].entity, native.glue.format.write
        self.asked = way_of(question)[0].sentence.partition(way_of(question)[0].value)[0].strip()
        self.plan, self.shown = self._plan(native.tools), ""

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.shown = self.codec.decode(token_ids)
        return await super().generate(request_id, token_ids, sampling)

    def _plan(self, tools: Any) -> Iterator[str]:
        """The turns that may be needed until the fact is shown."""
        yield look_up(self.entity)
        if "find" in tools:
            yield self.write([ToolCall("find", {"id": self.entity, "text": self.asked})])
        if "open" in tools:
            yield self.write([ToolCall("open", {"id": self.entity, "page": 2})])  # the search shows the first
            pages = re.search(r"2 of (\d+)", self.shown.rpartition("<tool_response>")[2])
            for page in range(3, int(pages[1]) + 1 if pages else 0):
                yield self.write([ToolCall("open", {"id": self.entity, "page": page})])

    def _says(self, request: str, turn: int) -> str:
        said = re.findall(rf"{self.asked} (\w+ \w+) \.", self.shown.partition("<tool_response>")[2])
        return f"<answer> {said[-1]} </answer>" if said else next(self.plan, guess_turn(self.entity))


def long_pages(seed: int) -> Iterator[Passage]:
    """A page for each entity of the test's world: its facts among those of others."""
    rng, world = random.Random(f"pages {seed}"), make_world("test", seed)
    facts = {entity: [Hop(entity, *fact).sentence for fact in of.items()]
             for entity, of in world.facts.items()}  # fmt: skip
    for entity, own in facts.items():
        sentences = own + [rng.choice(facts[other]) for other in rng.sample(list(facts), OTHERS)]
        rng.shuffle(sentences)
        yield Passage(entity, f"{entity}\n{' '.join(sentences)}")


def played(search: LocalSearch, names: Sequence[str], asked: Sequence[Question]) -> Iterator[Trajectory]:
    """The episodes with these tools."""
    tokenizer = hermes_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in PARTS_OF_CALLS])
    codec = Codec(tokenizer)
    documents = Documents(search, lambda text: len(codec.encode_text(text)), OPTIONS.max_obs_length)
    tools: list[Tool] = [SearchCall(search), OpenCall(documents), FindCall(documents)]
    native = Native.of(codec, template("tiny"), {tool.name: tool for tool in tools if tool.name in names})
    environment = Environment(codec, template("tiny"), OPTIONS, search, native=native)
    for question in asked:
        yield asyncio.run(environment.play(Reader(native, question), question))


def measured(episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """EM, calls of each tool and tokens an episode."""
    em: dict[str, list[float]] = {"all": [], "shown": [], "beyond": []}
    for episode in episodes:
        is_shown = way_of(episode.question)[0].sentence in episode.segments[2].text
        for name in ("all", "shown" if is_shown else "beyond"):
            em[name].append(exact_match(episode.answer, episode.question.golden_answers))
    calls = Counter(search.tool for episode in episodes for search in episode.searches)
    return {
        "em": {name: round(mean(scores), 3) for name, scores in em.items()},
        "questions": {name: len(scores) for name, scores in em.items()},
        "calls": {name: round(count / len(episodes), 2) for name, count in calls.items()},
        "tokens": round(mean(len(episode.token_ids) for episode in episodes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "long_documents.json")
    options = parser.parse_args()
    asked = questions(make_world("test", 0), "test", 0, options.questions, two_hop=0.0)
    with tempfile.TemporaryDirectory() as folder:
        build_index(long_pages(0), Path(folder) / "index", "bm25", {"stemmer": "none"})
        search = LocalSearch(open_index(Path(folder) / "index"), topk=1)
        rows = {", ".join(names): measured(list(played(search, names, asked))) for names in ARMS}
    write_json(options.out, rows)


if __name__ == "__main__":
    main()
