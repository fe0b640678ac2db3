"""Estimates the memory of a build, and recommends lucene if the corpus is too large."""

from __future__ import annotations

from pathlib import Path

from srl.index.passages import PassageStore

MEMORY_OF_TEXT = 1.5
"""Memory of a build per byte of the corpus, without mapped files (measured by bench/lexical.py)."""


def too_large(store: PassageStore, free: int) -> str:
    """A warning if building the index needs more memory than the `free` bytes; else empty."""
    needed = MEMORY_OF_TEXT * (store.directory / "text.bin").stat().st_size
    if needed < free:
        return ""
    return (
        f"building bm25 for {len(store):,} passages takes about {needed / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} GB are free; lucene builds with 2 GB: srl index build --retriever lucene"
    )


def free_memory() -> int:
    """Free memory of this machine in bytes; 2⁶² if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return 1 << 62
