"""Where a turn ends: at the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from srl.rollout.codec import Codec


class StopFinder:
    """Finds the end of a turn: the first token that completes a stop string, whatever else it holds.

    Decoding is slow, so a turn is decoded only if its last token contains the last character of a stop
    string. `candidates` has a row for each set of stop strings seen.
    """

    def __init__(self, codec: Codec, vocab_size: int) -> None:
        self.codec = codec
        self.vocab_size = vocab_size
        self.sets: list[tuple[str, ...]] = []
        self.candidates: NDArray[np.bool_] = np.zeros((0, vocab_size), dtype=np.bool_)  # (sets, V)

    def index(self, stop: tuple[str, ...]) -> int:
        """The row of `candidates` for these stop strings, made on first use."""
        if stop not in self.sets:
            self.sets.append(stop)
            self.candidates = np.vstack([self.candidates, self._may_complete(stop)])
        return self.sets.index(stop)

    def completed(self, index: int, token_ids: Sequence[int]) -> bool:
        """True if the text of a turn's `token_ids` contains one of the stop strings of row `index`."""
        text = self.codec.decode(token_ids)
        return any(stop in text for stop in self.sets[index])

    def _may_complete(self, stop: tuple[str, ...]) -> NDArray[np.bool_]:
        """(V,) True where a token contains the last character of a stop string.

        The vocabulary spells only printable ASCII as itself; bytes and spaces have stand-ins. With any other
        last character every token is a candidate.
        """
        last = {string[-1] for string in stop}
        if any(not ("!" <= character <= "~") for character in last):
            return np.ones(self.vocab_size, dtype=np.bool_)
        tokenizer = self.codec.tokenizer
        size = min(len(tokenizer), self.vocab_size)
        pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
        candidates = np.zeros(self.vocab_size, dtype=np.bool_)
        candidates[:size] = [not last.isdisjoint(str(piece)) for piece in pieces]
        return candidates
