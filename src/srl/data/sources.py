"""The sources by name (nq, squad, …): what each holds, where it comes from, and its format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from srl.data import question_formats
from srl.data.corpus import read_corpus
from srl.data.parquet import is_training_parquet, read_questions
from srl.data.question_formats import Format, read_format, read_paragraphs
from srl.errors import UserError, nearest
from srl.trajectory import Passage, Question


@dataclass(frozen=True, slots=True)
class Source:
    """A data set by name. `files` are the names of the files as published.

    `hub` is its repository on the Hugging Face hub, `hub_files` its file for each split (a corpus has one,
    under the empty name). A source of questions has a `format`; without one it is read as training parquet
    or FlashRAG's JSON lines, and `data_source` is in its rows.
    """

    name: str
    what: str
    files: str
    licence: str
    homepage: str = ""
    data_source: str = ""
    hub: str = ""
    hub_files: Mapping[str, str] = field(default_factory=dict)
    format: Format | None = None
    is_corpus: bool = False

    def questions(
        self, path: Path, split: str, skipped: Counter[str] | None = None, start: int = 0
    ) -> Iterator[Question]:
        """The questions of one file, as published or as training parquet; none from a corpus.

        `start` is the number of rows of the same data set and split in earlier files.
        """
        if self.is_corpus:
            return
        if self.format is None or is_training_parquet(path):
            yield from read_questions(path)
        else:
            yield from read_format(self.format, path, self.data_source, split, skipped, start)

    def passages(self, path: Path, skipped: Counter[str] | None = None) -> Iterator[Passage]:
        """The passages of a corpus, or the paragraphs that come with the questions of one file.

        `skipped` counts the rows left out, by reason.
        """
        if self.is_corpus:
            yield from read_corpus(path, skipped, self.data_source)
        elif self.format is not None and not is_training_parquet(path):
            yield from read_paragraphs(self.format, path, self.data_source)


_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"


def _flashrag(name: str, *splits: str) -> dict[str, str]:
    """The files of one data set in FlashRAG's repository, by split."""
    files = {"train": "train", "validation": "dev", "test": "test"}
    return {split: f"{name}/{files[split]}.jsonl" for split in splits}


_ALL = (
    Source(
        name="nq",
        what="Natural Questions (open): real queries, short answers; with paragraphs as in QED",
        files="NQ-open.train.jsonl, NQ-open.dev.jsonl",
        licence="CC BY-SA 3.0",
        homepage="https://github.com/google-research-datasets/natural-questions",
        data_source="nq",
        hub=_FLASHRAG,
        hub_files=_flashrag("nq", "train", "validation", "test"),
        format=question_formats.NQ_OPEN,
    ),
    Source(
        name="triviaqa",
        what="TriviaQA: trivia with all aliases of each answer",
        files="wikipedia-train.json, unfiltered-web-dev.json",
        licence="not stated",
        homepage="https://nlp.cs.washington.edu/triviaqa/",
        data_source="triviaqa",
        hub=_FLASHRAG,
        hub_files=_flashrag("triviaqa", "train", "validation", "test"),
        format=question_formats.TRIVIAQA,
    ),
    Source(
        name="popqa",
        what="PopQA: one fact about an entity, rare ones too; a test set",
        files="popQA.tsv",
        licence="MIT",
        homepage="https://github.com/AlexTMallen/adaptive-retrieval",
        data_source="popqa",
        hub=_FLASHRAG,
        hub_files=_flashrag("popqa", "test"),
        format=question_formats.POPQA,
    ),
    Source(
        name="hotpotqa",
        what="HotpotQA: two-hop bridge and comparison questions, with their paragraphs",
        files="hotpot_train_v1.1.json, hotpot_dev_distractor_v1.json, hotpot_dev_v1_simplified.json",
        licence="CC BY-SA 4.0",
        homepage="https://hotpotqa.github.io",
        data_source="hotpotqa",
        hub=_FLASHRAG,
        hub_files=_flashrag("hotpotqa", "train", "validation"),
        format=question_formats.HOTPOTQA,
    ),
    Source(
        name="2wikimultihopqa",
        what="2WikiMultihopQA: questions of two and four hops, with their paragraphs",
        files="train.json, dev.json",
        licence="Apache-2.0",
        homepage="https://github.com/Alab-NII/2wikimultihop",
        data_source="2wikimultihopqa",
        hub=_FLASHRAG,
        hub_files=_flashrag("2wikimultihopqa", "train", "validation"),
        format=question_formats.TWO_WIKI,
    ),
    Source(
        name="musique",
        what="MuSiQue: questions of two to four hops, with their paragraphs",
        files="musique_ans_v1.0_train.jsonl, musique_full_v1.0_dev.jsonl",
        licence="CC BY 4.0",
        homepage="https://github.com/StonyBrookNLP/musique",
        data_source="musique",
        hub=_FLASHRAG,
        hub_files=_flashrag("musique", "train", "validation"),
        format=question_formats.MUSIQUE,
    ),
    Source(
        name="bamboogle",
        what="Bamboogle: 125 two-hop questions that a web search alone does not answer; a test set",
        files="Bamboogle Prerelease - Sheet1.csv",
        licence="MIT",
        homepage="https://github.com/ofirpress/self-ask",
        data_source="bamboogle",
        hub=_FLASHRAG,
        hub_files=_flashrag("bamboogle", "test"),
        format=question_formats.BAMBOOGLE,
    ),
    Source(
        name="squad",
        what="SQuAD 1.1: questions on Wikipedia paragraphs, which become the corpus",
        files="train-v1.1.json, dev-v1.1.json",
        licence="CC BY-SA 4.0",
        homepage="https://rajpurkar.github.io/SQuAD-explorer/",
        data_source="squad",
        hub=_FLASHRAG,
        hub_files=_flashrag("squad", "train", "validation"),
        format=question_formats.SQUAD,
    ),
    Source(
        name="asearcher",
        what="ASearcher: synthetic questions for search agents",
        files="ASearcher-Base-35k.jsonl, ASearcher-LRM-35k.jsonl",
        licence="Apache-2.0",
        homepage="https://github.com/inclusionAI/ASearcher",
        data_source="asearcher",
        hub="inclusionAI/ASearcher-train-data",
        hub_files={"train": "ASearcher-Base-35k.jsonl"},
        format=question_formats.ASEARCHER,
    ),
    Source(
        name="search-r1",
        what="Search-R1's merged training set (NQ and HotpotQA), or any parquet in verl's schema",
        files="train.parquet, test.parquet",
        licence="those of NQ and HotpotQA",
        homepage="https://github.com/PeterGriffinJin/Search-R1",
        hub="PeterJinGo/nq_hotpotqa_train",
        hub_files={"train": "train.parquet", "test": "test.parquet"},
    ),
    Source(
        name="questions",
        what="your own questions, one {id, question, golden_answers, metadata} per row",
        files="any .jsonl, .json, .parquet or .csv, also .gz and .zst",
        licence="yours",
    ),
    Source(
        name="corpus",
        what="your own passages, one {id, contents} or {title, text} per row, or a folder of texts",
        files="any .jsonl, .json, .parquet, .csv or .tsv, also .gz and .zst; a folder of .txt and .md",
        licence="yours",
        is_corpus=True,
    ),
    Source(
        name="2wiki-corpus",
        what="2WikiMultihopQA's passages as HippoRAG publishes them: {title, text}",
        files="2wikimultihopqa_corpus.json",
        licence="CC BY-SA (Wikipedia)",
        homepage="https://github.com/OSU-NLP-Group/HippoRAG",
        data_source="2wikimultihopqa",
        hub="osunlp/HippoRAG_2",
        hub_files={"": "2wikimultihopqa_corpus.json"},
        is_corpus=True,
    ),
    Source(
        name="hotpotqa-corpus",
        what="HotpotQA's passages as HippoRAG publishes them: {title, text}",
        files="hotpotqa_corpus.json",
        licence="CC BY-SA (Wikipedia)",
        homepage="https://github.com/OSU-NLP-Group/HippoRAG",
        data_source="hotpotqa",
        hub="osunlp/HippoRAG_2",
        hub_files={"": "hotpotqa_corpus.json"},
        is_corpus=True,
    ),
    Source(
        name="wiki-18",
        what="Wikipedia of 2018 in 21 million passages, the corpus of Search-R1",
        files="wiki-18.jsonl or wiki-18.jsonl.gz",
        licence="CC BY-SA (Wikipedia)",
        homepage="https://github.com/PeterGriffinJin/Search-R1",
        hub="PeterJinGo/wiki-18-corpus",
        hub_files={"": "wiki-18.jsonl.gz"},
        is_corpus=True,
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
ALIASES = {"2wiki": "2wikimultihopqa", "hotpot": "hotpotqa", "natural-questions": "nq"}


def source_of(name: str) -> Source:
    """The source called `name` or by a short name (`2wiki`, `hotpot`). Raises UserError listing all names."""
    found = SOURCES.get(ALIASES.get(name, name))
    if found is None and Path(name).is_file():
        raise UserError(f"{name} is a file: name its source, such as questions={name} or corpus={name}")
    if found is None:
        raise UserError(f"no source {name!r}: there are {', '.join(SOURCES)}{nearest(name, list(SOURCES))}")
    return found
