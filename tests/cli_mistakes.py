"""`srl` typed wrongly: what it said, how it ended, what it left; and a small place to go wrong in."""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tiny_models import new_model
from tests.training import PASSAGES, config, questions, tokenizer, turns

from srl.cli import main
from srl.config import to_yaml
from srl.data.corpus import write_corpus
from srl.data.demonstration_file import write_demonstrations
from srl.data.parquet import write_questions
from srl.index import build_index
from srl.models.weights import save_model


class Shell:
    """Types `srl …` in a directory of its own, and looks at what is there before and after."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def typed(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        code = main([str(argument) for argument in arguments])
        return code, *self.capsys.readouterr()

    def refused(self, *arguments: object, code: int = 2) -> str:
        """The one line on stderr; nothing is on stdout, and nothing is new or gone or changed."""
        before = self.left()
        found, out, err = self.typed(*arguments)
        assert (found, out) == (code, ""), f"{found}\n{out}\n{err}"
        assert err.startswith("srl: ")
        assert err.count("\n") == 1, err
        assert "internal error" not in err
        assert self.left() == before
        return err.removeprefix("srl: ").rstrip("\n")

    def left(self) -> dict[str, tuple[int, int]]:
        """Size and time of everything in the directory, hidden files too, but not Python's own cache."""
        return {
            path.relative_to(self.folder).as_posix(): (
                path.stat().st_size * path.is_file(),
                path.stat().st_mtime_ns,
            )
            for path in self.folder.rglob("*")
            if "__pycache__" not in path.parts and (path.is_file() or not any(path.iterdir()))
        }

    def hidden(self) -> list[str]:
        """What was written aside and not removed."""
        return [name for name in self.left() if "/." in f"/{name}"]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell in an empty directory, in which the workspace is."""
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, an index of six towns, questions, and `small.yaml`, a run on all that."""
    folder: Path = tmp_path_factory.mktemp("place")
    made = new_model(
        "qwen2", vocab_size=len(tokenizer()), layers=1, width=16, heads=2, ffn=16, max_length=256,
        eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    save_model(made, tokenizer(), folder / "model")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    build_index(folder / "corpus.jsonl", folder / "index")
    for split, count in {"train": 8, "val": 3, "test": 2}.items():
        write_questions(folder / f"{split}.parquet", questions(split, count))
    rng = random.Random(0)
    shown = [replace(each, metadata={"turns": turns(each, rng)}) for each in questions("train", 8)]
    write_demonstrations(folder / "shown.jsonl", shown)
    chosen = config(folder, sets=["data.corpus=null", f"search.index={folder / 'index'}"])
    (folder / "small.yaml").write_text(to_yaml(chosen), encoding="utf-8")
    return folder


def lines(path: Path, rows: Iterable[object]) -> Path:
    """JSON lines; a text is written as it is."""
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def put(folder: Path, name: str, content: object) -> Path:
    """The file `name` as the tables above have it; None: it is not there."""
    path = folder / name
    if content == "a directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, pa.Table):
        pq.write_table(content, path)
    elif content is not None:
        lines(path, content)
    return path


def train(place: Path, *arguments: object) -> tuple[object, ...]:
    return "-q", "train", "--config", place / "small.yaml", *arguments


def cut(file: Path) -> None:
    """The first half of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")
