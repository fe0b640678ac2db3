"""The constants of bench/scale.py that this machine can measure: bytes of a search and of an episode's log,
and the log writer's time per episode.

Episodes are made of real sentences (2WikiMultihopQA's) in the lengths that bench/scale.py assumes: a token is
three quarters of a word, its number a hash of that word, so that ids repeat as those of a tokenizer do;
log-probs are random.
"""

from __future__ import annotations

import json
import pickle
import random
import tempfile
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from made_passages import made_passages, nq_questions

from srl.protocol import template
from srl.serve.wire import write_request
from srl.store import Record, RunInfo
from srl.train.verl.log_writer import LogActor
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 151_936
HEADERS = 400
"""Bytes of both HTTP headers and of TCP's for a search and its answer."""
ROUNDS = 5


class Episodes(Protocol):
    """What a step samples, in tokens, as bench/scale.py assumes it."""

    count: int
    searches: float
    prompt: int
    written: int
    observation: int


def measure(data: Path, episodes: Episodes) -> dict[str, float]:
    """The fields of bench/scale.py's `Measured`."""
    wanted = 3 * int(episodes.searches) * episodes.count
    passages = [widened(passage) for passage in made_passages(data, wanted)]
    records = list(made_records(data, passages, episodes))
    return {**searching(), "search_bytes": wire_bytes(passages, nq_questions(data)), **logging(records)}


def searching() -> dict[str, float]:
    """Processor seconds of a search, from the results of the benches of retrievers and server."""
    lexical = json.loads((RESULTS / "lexical.json").read_text(encoding="utf-8"))["rows"]
    rates = {row["passages"]: row["bm25"]["qps"]["median"] for row in lexical if row["threads"] == 1}
    served = json.loads((RESULTS / "server.json").read_text(encoding="utf-8"))["loads"]["64 clients"]
    both = 2 / served["srl, cache off"]["questions_per_s"]["median"]
    flat = json.loads((RESULTS / "dense.json").read_text(encoding="utf-8"))["flat"]
    batch = flat["rows"][-1]
    products = batch["batch"] * flat["vectors"] * flat["dimension"]
    return {
        "search_s": 1 / rates[5_000_000],
        "http_s": both - 1 / rates[300_000],
        "flat_s": batch["ms"]["srl"]["median"] / 1000 / products * 1e6 * 768,
    }


def widened(passage: Passage) -> Passage:
    """The passage cut or repeated to the hundred words of wiki-18's."""
    words = (passage.text.split() * 100)[:100]
    return Passage(passage.id, f"{passage.heading}\n{' '.join(words)}")


def wire_bytes(passages: list[Passage], questions: list[str]) -> float:
    """Mean bytes of a search with three passages, and of its answer, over HTTP."""
    sizes = []
    for number, question in enumerate(questions[:1000]):
        hits = [
            {"document": {"id": item.id, "contents": item.contents}, "score": 11.0 + number / 7}
            for item in passages[3 * number : 3 * number + 3]
        ]
        answer = json.dumps({"result": [hits]}, ensure_ascii=False).encode()
        sizes.append(len(write_request([question], 3)) + len(answer) + HEADERS)
    return sum(sizes) / len(sizes)


def made_records(data: Path, passages: list[Passage], episodes: Episodes) -> Iterator[Record]:
    """The episodes of a step, with advantages and returns on every token of the policy."""
    draw, questions, asking = random.Random(0), nq_questions(data), template("search-r1")
    unseen = iter(passages)
    for number in range(episodes.count):
        text = questions[number // 5 % len(questions)]
        question = Question(
            f"nq/train/{number // 5}", text, ("an answer",), "nq", "train", asking.messages(text)
        )
        trajectory = made_trajectory(question, number % 5, passages, unseen, episodes, draw)
        advantages = [0.5 * bit for bit in trajectory.response_mask]
        yield Record(trajectory, Score(1.0, {"em": 1.0}), advantages, list(advantages))


def made_trajectory(
    question: Question, sample: int, passages: list[Passage], unseen: Iterator[Passage],
    episodes: Episodes, draw: random.Random,
) -> Trajectory:  # fmt: skip
    """A prompt, searches with three passages each that no other found, and an answer."""
    turns = int(episodes.searches) + 1
    segments = [read("prompt", question.prompt[0]["content"], 0, episodes.prompt)]
    searches = []
    for turn in range(turns):
        said = draw.choice(passages).text
        segments.append(wrote(said, turn, episodes.written // turns, draw))
        if turn < turns - 1:
            found = [next(unseen) for _ in range(3)]
            shown = "\n".join(item.contents for item in found)
            segments.append(read("observation", shown, turn, episodes.observation))
            hits = tuple(Hit(item, 20 * draw.random()) for item in found)
            searches.append(Search(question.text, hits, "ok", 0.02, 1, "", "88638cdaccb9ef65", turn))
    return Trajectory(
        question, segments, searches, "answered", "an answer", sample=sample, step=1,
        valid_actions=turns, valid_searches=turns - 1,
    )  # fmt: skip


def tokens_of(text: str, count: int) -> tuple[int, ...]:
    """`count` ids that repeat as words do."""
    words = (text.split() or ["-"]) * (count // max(1, len(text.split())) + 1)
    return tuple(int.from_bytes(blake2b(word.encode(), digest_size=4).digest()) % VOCABULARY
                 for word in words[:count])  # fmt: skip


def read(kind: Any, text: str, turn: int, count: int) -> Segment:
    return Segment(kind, tokens_of(text, count), text, turn)


def wrote(text: str, turn: int, count: int, draw: random.Random) -> Segment:
    logprobs = tuple(-draw.expovariate(2.0) for _ in range(count))
    return Segment("policy", tokens_of(text, count), text, turn, logprobs)


def logging(records: list[Record]) -> dict[str, float]:
    """Bytes of an episode in the log and on its way there, and the writer's processor seconds for it.

    The writer is verl's runs' own, without Ray: what came is unpickled, kept, put with its advantages and
    written as one part. Ray's own handling of a message comes on top.
    """
    run = RunInfo(run_id="scale", preset="search-r1-v0.2", algo="grpo", seed=0, model="", config={})
    sent = [pickle.dumps(Record(record.trajectory, record.score), protocol=5) for record in records]
    tokens = pickle.dumps({record.trajectory.id: numbers(record) for record in records}, protocol=5)
    took, sizes = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            log_actor = LogActor(Path(folder), run)
            began = time.process_time()
            for message in sent:
                log_actor.add(1, "train", pickle.loads(message))
            log_actor.finish(1, "train", {"critic/score/mean": 0.5}, pickle.loads(tokens))
            took.append((time.process_time() - began) / len(records))
            sizes.append(sum(path.stat().st_size for path in Path(folder).rglob("*.parquet")))
            log_actor.close("interrupted")
    size = (sum(map(len, sent)) + len(tokens)) / len(records)
    return {"log_bytes": sizes[-1] / len(records), "sent_bytes": size, "write_s": median(took)}


def numbers(record: Record) -> tuple[list[float], list[float]]:
    """Advantages and returns of what follows the prompt, as the trainer sends them."""
    start = len(record.trajectory.segments[0].token_ids)
    assert record.advantages is not None
    assert record.returns is not None
    return list(record.advantages)[start:], list(record.returns)[start:]
