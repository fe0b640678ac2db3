"""Hits encoded as JSON, and the cache that keeps them: a query asked again costs no encoding."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from srl.trajectory import Hit, Passage

_quoted = json.JSONEncoder().encode


@dataclass(frozen=True, slots=True)
class EncodedHits:
    """The hits of one query, best first: documents and scores as JSON."""

    documents: tuple[bytes, ...]
    scores: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return sum(map(len, self.documents)) + 200 * len(self.documents) + 200

    def json(self, with_scores: bool) -> bytes:
        if not with_scores:
            return b"[" + b", ".join(self.documents) + b"]"
        pairs = zip(self.documents, self.scores, strict=True)
        return b"[" + b", ".join([b'{"document": %b, "score": %b}' % pair for pair in pairs]) + b"]"

    def flat_json(self) -> bytes:
        """Hits with the fields of their documents, the text as `content`, beside `document` and `score`."""
        hits = json.loads(self.json(with_scores=True))
        for hit in hits:
            document = dict(hit["document"])
            hit |= {"content": document.pop("contents"), **document}
        return json.dumps(hits).encode()


NOTHING = EncodedHits((), ())


def encode(hits: Sequence[Hit]) -> EncodedHits:
    """Raises ValueError if a score is not finite."""
    scores = [float(hit.score) for hit in hits]
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"the retriever returned the scores {scores}"[:200])
    return EncodedHits(
        tuple(document(hit.passage) for hit in hits), tuple(repr(score).encode() for score in scores)
    )


def document(passage: Passage, url: str = "") -> bytes:
    """A passage as JSON, with `url` if given, if the passage has one, or if its id is a web address.

    Strings are encoded one by one, which is three times as fast as encoding a dict.
    """
    url = url or passage.url or (passage.id if passage.id.startswith(("http://", "https://")) else "")
    more = f', "url": {_quoted(url)}' if url else ""
    return f'{{"id": {_quoted(passage.id)}, "contents": {_quoted(passage.contents)}{more}}}'.encode()


def write_answer(
    found: Sequence[EncodedHits],
    return_scores: bool,
    single: bool = False,
    errors: Mapping[int, str] | None = None,
) -> bytes:
    """`{"result": [[…], …]}` with one list per query, of bare documents or of documents with scores.

    A `single` query's hits are repeated as `results`: rLLM's client reads `id`, `content` and `score` in
    each, and its earlier ones `document` and `score`. `errors` says why the queries at these positions were
    not searched.
    """
    parts = [b'{"result": [', b", ".join([one.json(return_scores) for one in found]), b"]"]
    if single:
        parts += [b', "results": ', found[0].flat_json()]
    if errors:
        listed = [{"query": position, "detail": why} for position, why in errors.items()]
        parts += [b', "errors": ', json.dumps(listed).encode()]
    return b"".join([*parts, b"}"])


Key = tuple[str, str, int]
"""Index digest, query and k: equal keys have equal answers."""

_PER_ENTRY = 400
"""Approximate bytes of a key and its place in the table."""


class AnswerCache:
    """An LRU cache of at most `max_bytes`; 0 keeps nothing. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._kept: OrderedDict[Key, EncodedHits] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> EncodedHits | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Key, found: EncodedHits) -> None:
        """Keep an answer, unless it alone exceeds `max_bytes`."""
        size = _size(key, found)
        if size > self.max_bytes or key in self._kept:
            return
        self._kept[key] = found
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= _size(*self._kept.popitem(last=False))


def _size(key: Key, found: EncodedHits) -> int:
    return 4 * len(key[1]) + found.size + _PER_ENTRY
