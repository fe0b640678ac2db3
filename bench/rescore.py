"""How long `srl eval rescore` takes: stored trajectories scored by rule.

    python bench/rescore.py --trajectories 100000

Makes the log of an evaluation with episodes of two searches and about 1,200 tokens, whose texts repeat every
1,000 questions, then runs the command in a process of its own. Writes bench/results/rescore.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from srl.config import load_config, save_config
from srl.store import LogWriter, Record, RunInfo
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

NAME = "20260101T000000Z-bench-eval-s0-00ff"
RESULT = Path(__file__).parent / "results" / "rescore.json"
_PART = 1000
_WORDS = [f"word{number}" for number in range(5000)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--rewards", nargs="+", default=["f1", "format"])
    parser.add_argument("--keep", action="store_true", help="Leave the result file as it is.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "runs", NAME)
        print("making the log …", file=sys.stderr)
        made(run, options.trajectories)
        log_bytes = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        found = [measured(Path(folder), run, reward) for reward in options.rewards]
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "trajectories": options.trajectories, "log_bytes": log_bytes, "rewards": found,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if not options.keep:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def made(run: Path, trajectories: int) -> None:
    """A run with the finished log of an evaluation."""
    run.mkdir(parents=True)
    save_config(run, load_config().config)
    with LogWriter(run / "log", RunInfo(run.name)) as log:
        for start in range(0, trajectories, _PART):
            episodes = [episode(number) for number in range(start, min(start + _PART, trajectories))]
            records = [
                Record(item, Score(0.0, {"em": float(item.answer in item.question.golden_answers)}))
                for item in episodes
            ]
            log.write(0, "eval", records, {})


def episode(number: int) -> Trajectory:
    """Two searches of three passages, and an answer that is right for every third question."""
    rng = random.Random(number % _PART)
    gold = rng.choice(_WORDS)
    prompt = ({"role": "user", "content": f"Answer the question: what is {number} ?"},)
    source = f"source{number % 7}"
    question = Question(f"q{number}", f"what is {number} ?", (gold,), source, "test", prompt)
    found = Trajectory(question, [Segment("prompt", ids(rng, 150), "…", 0)], step=0, phase="eval")
    for turn in range(2):
        passages = [Passage(str(rng.randrange(10**6)), words(rng, 100)) for _ in range(3)]
        found.searches.append(Search(f"query {turn}", tuple(Hit(item, 1.0) for item in passages), turn=turn))
        found.segments += [
            policy(rng, f"<think> {words(rng, 20)} </think>\n<search> query {turn} </search>", turn),
            Segment("observation", ids(rng, 450), "\n\n".join(item.contents for item in passages), turn),
        ]
    answer = gold if number % 3 == 0 else rng.choice(_WORDS)
    found.segments.append(policy(rng, f"<think> so </think>\n<answer> {answer} </answer>", 2))
    found.answer, found.end, found.valid_actions, found.valid_searches = answer, "answered", 3, 2
    return found


def policy(rng: random.Random, text: str, turn: int) -> Segment:
    return Segment("policy", ids(rng, 60), text, turn, tuple(-rng.random() for _ in range(60)))


def ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(150_000), k=count))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def measured(workspace: Path, run: Path, reward: str) -> dict[str, object]:
    """Seconds of the whole command, and what it says."""
    command = [
        str(Path(sys.executable).with_name("srl")),
        "--workspace",
        str(workspace),
        "eval",
        "rescore",
        run.name,
    ]
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(
        [*command, "--reward", reward, "--json"], check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(said.stdout)
    return {
        "reward": reward, "scored": answer["scored"], "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "mean": answer["rows"][0]["measures"][reward]["mean"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
