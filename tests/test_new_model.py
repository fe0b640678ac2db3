"""`srl train init`: a small model of random weights for a tokenizer, as a directory like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_models import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from srl.cli import main
from srl.errors import UserError
from srl.model import count_parameters, load_model, load_tokenizer, model_digest
from srl.protocol import STOP_STRINGS
from srl.train.new_model import Sizes, make_model

SMALL = Sizes(layers=2, width=32, heads=4, ffn=64, max_length=256)
FLAGS = ["--layers", "2", "--width", "32", "--max-length", "256"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The directory of a byte-level tokenizer."""
    byte_level_tokenizer().save_pretrained(tmp_path / "my-tokenizer")
    return tmp_path / "my-tokenizer"


def init(words: Path, out: Path, *flags: str) -> int:
    return main(["train", "init", "--tokenizer", str(words), "--out", str(out), *FLAGS, *flags])


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_model_is_a_directory_with_its_tokenizer(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    assert init(words, tmp_path / "made", "--kind", kind) == 0
    model, (tokenizer, _) = load_model(tmp_path / "made"), load_tokenizer(tmp_path / "made")
    said = f"{tmp_path / 'made'}  {count_parameters(model):,} parameters, {len(tokenizer)} tokens\n"
    assert capsys.readouterr().out == said
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.hidden_size) == (
        kind,
        2,
        32,
    )
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (len(tokenizer), 256)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.stop_strings == list(STOP_STRINGS)
    text = "<search> who built it? </search>.\n"
    assert tokenizer.encode(text) == byte_level_tokenizer().encode(text)


def test_weights_follow_from_the_seed(words: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model(words, tmp_path / name, sizes=SMALL, seed=seed)
    first, same, other = (model_digest(tmp_path / name) for name in "abc")
    assert first == same != other


def test_every_id_has_a_row_where_ids_have_gaps(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"<eos>": 0, "word": 7}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>").save_pretrained(tmp_path / "gaps")
    assert make_model(tmp_path / "gaps", tmp_path / "made", sizes=SMALL).vocabulary == 8


def test_directory_that_exists_is_left_as_it_is(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes.txt").write_text("mine")
    assert init(words, tmp_path / "made") == 2
    assert capsys.readouterr().err.startswith(f"srl: {tmp_path / 'made'} exists already")
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("sizes", "heads"), [(Sizes(width=100, heads=3), "6"), (Sizes(width=36, heads=4), "8")]
)
def test_width_that_heads_cannot_share_is_refused(
    words: Path, tmp_path: Path, sizes: Sizes, heads: str
) -> None:
    with pytest.raises(UserError, match=f"multiple of {heads}"):
        make_model(words, tmp_path / "made", sizes=sizes)
    assert [path.name for path in tmp_path.iterdir()] == ["my-tokenizer"]


def test_missing_tokenizer_is_said_in_one_line_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path / "nowhere", tmp_path / "made") == 2
    assert capsys.readouterr().err == f"srl: no tokenizer directory {tmp_path / 'nowhere'}\n"
    assert list(tmp_path.iterdir()) == []


def test_other_kind_of_model_is_refused_with_those_there_are(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(words, tmp_path / "made", "--kind", "gpt2") == 2
    error = capsys.readouterr().err
    assert "qwen2" in error
    assert "llama" in error


def test_example_of_the_help_works(
    words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(words.parent)
    assert main(["train", "init", "--help"]) == 0
    example = capsys.readouterr().out.partition("Example:")[2].strip().splitlines()[0].split()
    assert example[:3] == ["srl", "train", "init"]
    assert main(example[1:]) == 0
    assert (words.parent / "my-model" / "config.json").is_file()
