"""Hits as the JSON that an answer is put together from, written once however often they are asked for."""

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
    """The hits of one query, best first: each one's document and its score, as JSON."""

    documents: tuple[bytes, ...]
    scores: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes that it keeps, about."""
        return sum(map(len, self.documents)) + 200 * len(self.documents) + 200

    def json(self, with_scores: bool) -> bytes:
        if not with_scores:
            return b"[" + b", ".join(self.documents) + b"]"
        pairs = zip(self.documents, self.scores, strict=True)
        return b"[" + b", ".join([b'{"document": %b, "score": %b}' % pair for pair in pairs]) + b"]"


NOTHING = EncodedHits((), ())


def encode(hits: Sequence[Hit]) -> EncodedHits:
    """Raises ValueError on a score that JSON has no number for."""
    scores = [float(hit.score) for hit in hits]
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"the retriever gave the scores {scores}"[:200])
    return EncodedHits(
        tuple(document(hit.passage) for hit in hits), tuple(repr(score).encode() for score in scores)
    )


def document(passage: Passage, url: str = "") -> bytes:
    """A passage as it is sent; with its `url` where it was asked for by that, or where its id is one.

    Texts are written one by one: that is three times as fast as a dict (and ASCII, whatever they hold).
    """
    url = url or (passage.id if passage.id.startswith(("http://", "https://")) else "")
    more = f', "url": {_quoted(url)}' if url else ""
    return f'{{"id": {_quoted(passage.id)}, "contents": {_quoted(passage.contents)}{more}}}'.encode()


def write_answer(
    found: Sequence[EncodedHits],
    return_scores: bool,
    single: bool = False,
    errors: Mapping[int, str] | None = None,
) -> bytes:
    """`{"result": [[…], …]}`, one list for each query, of bare documents or with scores.

    A `single` query's hits are there once more as `results`, flat and scored, which is what rLLM reads.
    `errors` says why the queries at these positions were not searched.
    """
    parts = [b'{"result": [', b", ".join([one.json(return_scores) for one in found]), b"]"]
    if single:
        parts += [b', "results": ', found[0].json(with_scores=True)]
    if errors:
        listed = [{"query": position, "detail": why} for position, why in errors.items()]
        parts += [b', "errors": ', json.dumps(listed).encode()]
    return b"".join([*parts, b"}"])


Key = tuple[str, str, int]
"""Index digest, query and k: equal keys have equal answers, whichever server gave them."""

_PER_ENTRY = 400
"""Bytes that the key and its place in the table take, about."""


class AnswerCache:
    """Least recently used answers go first when `max_bytes` are full; 0 keeps none. Not for threads."""

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
        """Keep an answer, unless it alone is larger than all that may be kept."""
        size = _size(key, found)
        if size > self.max_bytes or key in self._kept:
            return
        self._kept[key] = found
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= _size(*self._kept.popitem(last=False))


def _size(key: Key, found: EncodedHits) -> int:
    return 4 * len(key[1]) + found.size + _PER_ENTRY
