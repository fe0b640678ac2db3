"""Text to token ids and back, as an episode needs it: prompts by chat template, special tokens as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from srl.errors import UserError
from srl.protocol import opens_thought
from srl.safe import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CONTEXTS = (".", "a", "0", "中")
"""Texts that a piece of text may be encoded after; the first that does not merge with it counts."""


class Codec:
    """A Hugging Face tokenizer as an episode uses it.

    A prompt goes through the chat template once, where there is one. In everything that the environment
    writes, the names of special tokens are encoded as plain text. Many tokenizers put a mark of their own
    before a text (SentencePiece's `▁`); a text that continues a sequence gets none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`template_kwargs` are what the chat template is called with."""
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        ids = {*eos_ids, tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set(eos_ids)
        self.eos_ids: frozenset[int] = frozenset(ids)
        self._added = tokenizer.added_tokens_decoder
        self._specials = [str(token) for token in self._added.values() if token.special]
        self.added = {str(token): number for number, token in self._added.items() if str(token).strip()}
        """The tokens that are in a text by their names, special ones and others."""
        self._special_ids = {number for number, token in self._added.items() if token.special}
        inside = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in self._specials)
        self._inside_specials = re.compile("|".join(inside))
        """The places in a text after the first character of a special token's name."""
        plain = partial(tokenizer.encode, add_special_tokens=False)
        self._marks = "aa" not in tokenizer.decode(plain("a") * 2)
        """Whether a text that begins a sequence gets a mark."""
        self._marks_sections = any(plain(f"{token}a")[1:] == plain("a") for token in self._specials[:1])
        """Whether a text after a token such as EOS gets one too."""

    def encode_prompt(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], bool, str]:
        """The prompt's ids, whether it ends inside an open thought, and its text. Raises UserError.

        `tools` are the schemas that a chat template declares.
        """
        if self.tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
            ids = self._bos() + self.encode_text(text, after=())
        else:
            text, ids = self._encode_rendered(messages, tools)
        return ids, opens_thought(text), text

    def keeps(self, messages: Sequence[Mapping[str, str]]) -> bool:
        """Whether the prompt has the whole text of every message; one message is always kept."""
        if len(messages) == 1:
            return True
        text = self.encode_prompt(messages)[2]
        return all(message["content"].strip() in text for message in messages)

    def _encode_rendered(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[int]]:
        """The chat template's text and ids. Special tokens in a message's content become plain text."""
        contents = [message["content"] for message in messages]
        text = self.render(messages, tools)
        if not any(token in content for token in self._specials for content in contents):
            return text, self._encode(text, after=())
        marks = [f"\ue000{position}\ue001" for position in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        remainder, ids = self.render(marked, tools), list[int]()
        for mark, content in zip(marks, contents, strict=True):
            before, _, remainder = remainder.partition(mark)
            ids += self._encode(before, after=ids)
            ids += self.encode_text(content, after=ids)
        return text, ids + self._encode(remainder, after=ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The chat template's text. Raises UserError if the template fails."""
        conversation, apply = [dict(message) for message in messages], self.tokenizer.apply_chat_template
        options = self.template_kwargs | {"tools": [dict(tool) for tool in tools] or None}
        try:
            return str(apply(conversation, tokenize=False, add_generation_prompt=True, **options))
        except Exception as error:  # a template is a program of its own
            raise UserError(
                f"the chat template in {self.tokenizer.name_or_path} does not work: {type(error).__name__}: "
                f"{one_line(str(error))}; correct it, or remove it to give prompts as plain text"
            ) from error

    def _bos(self) -> list[int]:
        """The BOS id where this tokenizer puts one before a text, else an empty list."""
        ids = self.tokenizer.encode("", add_special_tokens=True)
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and ids[:1] == [bos] else []

    def encode_text(self, text: str, after: Sequence[int] | None = None) -> list[int]:
        """Ids of text that continues a sequence; the names of special tokens in it are plain text.

        They are those of the text in its place: after the ids `after` (none: the text begins the sequence),
        by default after any plain text. Lone surrogates, which a server's JSON may contain and no tokenizer
        accepts, become question marks.
        """
        text = text.encode("utf-8", "replace").decode()
        ids = self._encode(text, after, split_special_tokens=True)
        if self._special_ids.isdisjoint(ids):
            return ids
        ids = []  # Unigram's vocabulary has the names of special tokens
        for part in self._inside_specials.split(text):
            ids += self._encode(part, ids or after, split_special_tokens=True)
        return ids

    def encode_marked(self, text: str, after: Sequence[int] | None = None) -> list[int]:
        """Ids of text in which the name of a special token is the token, as models write and read it."""
        return self._encode(text.encode("utf-8", "replace").decode(), after)

    def _encode(self, text: str, after: Sequence[int] | None, **options: bool) -> list[int]:
        """Ids of text after the ids `after`: encoded after a neutral text, of which the ids are cut off."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False, **options)
        begins = after is not None and (not after or (self._marks_sections and after[-1] in self._added))
        for context in () if begins or not self._marks else _CONTEXTS:
            before, ids = encode(context), encode(context + text)
            if self.tokenizer.unk_token_id not in before and ids[: len(before)] == before:
                return ids[len(before) :]
        return encode(text)

    def spelled(self, ids: Sequence[int]) -> str:
        """The text of `ids` for a server, which puts BOS before it: special tokens by name, no first BOS."""
        bos = self.tokenizer.bos_token_id
        without_bos = list(ids[1:] if bos is not None and ids[:1] == [bos] else ids)
        return str(self.tokenizer.decode(without_bos, clean_up_tokenization_spaces=False))

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of `ids`, with the names of special tokens or without; spaces are kept as they are."""
        tokenizer, ids = self.tokenizer, list(ids)
        return str(tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


class TextCodec(Codec):
    """A codec without a tokenizer, for text that a server reads: a token is up to three bytes of UTF-8.

    Prompts are plain text. Nothing is lost, and lengths are about those of a tokenizer, rather longer.
    """

    _FIRST = (0, 1 << 8, (1 << 8) + (1 << 16))  # the first id of one, two and three bytes

    def __init__(self) -> None:
        self.eos_ids = frozenset()

    def encode_prompt(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], bool, str]:
        text = "\n".join(message["content"] for message in messages)
        return self.encode_text(text), opens_thought(text), text

    def encode_text(self, text: str, after: Sequence[int] | None = None) -> list[int]:
        data = text.encode("utf-8", "replace")
        pieces = [data[start : start + 3] for start in range(0, len(data), 3)]
        return [self._FIRST[len(piece) - 1] + int.from_bytes(piece) for piece in pieces]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        pieces = []
        for token in ids:
            size = sum(token >= first for first in self._FIRST)
            pieces.append((token - self._FIRST[size - 1]).to_bytes(size))
        return b"".join(pieces).decode("utf-8", "replace")

    def spelled(self, ids: Sequence[int]) -> str:
        return self.decode(ids)
