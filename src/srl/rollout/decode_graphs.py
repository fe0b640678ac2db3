"""Decoding steps as CUDA graphs: on a GPU a small model's step is mostly the launches of its kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srl.rollout.sampling import Draws

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""A graph's rows are one of these, or a multiple of 64."""
FEED_COST = 4.0
"""What the start of an eager pass costs in replays: 6 to 8 with 135 million parameters on an H200
(docs/results.md), about 1 with a large model."""
WIDTH = 128
"""A graph attends to a multiple of this many positions."""

Body = Callable[[Tensor, int, Draws], Tensor]
"""(inputs (6, B) float64, width, draws) -> (2, B) float64; it reads nothing from the GPU."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """Buffers that keep their addresses, and what computes `out` (2, B) from `inputs` (6, B)."""

    host: Tensor
    inputs: Tensor
    out: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """A graph for each bucket of rows, width and kind of draw, captured when it is first needed.

    All share one pool of memory. Rows that fill a bucket write to the slot `spare`. Without a GPU the same
    steps run eagerly.
    """

    def __init__(self, body: Body, device: torch.device, *, spare: int) -> None:
        self._body, self._device, self._spare = body, device, spare
        self.clear()

    def clear(self) -> None:
        """Forget all graphs: the memory that they use is no longer what it was."""
        self._graphs: dict[tuple[int, int, Draws], _Graph] = {}
        self._pool: Any = None

    def step(self, inputs: NDArray[np.float64], longest: int, draws: Draws) -> NDArray[np.float64]:
        """(2, B) for `inputs` (6, B) of rows with at most `longest` ids.

        Raises RuntimeError where the step cannot be captured.
        """
        count = inputs.shape[1]
        rows = next((rows for rows in ROWS if rows >= count), -(-count // 64) * 64)
        key = rows, -(-longest // WIDTH) * WIDTH, draws
        graph = self._graphs.get(key) or self._graphs.setdefault(key, self._captured(*key))
        host = graph.host.numpy()
        host[:, :count] = inputs
        host[:, count:] = np.array([0, 0, self._spare, 0, 1, 1])[:, None]
        graph.inputs.copy_(graph.host, non_blocking=True)
        graph.replay()
        out: NDArray[np.float64] = graph.out.cpu().numpy()[:, :count]  # the one read
        return out

    def _captured(self, rows: int, width: int, draws: Draws) -> _Graph:
        on_gpu = self._device.type == "cuda"
        host = torch.zeros(6, rows, dtype=torch.float64, pin_memory=on_gpu)
        host[2], host[4:] = self._spare, 1
        inputs = host.to(self._device)
        out = torch.zeros(2, rows, dtype=torch.float64, device=self._device)

        def run() -> None:
            out.copy_(self._body(inputs, width, draws))

        if not on_gpu:
            return _Graph(host, inputs, out, run)
        self._warm_up(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        return _Graph(host, inputs, out, graph.replay)

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Run the step eagerly, on a stream of its own; before the first graph a second time, which raises
        RuntimeError where it waits for the GPU."""
        side, mode = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode")
                run()
                if not self._graphs:
                    torch.cuda.set_sync_debug_mode("error")
                    run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(side)
