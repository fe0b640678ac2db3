"""The memory that building an index takes: a corpus that is too large for bm25 is for lucene."""

from __future__ import annotations

from pathlib import Path

from srl.index.passages import PassageStore

MEMORY_OF_TEXT = 1.5
"""Bytes of memory that a build takes for each byte of the corpus (bench/lexical.py), mapped files aside."""


def too_large(store: PassageStore, free: int) -> str:
    """A warning where building the index takes more memory than the `free` bytes; else empty."""
    needed = MEMORY_OF_TEXT * (store.directory / "text.bin").stat().st_size
    if needed < free:
        return ""
    return (
        f"building bm25 for {len(store):,} passages takes about {needed / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} GB are free; lucene builds with 2 GB: srl index build --retriever lucene"
    )


def free_memory() -> int:
    """Free memory of this machine in bytes; a huge number where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return 1 << 62
