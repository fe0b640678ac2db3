"""Train a model to search your own documents: corpus, index, training, and the answers before and after.

    python examples/own_documents/train.py        # the made-up documents beside this file: two minutes
    python examples/own_documents/train.py --folder MINE --model Qwen2.5-0.5B --preset one-gpu --steps 200

FOLDER contains documents/*.txt (the first line is the title, each paragraph below it a passage) and
questions.jsonl (a line: {"id": "q1", "question": "…", "golden_answers": ["…"]}). A quarter of the questions
is for validation. Everything but the run is written to --out. The small model that comes with srl knows only
the words of these made-up documents: give a --model for your own.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--out", type=Path, default=Path("own-documents"))
    parser.add_argument("--model", help="a Hugging Face directory or name; else srl's own small model")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()

    given.out.mkdir(parents=True, exist_ok=True)
    write_lines(given.out / "corpus.jsonl", passages(given.folder / "documents"))
    questions = (given.folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    kept = len(questions) // 4
    for name, lines in {"val": questions[:kept], "train": questions[kept:]}.items():
        (given.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    index = given.out / "index"
    srl("index", "build", "--corpus", given.out / "corpus.jsonl", "--out", index, "--overwrite")
    settings = {
        "search.index": index,
        "data.train_files": given.out / "train.jsonl",
        "data.val_files": given.out / "val.jsonl",
        "trainer.test_freq": given.steps,
    }
    srl(
        *("train", "--algo", "grpo", "--preset", given.preset, "--steps", given.steps),
        *(["--model", given.model] if given.model else []),
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
    )
    srl("inspect", "curve", "--metric", "val/em")
    srl("inspect", "trajectories", "--phase", "val", "--limit", 4)


def passages(folder: Path) -> Iterator[dict[str, str]]:
    """A passage for each paragraph of each text file, under the file's title."""
    for path in sorted(folder.glob("*.txt")):
        title, _, text = path.read_text(encoding="utf-8").partition("\n")
        for number, paragraph in enumerate(filter(None, map(str.strip, text.split("\n\n")))):
            yield {"id": f"{path.stem}/{number}", "contents": f"{title.strip()}\n{paragraph}"}


def write_lines(path: Path, rows: Iterator[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def srl(*arguments: object) -> None:
    """Run the command `srl`, and stop where it fails."""
    words = list(map(str, arguments))
    print("$ srl", *words, flush=True)
    subprocess.run([Path(sys.executable).with_name("srl"), *words], check=True)


if __name__ == "__main__":
    main()
