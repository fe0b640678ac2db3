"""The engine's table: for each slot the state of its episode and of the turn that is generated, as arrays.

Ids, uniforms and log-probs are stored by absolute position in the episode, so a step over many rows takes
a few array operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from srl.rollout.engine import Sampling
from srl.rollout.sampling import Draws, turn_uniforms

Rows = NDArray[np.int64]


class SlotTable:
    """`slots` rows. `known` counts a row's ids; the first `fed` of them have gone through the model.

    A row is `active` while a turn is generated in it. The turn's ids begin at `start` and end at `limit` at
    the latest.
    """

    def __init__(self, slots: int) -> None:
        self.known = np.zeros(slots, dtype=np.int64)
        self.fed = np.zeros(slots, dtype=np.int64)
        self.start = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.active = np.zeros(slots, dtype=np.bool_)
        self.temperature = np.ones(slots)
        self.top_p = np.ones(slots)
        self.stop_set = np.zeros(slots, dtype=np.int64)
        self.ids = np.zeros((slots, 0), dtype=np.int64)  # (slots, positions), as the next two
        self.uniforms = np.zeros((slots, 0))
        self.logprobs = np.zeros((slots, 0), dtype=np.float32)

    def begin(self, row: int, token_ids: Sequence[int], sampling: Sampling, stop_set: int) -> None:
        """Start a turn in `row`, whose episode so far is `token_ids`."""
        length = len(token_ids)
        self._reserve(length + sampling.max_tokens)
        old = self.known[row]
        self.ids[row, old:length] = token_ids[old:]
        self.uniforms[row, length : length + sampling.max_tokens] = turn_uniforms(
            sampling.key, sampling.max_tokens
        )
        self.known[row] = self.start[row] = length
        self.limit[row] = length + sampling.max_tokens
        self.temperature[row], self.top_p[row] = sampling.temperature, sampling.top_p
        self.stop_set[row] = stop_set
        self.active[row] = True

    def is_decoding(self, rows: Rows) -> bool:
        """True if each of the rows has exactly one new id, after others."""
        return bool((self.fed[rows] > 0).all() and (self.known[rows] - self.fed[rows] == 1).all())

    def step_inputs(self, rows: Rows) -> NDArray[np.float64]:
        """(6, B): last id, its position, row; uniform, temperature and top-p of the token to draw."""
        last = self.known[rows] - 1
        uniforms = self.uniforms[rows, last + 1]
        return np.stack(
            [self.ids[rows, last], last, rows, uniforms, self.temperature[rows], self.top_p[rows]]
        )

    def draws(self, rows: Rows) -> Draws:
        """What drawing a token for each of the rows needs."""
        greedy = self.temperature[rows] == 0
        scaled, truncated = self.temperature[rows] != 1, self.top_p[rows] < 1
        return Draws(
            bool(greedy.any()), not greedy.all(), bool(scaled[~greedy].any()), bool(truncated[~greedy].any())
        )

    def append(self, rows: Rows, tokens: Rows, logprobs: NDArray[np.float32]) -> None:
        """Add one sampled token to each row; all ids before it count as fed."""
        position = self.known[rows]
        self.ids[rows, position] = tokens
        self.logprobs[rows, position] = logprobs
        self.fed[rows] = position
        self.known[rows] = position + 1

    def turn_ids(self, row: int) -> list[int]:
        """The ids that the turn in `row` has sampled so far."""
        return self.ids[row, self.start[row] : self.known[row]].tolist()

    def turn_logprobs(self, row: int) -> list[float]:
        """The log-probs of `turn_ids`."""
        return self.logprobs[row, self.start[row] : self.known[row]].tolist()

    def is_extended_by(self, row: int, token_ids: Sequence[int]) -> bool:
        """True if `token_ids` begins with all known ids of the row's episode."""
        length = self.known[row]
        return len(token_ids) >= length and self.ids[row, :length].tolist() == list(token_ids[:length])

    def clear(self, row: int) -> None:
        """Forget the row's episode."""
        self.known[row] = self.fed[row] = 0
        self.active[row] = False

    def _reserve(self, positions: int) -> None:
        missing = positions - self.ids.shape[1]
        if missing > 0:
            margin = ((0, 0), (0, max(missing, self.ids.shape[1])))
            self.ids = np.pad(self.ids, margin)
            self.uniforms = np.pad(self.uniforms, margin)
            self.logprobs = np.pad(self.logprobs, margin)
