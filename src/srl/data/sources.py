"""The sources by name (nq, squad, …): what each holds, where it comes from, and its format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from srl.data import question_formats as formats
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

    @property
    def only_split(self) -> str:
        """The split of a data set that has only one (PopQA and Bamboogle are test sets), else empty."""
        return next(iter(self.hub_files)) if len(self.hub_files) == 1 else ""

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
_IN_FLASHRAG = {"train": "train", "validation": "dev", "test": "test"}
_WIKIPEDIA = "CC BY-SA (Wikipedia)"
_HIPPORAG = "https://github.com/OSU-NLP-Group/HippoRAG"
_SEARCH_R1 = "https://github.com/PeterGriffinJin/Search-R1"


def _published(
    name: str, what: str, files: str, licence: str, homepage: str, form: Format, splits: str
) -> Source:
    """A data set that FlashRAG has on the hub too, in these splits."""
    hub_files = {split: f"{name}/{_IN_FLASHRAG[split]}.jsonl" for split in splits.split()}
    return Source(name, what, files, licence, homepage, name, _FLASHRAG, hub_files, form)


_ALL = (
    _published(
        "nq", "Natural Questions (open): real queries, short answers; with paragraphs as in QED",
        "NQ-open.train.jsonl, NQ-open.dev.jsonl", "CC BY-SA 3.0",
        "https://github.com/google-research-datasets/natural-questions",
        formats.NQ_OPEN, "train validation test",
    ),
    _published(
        "triviaqa", "TriviaQA: trivia with all aliases of each answer",
        "wikipedia-train.json, unfiltered-web-dev.json", "not stated",
        "https://nlp.cs.washington.edu/triviaqa/", formats.TRIVIAQA, "train validation test",
    ),
    _published(
        "popqa", "PopQA: one fact about an entity, rare ones too; a test set", "popQA.tsv", "MIT",
        "https://github.com/AlexTMallen/adaptive-retrieval", formats.POPQA, "test",
    ),
    _published(
        "hotpotqa", "HotpotQA: two-hop bridge and comparison questions, with their paragraphs",
        "hotpot_train_v1.1.json, hotpot_dev_distractor_v1.json, hotpot_dev_v1_simplified.json",
        "CC BY-SA 4.0", "https://hotpotqa.github.io", formats.HOTPOTQA, "train validation",
    ),
    _published(
        "2wikimultihopqa", "2WikiMultihopQA: questions of two and four hops, with their paragraphs",
        "train.json, dev.json", "Apache-2.0", "https://github.com/Alab-NII/2wikimultihop",
        formats.TWO_WIKI, "train validation",
    ),
    _published(
        "musique", "MuSiQue: questions of two to four hops, with their paragraphs",
        "musique_ans_v1.0_train.jsonl, musique_full_v1.0_dev.jsonl", "CC BY 4.0",
        "https://github.com/StonyBrookNLP/musique", formats.MUSIQUE, "train validation",
    ),
    _published(
        "bamboogle", "Bamboogle: 125 two-hop questions that a web search alone does not answer; a test set",
        "Bamboogle Prerelease - Sheet1.csv", "MIT", "https://github.com/ofirpress/self-ask",
        formats.BAMBOOGLE, "test",
    ),
    _published(
        "squad", "SQuAD 1.1: questions on Wikipedia paragraphs, which become the corpus",
        "train-v1.1.json, dev-v1.1.json", "CC BY-SA 4.0",
        "https://rajpurkar.github.io/SQuAD-explorer/", formats.SQUAD, "train validation",
    ),
    Source(
        "asearcher", "ASearcher: synthetic questions for search agents",
        "ASearcher-Base-35k.jsonl, ASearcher-LRM-35k.jsonl", "Apache-2.0",
        "https://github.com/inclusionAI/ASearcher", "asearcher", "inclusionAI/ASearcher-train-data",
        {"train": "ASearcher-Base-35k.jsonl"}, formats.ASEARCHER,
    ),
    Source(
        "search-r1", "Search-R1's merged training set (NQ and HotpotQA), or any parquet in verl's schema",
        "train.parquet, test.parquet", "those of NQ and HotpotQA", _SEARCH_R1,
        hub="PeterJinGo/nq_hotpotqa_train",
        hub_files={"train": "train.parquet", "test": "test.parquet"},
    ),
    Source(
        "questions", "your own questions, one {id, question, golden_answers, metadata} per row",
        "any .jsonl, .json, .parquet or .csv, also .gz and .zst", "yours",
    ),
    Source(
        "corpus", "your own passages, one {id, contents} or {title, text} per row, or a folder",
        "any .jsonl, .json, .parquet, .csv or .tsv, also .gz and .zst; a folder of .txt, .md and these",
        "yours", is_corpus=True,
    ),
    Source(
        "2wiki-corpus", "2WikiMultihopQA's passages as HippoRAG publishes them: {title, text}",
        "2wikimultihopqa_corpus.json", _WIKIPEDIA, _HIPPORAG, "2wikimultihopqa",
        "osunlp/HippoRAG_2", {"": "2wikimultihopqa_corpus.json"}, is_corpus=True,
    ),
    Source(
        "hotpotqa-corpus", "HotpotQA's passages as HippoRAG publishes them: {title, text}",
        "hotpotqa_corpus.json", _WIKIPEDIA, _HIPPORAG, "hotpotqa",
        "osunlp/HippoRAG_2", {"": "hotpotqa_corpus.json"}, is_corpus=True,
    ),
    Source(
        "wiki-18", "Wikipedia of 2018 in 21 million passages, the corpus of Search-R1",
        "wiki-18.jsonl or wiki-18.jsonl.gz", _WIKIPEDIA, _SEARCH_R1,
        hub="PeterJinGo/wiki-18-corpus", hub_files={"": "wiki-18.jsonl.gz"}, is_corpus=True,
    ),
)  # fmt: skip

SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
ALIASES = {"2wiki": "2wikimultihopqa", "hotpot": "hotpotqa", "natural-questions": "nq"}


def source_of(name: str) -> Source:
    """The source called `name` or by a short name (`2wiki`, `hotpot`). Raises UserError listing all names."""
    entry = SOURCES.get(ALIASES.get(name, name))
    if entry is None and Path(name).is_file():
        raise UserError(f"{name} is a file: name its source, such as questions={name} or corpus={name}")
    if entry is None:
        raise UserError(f"no source {name!r}: there are {', '.join(SOURCES)}{nearest(name, list(SOURCES))}")
    return entry
