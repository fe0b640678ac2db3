"""vLLM 0.24 on a GPU, which PyTorch 2.11 there allows: generation, delivery of weights, GRPO, the contract.

The figures: a decoding step beside the torch engine's, the distance of the sampler's log-probs from the
trainer's in bfloat16, seconds to sleep, to take other weights and to wake, and 20 steps of GRPO with each
engine from the same start. Then the contract suite of an engine on the GPU, as far as the time goes.
"""

from __future__ import annotations

from bench.bare_gpu import learn
from bench.bare_gpu.pieces import ROOT, Clock, Phase, Run

WHEELS = (
    *learn.WHEELS, "vllm", "apache-tvm-ffi==0.1.9", "astor==0.8.1", "blake3==1.0.11", "cachetools",
    "cbor2==6.2.1", "compressed-tensors==0.17.0", "depyf==0.20.0", "dill", "diskcache==5.6.3", "distro",
    "httpcore2", "httpx2", "jiter", "jsonschema", "jsonschema-specifications", "lark==1.2.2",
    "llguidance==1.7.0", "loguru==0.7.3", "msgspec", "openai", "openai-harmony==0.0.8",
    "outlines_core==0.2.14", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pyzmq", "referencing",
    "rpds-py", "setproctitle", "sniffio", "truststore", "xgrammar==0.2.1",
)  # fmt: skip
"""What vLLM's engine imports for such a model, beside what a machine with PyTorch has."""
TORCH, VLLM = "rollout.engine=torch", "rollout.engine=vllm"
CONTRACT = """
import sys, pytest, torch
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
sys.exit(pytest.main(["-q", "-m", "slow", "-k", "TestVllmEngine", "--timeout", "180", *sys.argv[1:]]))
"""
prepare = learn.prepare


def decode(run: Run, clock: Clock) -> None:
    learn.measured(run, clock, "decode", engines=("vllm", "graphs"))


def delivery(run: Run, clock: Clock) -> None:
    learn.measured(run, clock, "delivery", engines=("vllm",))


def cold_start(run: Run, clock: Clock) -> None:
    learn.taught(run, clock, 60)


def grpo(run: Run, clock: Clock) -> None:
    learn.reinforced(run, clock, "grpo-vllm", 20, VLLM)


def grpo_torch(run: Run, clock: Clock) -> None:
    learn.reinforced(run, clock, "grpo-torch", 20, TORCH)


def contract(run: Run, clock: Clock) -> None:
    """Each test starts vLLM anew; those that come last may not run."""
    lines = run.python(clock, "-c", CONTRACT, ROOT / "tests" / "test_vllm_engine.py", "-rA").splitlines()
    run.figure("contract", results=[line for line in lines if line.startswith(("PASSED", "FAILED", "ERROR"))],
               summary=lines[-1] if lines else "")  # fmt: skip


PHASES = (
    Phase("convert", 0.2, learn.convert),
    Phase("decode", 0.35, decode),
    Phase("delivery", 0.45, delivery),
    Phase("cold start", 0.6, cold_start),
    Phase("grpo", 0.75, grpo),
    Phase("grpo with the torch engine", 0.85, grpo_torch),
    Phase("contract", 0.98, contract),
)
