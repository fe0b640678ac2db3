"""The engine behind a server holds to the contract with a real one: `vllm serve`, on vLLM's build for CPUs.

`make test-vllm` runs it; elsewhere it is skipped.
"""

import asyncio
import collections
import os
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread

import pytest
from tests.engine_contract import MAX_MODEL_LEN, EngineContract, Subject
from tests.fake_openai import MODEL
from tests.live_server import free_port
from tests.test_vllm_engine import with_vllm
from tests.tiny_models import byte_level_tokenizer

from srl.models.weights import save_model
from srl.rollout.openai_engine import OpenAiEngine, OpenAiServer, find_model, returns_ids

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


class Server:
    """A command that serves a model, on a free port; started where it does not run."""

    process: subprocess.Popen[str] | None = None

    def __init__(self, *command: str) -> None:
        self.command = command
        self.port = 0

    def url(self) -> str:
        if self.process is None or self.process.poll() is not None:
            self._start()
        return f"http://127.0.0.1:{self.port}/v1"

    def _start(self) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [*self.command, "--port", str(self.port), "--dtype", "float32", "--enforce-eager"],
            env={**os.environ, **ENVIRONMENT}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "Application startup complete" in line:
                Thread(target=collections.deque, args=(self.process.stdout, 0), daemon=True).start()
                return
        raise AssertionError("".join(said[-40:]))

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served") / "model"
    save_model(TestVllmServer().model(), byte_level_tokenizer(), directory)
    made = Server(
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", "4", "--logprobs-mode", "processed_logprobs",
    )  # fmt: skip
    yield made
    made.stop()


@with_vllm
class TestVllmServer(EngineContract):
    sizes = SIZES
    weights_can_change = tells_tokens = False

    @pytest.fixture(autouse=True)
    def _served(self, server: Server) -> None:
        self.server = server

    def start(self, model, codec, folder):
        server = OpenAiServer(self.server.url(), MODEL, retries=0)
        assert asyncio.run(find_model(server, MAX_MODEL_LEN)) == MODEL
        assert asyncio.run(returns_ids(server, codec))
        engine = OpenAiEngine(codec, server, token_ids=True, max_model_len=MAX_MODEL_LEN)
        yield Subject(engine, model, codec, self.server.stop)
        engine.close()
