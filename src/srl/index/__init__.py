"""A corpus made searchable: passages, a manifest with a digest, and the retriever's own files."""

from srl.index.build import build_index, check_corpus, import_index
from srl.index.manifest import Manifest, check_index, read_index_manifest, verify
from srl.index.open import Index, live_index, open_index
from srl.index.passages import PassageStore, keep_passages, open_passages
from srl.index.retriever import (
    Fault,
    Retriever,
    RetrieverBase,
    build_live,
    load_retriever,
    open_retriever,
    outcomes_of,
)

__all__ = [
    "Fault",
    "Index",
    "Manifest",
    "PassageStore",
    "Retriever",
    "RetrieverBase",
    "build_index",
    "build_live",
    "check_corpus",
    "check_index",
    "import_index",
    "keep_passages",
    "live_index",
    "load_retriever",
    "open_index",
    "open_passages",
    "open_retriever",
    "outcomes_of",
    "read_index_manifest",
    "verify",
]
