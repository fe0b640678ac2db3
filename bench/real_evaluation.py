"""A real model as it comes, on real questions, beside all baselines: docs/results.md.

    python bench/real_evaluation.py --data DIRECTORY [--budget 400] [--model DIRECTORY]

The questions are test questions of 2WikiMultihopQA, HotpotQA, Natural Questions and SQuAD; the corpus is the
passages that come with them. `--data` is the folder that has the published files, as tests/shared_data.py
names them. The model is that of bench/speed. Answers are logged in the workspace under `--cache`: the same
command continues where it was stopped, and a larger budget generates only the questions that are new.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)

from bench.speed.harness import Options, provenance  # noqa: E402
from bench.speed.material import find_model  # noqa: E402

RESULT = ROOT / "bench" / "results" / "real_evaluation.json"
TWO_WIKI, HOTPOT, NQ = "2wiki/dev-1000.json", "hotpotqa/dev-500.json", "nq/nq-dev-with-paragraphs.jsonl"
SQUAD_FILES = ("squad/super-bowl-50.v1.1.json", "squad/university-of-notre-dame.v1.1.json")
TWO_WIKI_CORPUS, HOTPOT_CORPUS = "2wiki/2wikimultihopqa_corpus.json", "hotpotqa/dev-500-corpus.json"
SETTINGS = {
    "rollout.max_turns": 2, "rollout.max_turn_tokens": 96, "rollout.max_obs_length": 400, "search.topk": 3,
    "data.max_response_length": 1400, "data.max_prompt_length": 1600, "model.dtype": "bfloat16",
    "model.device": "cpu", "rollout.max_num_seqs": 64,
}  # fmt: skip
"""Two searches at most, and the limits of an episode; greedy."""


def srl(workspace: Path, *arguments: str) -> str:
    """What the command prints. Its messages pass."""
    program = str(Path(sys.executable).with_name("srl"))
    command = [program, "--workspace", str(workspace), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def prepare(data: Path, folder: Path, workspace: Path) -> None:
    """The sets, their corpus, its index and the manifest of the suite, in `folder`; made once."""
    if (folder / "suite.yaml").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    squad = ",".join(str(data / name) for name in SQUAD_FILES)
    srl(workspace, "data", "prepare", f"2wikimultihopqa:validation={data / TWO_WIKI}",
        f"hotpotqa:validation={data / HOTPOT}", f"squad:test={squad}", f"nq:test={data / NQ}",
        f"2wiki-corpus={data / TWO_WIKI_CORPUS}", f"hotpotqa-corpus={data / HOTPOT_CORPUS}",
        "--out", str(folder / "prepared"))  # fmt: skip
    srl(workspace, "index", "build", "--corpus", str(folder / "prepared" / "corpus.jsonl"), "--out",
        str(folder / "index"))  # fmt: skip
    write_manifest(folder)


def write_manifest(folder: Path) -> None:
    sets = [
        {"name": "2wikimultihopqa", "source": "2wikimultihopqa", "file": "prepared/validation.parquet"},
        {"name": "hotpotqa", "source": "hotpotqa", "file": "prepared/validation.parquet"},
        {"name": "nq", "source": "nq", "file": "prepared/test.parquet"},
        {"name": "squad", "source": "squad", "file": "prepared/test.parquet"},
    ]
    (folder / "suite.yaml").write_text(json.dumps({"format": 1, "name": "real", "sets": sets}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=400)
    parser.add_argument("--model", default=os.environ.get("SRL_BENCH_MODEL", ""))
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "bench-evaluation")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    cache, began = given.cache.absolute(), time.perf_counter()
    cache.mkdir(parents=True, exist_ok=True)
    model, origin = find_model(cache, Options(cache=str(cache), model=given.model))
    folder, workspace = cache / "real", cache / "workspace"
    prepare(given.data.absolute(), folder, workspace)
    sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    out = srl(workspace, "eval", "suite", str(model), "--manifest", str(folder / "suite.yaml"), "--index",
              str(folder / "index"), "--budget", str(given.budget), "--baseline", "all", "--json",
              *sets)  # fmt: skip
    report = json.loads(out)
    command = f"python bench/real_evaluation.py --budget {given.budget}"
    source = provenance([command], {"model_origin": origin, "data_origin": "see docs/results.md"})
    found = {
        name: row["sets"] for name, row in report.items() if isinstance(row, dict) and "sets" in row
    }  # fmt: skip
    minutes = round((time.perf_counter() - began) / 60, 1)
    result = {"provenance": source, "budget": given.budget, "minutes": minutes, "settings": found}
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result)[:2000])
    return 0


if __name__ == "__main__":
    sys.exit(main())
