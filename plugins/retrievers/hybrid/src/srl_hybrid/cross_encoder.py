"""A cross-encoder: a model that scores the relevance of a passage to a query by reading both together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from srl.errors import UserError, error_line
from srl.models.load import DTYPES, named_directory, pick_device
from srl.models.weights import model_digest, quietly

_WINDOW = 64
"""Batches tokenized at a time."""


class CrossEncoder:
    """A sequence classifier with one label (relevant) or two (not relevant, relevant). Thread-safe."""

    def __init__(
        self,
        model: str,
        *,
        max_length: int = 512,
        dtype: str = "float32",
        device: str = "auto",
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ) -> None:
        self.directory = named_directory(model, trust_remote_code, "retriever.rerank")
        self.model = str(self.directory.resolve()) if Path(model).is_dir() else model
        self._device = pick_device(device)
        dtype = dtype if self._device.type == "cuda" else "float32"
        self._model, self._tokenizer = _load(self.directory, dtype, trust_remote_code)
        self._model.to(self._device).eval()
        self._max_length, self._batch_size = max_length, batch_size
        self._lock = Lock()  # a fast tokenizer keeps truncation and padding as state
        longest = self._tokenizer.model_max_length
        limit = min(longest, getattr(self._model.config, "max_position_embeddings", None) or longest)
        if max_length > limit:
            raise UserError(f"{model} reads at most {limit} tokens", key="retriever.rerank.max_length")

    @property
    def digest(self) -> str:
        """32 hex digits of the weights on disk."""
        return model_digest(self.directory)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """The probability that the passage is relevant for each (query, passage), (N,) float64.

        It is the sigmoid of the logit, or of the difference of the two logits. Batches are sorted by
        length, and a repeated pair is scored once. NaN if the model's output is not finite.
        """
        once = list(dict.fromkeys(pairs))
        logits = np.empty(len(once))
        for start in range(0, len(once), _WINDOW * self._batch_size):
            window = once[start : start + _WINDOW * self._batch_size]
            for rows, values in self._batches(window):
                logits[start + np.array(rows)] = values
        place = {pair: row for row, pair in enumerate(once)}
        per_pair = logits[[place[pair] for pair in pairs]]
        # without clipping, a logit below -700 would give a score of 0, and a hit needs a positive score
        return np.where(np.isfinite(per_pair), 1 / (1 + np.exp(-np.clip(per_pair, -700, 700))), np.nan)

    def _batches(self, pairs: list[tuple[str, str]]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Rows of `pairs` and their logits, the longest first: a lack of memory shows at once."""
        queries, passages = zip(*((_clean(query), _clean(text)) for query, text in pairs), strict=True)
        with self._lock:
            tokens = self._tokenizer(
                list(queries), list(passages), truncation="longest_first", max_length=self._max_length
            )
        order = sorted(range(len(pairs)), key=lambda row: -len(tokens["input_ids"][row]))
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            yield rows, self._logits({name: [column[row] for row in rows] for name, column in tokens.items()})

    @torch.inference_mode()
    def _logits(self, batch: dict[str, list[list[int]]]) -> np.ndarray:
        """Logits (B,) float64 of one batch of tokenizer outputs."""
        with self._lock:
            padded = self._tokenizer.pad(batch, return_tensors="pt", verbose=False)
        logits = self._model(**padded.to(self._device)).logits.double()  # (B, 1) or (B, 2)
        return (logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]).cpu().numpy()


def _load(directory: Path, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Model and tokenizer. Raises UserError if the model is not a cross-encoder."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        with quietly():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                str(directory), dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(str(directory), **options)
    except Exception as error:
        raise UserError(f"{directory} could not be loaded as a cross-encoder: {error_line(error)}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:2])
        raise UserError(f"{directory} is not a cross-encoder: it has no weights for {missing}")
    if model.config.num_labels not in (1, 2):
        raise UserError(f"{directory} has {model.config.num_labels} labels; a cross-encoder has 1 or 2")
    return model, tokenizer


def _clean(text: str) -> str:
    """Replace unpaired surrogates, which tokenizers reject, by question marks."""
    return text.encode("utf-8", "replace").decode()
