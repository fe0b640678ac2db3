"""The text of each token of a segment, by the tokenizer of its run if that is still on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.browse.transcript import Transcript
from srl.models.hub import cached

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"
_LONGEST = 8
"""Tokens that one character may need: more than the bytes of one in UTF-8."""


def tokenizer_of(run: Path, model: str) -> Tokenizer | None:
    """The tokenizer in a checkpoint of the directory `run`, or of `model`, also from the hub's cache; None if
    there is none."""
    files = [*sorted(run.glob(f"checkpoints/*/{_FILE}")), Path(cached(model)) / _FILE]
    file = next((path for path in files if path.is_file()), None)
    return _load(file, file.stat().st_mtime_ns) if file else None


@lru_cache(4)
def _load(file: Path, written: int) -> Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises plain exceptions for a damaged file
        return None


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int], text: str) -> list[str] | None:
    """The pieces of `text` that the tokens wrote; None if the tokenizer did not write it.

    A character of several tokens is the last one's, and the others are empty. Special tokens, such as the end
    of a turn, have their names; what the policy wrote is logged without them.
    """
    if tokenizer is None:
        return None
    pieces = _pieces(tokenizer, ids, {})
    if "".join(pieces) == text:
        return pieces
    added = tokenizer.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    pieces = _pieces(tokenizer, ids, special)
    without = (piece for token, piece in zip(ids, pieces, strict=True) if token not in special)
    return pieces if "".join(without) == text else None


def _pieces(tokenizer: Tokenizer, ids: Sequence[int], names: Mapping[int, str]) -> list[str]:
    """The text of each token after those before it; of those in `names` their names."""
    pieces: list[str] = []
    before: list[int] = []
    open_ids: list[int] = []
    for token in ids:
        if token in names:
            pieces.append(names[token])
            continue
        open_ids.append(token)
        context = tokenizer.decode(before, skip_special_tokens=False)
        piece = tokenizer.decode([*before, *open_ids], skip_special_tokens=False)[len(context) :]
        if piece.endswith("\N{REPLACEMENT CHARACTER}") and len(open_ids) < _LONGEST:
            pieces.append("")
            continue
        pieces.append(piece)
        before, open_ids = open_ids, []
    return pieces


def token_rows(transcript: Transcript, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """A row for each token of a trajectory, in order; what the log does not have is None."""
    table: list[dict[str, Any]] = []
    for step in transcript.steps:
        segment = step.segment
        pieces = token_texts(tokenizer, segment.token_ids, segment.text)
        numbers = {
            "sampler": segment.logprobs, "trainer": step.trainer_logprobs, "entropy": step.entropies,
            "advantage": step.advantages, "return": step.returns,
        }  # fmt: skip
        for place, token in enumerate(segment.token_ids):
            table.append({
                "position": len(table), "turn": segment.turn, "kind": segment.kind,
                "mask": int(segment.is_policy), "token": token, "text": pieces and pieces[place],
                **{name: values[place] if len(values) > place else None for name, values in numbers.items()},
            })  # fmt: skip
    return table
