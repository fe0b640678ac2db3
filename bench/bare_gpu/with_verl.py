"""verl 0.9.1 on one GPU: GRPO with FSDP2 and vLLM's rollout, all weights and LoRA, and a resumed run.

The figures: seconds of each part of a step, tokens a second, and the curves. SmolLM2-135M from a short cold
start, the questions and settings of bench/real.
"""

from __future__ import annotations

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


PHASES = (
    Phase("convert", 0.2, learn.convert),
    Phase("cold start", 0.3, with_vllm.cold_start),
    Phase("grpo", 0.5, grpo),
    Phase("lora", 0.75, lora),
    Phase("resume", 0.95, resume),
)
