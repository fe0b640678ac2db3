"""The tokenizer trained on a corpus: byte-level, repeatable, with our tags as plain text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from srl.data.tokenizer import SMALLEST, train_tokenizer
from srl.errors import UserError
from srl.protocol import TAGS

TAG_TEXTS = [text for tag in TAGS for text in (f"<{tag}>", f"</{tag}>")]
TEXTS = [
    "Osk is a town on the river Osk. " * 3,
    "<search> the river Osk </search> <answer> Osk </answer>",
] * 9


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerBase:
    """Saved, and loaded again."""
    out = tmp_path_factory.mktemp("tokenizers") / "osk"
    train_tokenizer(TEXTS, 400).save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("text", TAG_TEXTS)
def test_our_tags_are_several_tokens(tokenizer, text):
    assert len(tokenizer.encode(text)) > 1
    assert text not in tokenizer.get_vocab()


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, split_special_tokens=True)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_same_texts_train_the_same_tokenizer(tokenizer):
    assert train_tokenizer(TEXTS, 400).get_vocab() == tokenizer.get_vocab()


def test_a_vocabulary_too_small_for_all_bytes_is_refused():
    with pytest.raises(UserError):
        train_tokenizer(TEXTS, 100)
    assert len(train_tokenizer(TEXTS, SMALLEST)) == SMALLEST
