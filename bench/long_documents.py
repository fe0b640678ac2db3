"""What `open` and `find` are worth where documents are longer than what a search shows of them.

    python bench/long_documents.py [--steps 500] [--seeds 0] [--out RESULTS]

The made-up world with long pages: the facts of an entity stand at random places among facts of others, and
an observation has room for about two fifths of a page. The small base model, with its tokenizer for calls, is
fine-tuned on demonstrations: with search alone, and with tools beside it, of which each demonstration uses
one. Where the fact is not shown, `find` is asked for its sentence, `open` for page after page; with search
alone the demonstration guesses. Measured is EM, greedy, on one-hop questions about a world whose names no
training saw, apart for facts that the search shows and those that stand beyond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402
from bench.base import hermes_tokenizer  # noqa: E402
from tokenizers import AddedToken  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from srl.answers import exact_match  # noqa: E402
from srl.data.demonstrations import conclude, guess_turn, look_up  # noqa: E402
from srl.data.world import Hop, make_world, questions, way_of  # noqa: E402
from srl.files import write_json  # noqa: E402
from srl.index import build_index, open_index  # noqa: E402
from srl.models.load import load_model  # noqa: E402
from srl.protocol import FORMATS, ToolCall, template  # noqa: E402
from srl.rollout.codec import Codec  # noqa: E402
from srl.rollout.documents import Documents, FindCall, OpenCall  # noqa: E402
from srl.rollout.environment import Environment  # noqa: E402
from srl.rollout.episode import EpisodeOptions  # noqa: E402
from srl.rollout.native import Native  # noqa: E402
from srl.rollout.protocol import SearchCall, Tool  # noqa: E402
from srl.rollout.torch_engine import TorchEngine  # noqa: E402
from srl.serve.in_process import LocalSearch  # noqa: E402
from srl.train.make_missing import BASE_MODEL  # noqa: E402
from srl.train.sft import demonstrate, fine_tune_step  # noqa: E402
from srl.trajectory import Passage, Question, Trajectory  # noqa: E402
from srl.update.optimiser import Optimiser, schedule  # noqa: E402

ARMS = {"search": (), "search, open": ("open",), "search, find": ("find",),
        "search, open, find": ("open", "find")}  # fmt: skip
OTHERS, BATCH, DEMONSTRATED, TESTED = 24, 16, 1000, 500
"""Sentences of a page about others; episodes a step, demonstrations of a world, test questions."""
OPTIONS = EpisodeOptions(max_turns=7, max_turn_tokens=48, max_obs_length=100, max_response_length=900)
PARTS_OF_CALLS = [
    '<tool_call>\n{"name": "open", "arguments": {"id": "', '", "page": ', "}}\n</tool_call>",
    '<tool_call>\n{"name": "find", "arguments": {"id": "', '", "text": "',
]  # fmt: skip


class LongWorld:
    """A made-up world with long pages, its questions, and episodes over it with these tools beside search."""

    def __init__(self, role: str, seed: int, count: int, codec: Codec, tools: Sequence[str], folder: Path):
        self.tools, rng, world = tools, random.Random(f"pages {role} {seed}"), make_world(role, seed)
        self.questions = questions(world, role, seed, count, two_hop=0.0)
        facts = {entity: [Hop(entity, *fact).sentence for fact in of.items()]
                 for entity, of in world.facts.items()}  # fmt: skip
        pages = []
        for entity, own in facts.items():
            sentences = own + [rng.choice(facts[other]) for other in rng.sample(list(facts), OTHERS)]
            rng.shuffle(sentences)
            pages.append(Passage(entity, f"{entity}\n{' '.join(sentences)}"))
        build_index(pages, folder / f"{role}{seed}", "bm25", {"stemmer": "none"})
        search = LocalSearch(open_index(folder / f"{role}{seed}"), topk=1)
        self.documents = Documents(search, lambda text: len(codec.encode_text(text)), OPTIONS.max_obs_length)
        calls: list[Tool] = [SearchCall(search), OpenCall(self.documents), FindCall(self.documents)]
        used = {call.name: call for call in calls if call.name in ("search", *tools)}
        native = Native.of(codec, template("tiny"), used)
        self.environment = Environment(codec, template("tiny"), OPTIONS, search, native=native)

    def demonstrations(self) -> list[Trajectory]:
        """Right episodes of the questions whose page the first search brings."""
        rng = random.Random("tools")
        searched = self._played(self.questions, [[] for _ in self.questions])
        found = [episode for episode in searched
                 if episode.searches[0].hits[0].passage.id == way_of(episode.question)[0].entity]  # fmt: skip
        ends = [self._after_search(episode, rng.choice([*self.tools] or [""])) for episode in found]
        return self._played([episode.question for episode in found], ends)

    def _played(self, asked: Sequence[Question], ends: Sequence[list[str]]) -> list[Trajectory]:
        turns = [
            [look_up(way_of(question)[0].entity), *end] for question, end in zip(asked, ends, strict=True)
        ]
        shown = (replace(question, metadata={**question.metadata, "turns": says})
                 for question, says in zip(asked, turns, strict=True))  # fmt: skip
        return demonstrate(list(shown), self.environment)

    def _after_search(self, episode: Trajectory, tool: str) -> list[str]:
        """The right turns once a search is made: read what is shown, get the rest by `tool`, or guess."""
        (hop,) = way_of(episode.question)
        if shows(episode):
            return [conclude(hop)]
        if not tool:
            return [guess_turn(hop.entity)]
        arguments: list[dict[str, Any]] = [{"text": hop.sentence.partition(hop.value)[0].strip()}]
        if tool == "open":
            _, document = asyncio.run(self.documents.of(hop.entity, episode.searches))
            assert document is not None, "the search has shown the page"
            last = bisect_right(document.starts, document.text.index(hop.sentence))
            arguments = [{"page": page} for page in range(min(2, last), last + 1)]  # the first is shown
        calls = [ToolCall(tool, {"id": hop.entity, **more}) for more in arguments]
        thought = f"<think> I need to look up {hop.entity} . </think>"
        return [*(f"{thought} {FORMATS['hermes'].write([call])}" for call in calls), conclude(hop)]

    def measured(self, model: PreTrainedModel) -> dict[str, Any]:
        """EM on the questions, calls of each tool and tokens an episode."""
        engine = TorchEngine(model, self.environment.codec, max_num_seqs=64, max_model_len=1024)
        episodes = asyncio.run(self.environment.for_evaluation(0.0).play_all(engine, self.questions))
        em: dict[str, list[float]] = {"all": [], "shown": [], "beyond": []}
        for episode in episodes:
            for name in ("all", "shown" if shows(episode) else "beyond"):
                em[name].append(exact_match(episode.answer, episode.question.golden_answers))
        calls = Counter(search.tool for episode in episodes for search in episode.searches)
        return {
            "em": {name: round(mean(scores), 3) for name, scores in em.items()},
            "questions": {name: len(scores) for name, scores in em.items()},
            "calls": {name: round(count / len(episodes), 2) for name, count in calls.items()},
            "malformed": sum(episode.malformed for episode in episodes),
            "tokens": round(mean(len(episode.token_ids) for episode in episodes)),
        }


def shows(episode: Trajectory) -> bool:
    """Whether what the first search shows states the fact."""
    return len(episode.segments) > 2 and way_of(episode.question)[0].sentence in episode.segments[2].text


def teach(model: PreTrainedModel, episodes: Sequence[Trajectory], steps: int, seed: int) -> None:
    rng, plan = random.Random(seed), schedule("linear", 20, steps)
    optimiser = Optimiser(model.parameters(), lr=1e-3, betas=(0.9, 0.98), schedule=plan)
    for step in range(1, steps + 1):
        metrics = fine_tune_step(model, optimiser, rng.sample(episodes, BATCH), observation_weight=0.1)
        if step % 25 == 0:
            print(f"step {step}: loss {metrics['sft/policy_loss']:.4f}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "long_documents.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    tokenizer = hermes_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in PARTS_OF_CALLS])
    codec = Codec(tokenizer)
    for arm, seed in product(options.arms, options.seeds):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            place = (codec, ARMS[arm], Path(name))
            worlds = [LongWorld("train", number, DEMONSTRATED, *place) for number in (0, 1)]
            model = load_model(BASE_MODEL)
            torch.manual_seed(seed)
            model.resize_token_embeddings(len(tokenizer))
            teach(model, [each for world in worlds for each in world.demonstrations()], options.steps, seed)
            row = LongWorld("test", 0, TESTED, *place).measured(model)
        results.setdefault(arm, {})[str(seed)] = row | {"seconds": round(time.perf_counter() - began)}
        write_json(options.out, {"steps": options.steps} | results)


if __name__ == "__main__":
    main()
