"""Encodes texts as vectors: tokenizer, transformer, pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from srl.errors import UserError, error_line
from srl.models.load import DTYPES, load_tokenizer
from srl.models.weights import quietly
from srl_e5.model_settings import Settings

_CHARACTERS = 1000
"""Maximum number of characters read per token of the length limit, so that long texts stay cheap."""


class Encoder:
    """A Hugging Face encoder with its pooling. Safe to use from many threads."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        *,
        query_max_length: int = 256,
        passage_max_length: int = 256,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        batch_size: int = 64,
        trust_remote_code: bool = False,
    ) -> None:
        self._settings, self._batch_size = settings, batch_size
        self._room = _CHARACTERS * max(query_max_length, passage_max_length)
        self._device = torch.device(device)
        self._model = _load(directory, settings.pooling, dtype, trust_remote_code).to(self._device)
        self.dimension: int = self._model.config.hidden_size
        tokenizer, self._pad, longest = _fast_tokenizer(directory, trust_remote_code)
        limit = min(longest, getattr(self._model.config, "max_position_embeddings", longest))
        for name, length in (("query", query_max_length), ("passage", passage_max_length)):
            if length > limit:
                key = f"retriever.e5.{name}_max_length"
                raise UserError(f"{directory} reads at most {limit} tokens, not {length}", key=key)
        self._query_tokens = _truncating(tokenizer, query_max_length)
        self._passage_tokens = _truncating(tokenizer, passage_max_length)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of `texts` as queries, (N, D) float32; equal texts have equal ones."""
        return self._encode(self._query_tokens, self._settings.query_prefix, texts)

    def passages(self, texts: Sequence[str], report: Callable[[float], None] | None = None) -> np.ndarray:
        """The vectors of `texts` as passages, (N, D) float32; equal texts have equal ones.

        `report` gets the fraction of tokens encoded so far, from 0 to 1. Tokens are counted, not texts,
        because the time depends on them and the longest texts are encoded first.
        """
        return self._encode(self._passage_tokens, self._settings.passage_prefix, texts, report)

    def _encode(
        self,
        tokenizer: Tokenizer,
        prefix: str,
        texts: Sequence[str],
        report: Callable[[float], None] | None = None,
    ) -> np.ndarray:
        once = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        encodings = tokenizer.encode_batch([_clean((prefix + text)[: self._room]) for text in once])
        ids = [encoding.ids for encoding in encodings]
        vectors = np.empty((len(once), self.dimension), np.float32)
        encoded, total = 0, max(1, sum(map(len, ids)))
        for rows in _by_length(ids, self._batch_size):
            vectors[rows] = self._vectors([ids[row] for row in rows])
            encoded += sum(len(ids[row]) for row in rows)
            if report:
                report(encoded / total)
        if not np.isfinite(vectors).all():
            raise UserError("the encoder returned a vector that is not finite", key="retriever.e5.dtype")
        return vectors[[once[text] for text in texts]]

    @torch.inference_mode()
    def _vectors(self, ids: list[list[int]]) -> np.ndarray:
        """(B, D) float32 for the token ids of one batch."""
        width = max(1, *map(len, ids))
        tokens = torch.tensor([row + [self._pad] * (width - len(row)) for row in ids], device=self._device)
        lengths = torch.tensor([len(row) for row in ids], device=self._device)
        mask = torch.arange(width, device=self._device) < lengths[:, None]  # (B, T)
        output = self._model(input_ids=tokens, attention_mask=mask.long())
        pooled = pool(output, mask, self._settings.pooling)
        if self._settings.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.cpu().numpy()


def pool(output: Any, mask: Tensor, how: str) -> Tensor:
    """One vector for each text, (B, D) float32, from token vectors (B, T, D) and mask (B, T).

    `how` is `mean` (of the text's tokens), `cls` (the first token) or `pooler` (the model's own pooler).
    """
    if how == "pooler":
        return output.pooler_output.float()
    hidden = output.last_hidden_state.float()  # (B, T, D)
    if how == "cls":
        return hidden[:, 0]
    weights = mask[..., None].float()
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def _by_length(ids: list[list[int]], size: int) -> Iterator[list[int]]:
    """Rows in batches of `size`, the longest first: little padding, and a lack of memory shows at once."""
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    return (order[start : start + size] for start in range(0, len(order), size))


def _load(directory: Path, pooling: str, dtype: str, trust_remote_code: bool) -> Any:
    """The model, in eval mode. Raises UserError if it is not an encoder or is incomplete."""
    from transformers import AutoModel

    try:
        with quietly():
            model, info = AutoModel.from_pretrained(
                str(directory), dtype=DTYPES[dtype], use_safetensors=True, local_files_only=True,
                trust_remote_code=trust_remote_code, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:
        raise UserError(f"{directory} could not be loaded as an encoder: {error_line(error)}") from error
    missing = sorted(name for name in info["missing_keys"] if pooling == "pooler" or "pooler" not in name)
    if missing:
        raise UserError(f"{directory} is incomplete: no weights for {', '.join(missing[:3])}")
    if model.config.is_encoder_decoder:
        raise UserError(f"{directory} has a decoder ({model.config.model_type}); expected an encoder")
    return model.eval()


def _fast_tokenizer(directory: Path, trust_remote_code: bool) -> tuple[Tokenizer, int, int]:
    """The fast tokenizer, its padding id, and its maximum number of tokens.

    It is used without the wrapper of transformers: that sets truncation and padding at every call, so it
    is not thread-safe.
    """
    tokenizer, _ = load_tokenizer(directory, trust_remote_code)
    if not tokenizer.is_fast:
        raise UserError(f"{directory} has no fast tokenizer (tokenizer.json)")
    return tokenizer.backend_tokenizer, tokenizer.pad_token_id or 0, tokenizer.model_max_length


def _truncating(tokenizer: Tokenizer, max_length: int) -> Tokenizer:
    """A copy of the tokenizer that truncates texts to `max_length` tokens and does not pad."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(max_length)
    copy.no_padding()
    return copy


def _clean(text: str) -> str:
    """Replace unpaired surrogates, which tokenizers reject, by question marks."""
    return text.encode("utf-8", "replace").decode()
