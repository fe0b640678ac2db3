"""A tokenizer's files, written so that every program reads the same words in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from srl.files import write_json
from srl.model import quietly

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that takes a `tokenizer.json` as it is: in transformers 4 and in 5."""


def readable_by_all(directory: Path) -> bool:
    """Whether `AutoTokenizer` reads the tokenizer of a model directory as its `tokenizer.json` says.

    For some kinds of model (Qwen2) transformers 5 builds the kind's own tokenizer from the vocabulary,
    whatever class is named. A key in `tokenizer_config.json` makes it take the whole file; it is written
    where it is needed. In spite of its name it allows no code: there is none, and nothing else reads it.
    """
    file = directory / "tokenizer_config.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if known.get("tokenizer_class") not in GENERIC or _is_read_as_written(directory):
        return True
    write_json(file, {**known, "tokenizer_class": GENERIC[0], "trust_remote_code": True})
    return _is_read_as_written(directory)


def _is_read_as_written(directory: Path) -> bool:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    return _pipeline(AutoTokenizer, directory) == _pipeline(PreTrainedTokenizerFast, directory)


def _pipeline(kind: Any, directory: Path) -> str:
    """All that turns text into ids and back, as one string."""
    with quietly():
        tokenizer = kind.from_pretrained(str(directory), local_files_only=True)
    return str(tokenizer.backend_tokenizer.to_str())
