"""How often BM25 finds a question's own paragraph, by stop words and stemmer: SQuAD among Wikipedia passages.

The questions are those of two SQuAD articles. Their 109 paragraphs are among 6,119 passages of
2WikiMultihopQA. Recall@k is the share of questions whose own paragraph is among the first k.

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
from srl.data.question_formats import SQUAD, read_format, read_paragraphs
from srl.data.relevance import LabelledQuestions
from srl.evaluate.index_eval import evaluate_index
from srl.evaluate.intervals import Estimate
from srl.evaluate.retrieval_metrics import supporting_ids
from srl.index import build_index, open_index
from srl.trajectory import Passage, Question

ARTICLES = ("squad/super-bowl-50.v1.1.json", "squad/university-of-notre-dame.v1.1.json")
DISTRACTORS = "2wiki/2wikimultihopqa_corpus.json"
DEPTHS = (1, 3, 5, 10)


def questions(data: Path) -> list[Question]:
    return [question for name in ARTICLES for question in read_format(SQUAD, data / name, "squad", "test")]


def passages(data: Path) -> Iterator[Passage]:
    for name in ARTICLES:
        yield from read_paragraphs(SQUAD, data / name, "squad")
    yield from read_corpus(data / DISTRACTORS)


def recalls(data: Path, options: dict[str, Any]) -> dict[str, Estimate]:
    """`recall@k` for every depth, with BM25 under these options."""
    labelled = questions(data)
    own = {question.id: dict.fromkeys(supporting_ids(question), 1) for question in labelled}
    with tempfile.TemporaryDirectory() as folder:
        build_index(passages(data), Path(folder) / "index", "bm25", options)
        result = evaluate_index(open_index(Path(folder) / "index"), LabelledQuestions(labelled, own), DEPTHS)
    return {name: figure for name, figure in result.metrics.items() if name.startswith("recall@")}


def measure(data: Path) -> dict[str, Any]:
    """Recall for every analysis; the first is the default of the plugin."""
    by_analysis = {
        analysis: recalls(data, {"stopwords": analysis[0], "stemmer": analysis[1]})
        for analysis in product(("english", "none"), ("english", "porter", "none"))
    }
    rows = [
        {
            "stopwords": stopwords,
            "stemmer": stemmer,
            **{name: round(figure.mean, 4) for name, figure in figures.items()},
        }
        for (stopwords, stemmer), figures in by_analysis.items()
    ]
    return {
        "format": 1,
        "data": "SQuAD 1.1 (Super Bowl 50, University of Notre Dame) among 2WikiMultihopQA passages",
        "questions": len(questions(data)),
        "passages": sum(1 for _ in passages(data)),
        "retriever": "bm25, k1 = 0.9, b = 0.4",
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
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
