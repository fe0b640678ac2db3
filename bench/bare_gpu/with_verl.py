"""verl 0.9.1 on one GPU: GRPO with FSDP2 and vLLM's rollout, all weights and LoRA, and a resumed run.

The figures: seconds of each part of a step, tokens a second, the curves, and the CPU seconds of our own code
for as many episodes (bench/verl_overhead.py) by the seconds of a step. SmolLM2-135M from a short cold start,
the questions and settings of bench/real.
"""

from __future__ import annotations

import json
from statistics import median

from bench.bare_gpu import learn, with_vllm
from bench.bare_gpu.pieces import Clock, Phase, Run

WHEELS = (
    *with_vllm.WHEELS, "verl", "antlr4-python3-runtime", "codetiming", "datasets", "hydra-core",
    "importlib_metadata", "jmespath", "model-hosting-container-standards==0.1.16", "multiprocess",
    "omegaconf", "orjson", "prometheus-fastapi-instrumentator==8.1.0", "pydantic-extra-types", "pylatexenc",
    "python-json-logger", "python-multipart", "pyvers", "ray", "tensordict", "torchdata", "TransferQueue",
    "watchfiles",
)  # fmt: skip
STEPS = 5
OVERHEAD = """
import json, pathlib, sys, tempfile
from bench.verl_overhead import measured
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps(measured(int(sys.argv[1]), pathlib.Path(folder) / "log")))
"""
OURS = ("episode", "reward", "hand_over", "write", "advantages")
prepare = learn.prepare


def grpo(run: Run, clock: Clock, name: str = "verl", *sets: str) -> None:
    often = "trainer.save_freq=2", "cluster.n_gpus_per_node=1"
    learn.reinforced(run, clock, name, STEPS, *often, *sets, more=("--backend", "verl"))


def lora(run: Run, clock: Clock) -> None:
    grpo(run, clock, "verl-lora", "model.lora_rank=16", "model.lora_alpha=32")


def resume(run: Run, clock: Clock) -> None:
    """Two more steps of the run with LoRA, or of the other where there is none."""
    name = "verl-lora" if (run.store / "workspaces" / "verl-lora" / "runs").is_dir() else "verl"
    steps = (2 if run.smoke else STEPS) + 2
    run.srl(clock, name, "train", "--resume", "--run", run.newest(name).name, "--steps", steps)
    learn.curves(run, name)


def ours(run: Run, clock: Clock) -> None:
    """The share of our own code, which is one process' here, in the median step."""
    episodes = 16 if run.smoke else 128
    seconds = json.loads(run.python(clock, "-c", OVERHEAD, episodes))
    query = "SELECT value FROM metrics WHERE name = 'timing_s/step' ORDER BY step"
    out = run.srl(clock, "verl", "inspect", "sql", query, "--run", run.newest("verl"), "--json")
    step = median(json.loads(line)["value"] for line in out.splitlines())
    own = sum(seconds[part] for part in OURS)
    run.figure("our own code", episodes=episodes, cpu_s=own, step_s=step, share=own / step)


PHASES = (
    Phase("convert", 0.2, learn.convert),
    Phase("cold start", 0.3, with_vllm.cold_start),
    Phase("grpo", 0.5, grpo),
    Phase("ours", 0.55, ours),
    Phase("lora", 0.75, lora),
    Phase("resume", 0.95, resume),
)
