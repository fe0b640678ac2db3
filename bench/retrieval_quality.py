"""How often BM25 finds a question's own paragraph: SQuAD among Wikipedia passages, by analysis.

The questions of two SQuAD articles; their 109 paragraphs lie among 6,119 passages that 2WikiMultihopQA
is asked about. Recall@k is the share of questions whose own paragraph is among the first k.

    python bench/retrieval_quality.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from srl.data.corpus import read_corpus
from srl.data.formats import SQUAD
from srl.data.readers import read_format, read_paragraphs
from srl.evaluate.estimators import wilson_interval
from srl.evaluate.retrieval import recall_at_k, supporting_ids
from srl.index import build_index, open_index
from srl.trajectory import Passage, Question

ARTICLES = ("squad/super-bowl-50.v1.1.json", "squad/university-of-notre-dame.v1.1.json")
DISTRACTORS = "2wiki/2wikimultihopqa_corpus.json"
DEPTHS = (1, 3, 5, 10)


def questions(data: Path) -> list[Question]:
    return [found for name in ARTICLES for found in read_format(SQUAD, data / name, "squad", "test")]


def passages(data: Path) -> Iterator[Passage]:
    for name in ARTICLES:
        yield from read_paragraphs(SQUAD, data / name, "squad")
    yield from read_corpus(data / DISTRACTORS)


def recalls(data: Path, options: dict[str, Any]) -> dict[str, float]:
    """`recall@k` for every depth, with BM25 under these options."""
    asked = questions(data)
    with tempfile.TemporaryDirectory() as folder:
        build_index(passages(data), Path(folder) / "index", "bm25", options)
        found = open_index(Path(folder) / "index").search([question.text for question in asked], max(DEPTHS))
    ranked = [[hit.passage.id for hit in hits] for hits in found]
    return {
        f"recall@{k}": sum(
            recall_at_k(ids, supporting_ids(question), k) for ids, question in zip(ranked, asked, strict=True)
        )
        / len(asked)
        for k in DEPTHS
    }


def measure(data: Path) -> dict[str, Any]:
    """Recall for every analysis; the first is the default of the plugin."""
    count = len(questions(data))
    rows = []
    for stopwords, stemmer in product(("english", "none"), ("english", "porter", "none")):
        found = recalls(data, {"stopwords": stopwords, "stemmer": stemmer})
        rows.append(
            {"stopwords": stopwords, "stemmer": stemmer, **{k: round(v, 4) for k, v in found.items()}}
        )
    interval = wilson_interval(rows[0]["recall@3"], count)
    return {
        "format": 1,
        "data": "SQuAD 1.1 (Super Bowl 50, University of Notre Dame) among 2WikiMultihopQA passages",
        "questions": count,
        "passages": sum(1 for _ in passages(data)),
        "retriever": "bm25, k1 = 0.9, b = 0.4",
        "recall@3_95%": [round(interval.low, 4), round(interval.high, 4)],
        "rows": rows,
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "retrieval_quality.json"
    )
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.data), indent=2)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
