"""The preset for one GPU trains a user's own model: here small ones on the CPU, with byte-level BPE."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.store_builder import log_records, log_rows
from tests.tiny_models import byte_level_tokenizer, new_model
from tests.training import Said
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from srl.config import Config, load_config
from srl.data.corpus import write_corpus
from srl.models.weights import model_digest, save_model
from srl.protocol import TEMPLATES
from srl.rollout.codec import Codec
from srl.train.run import start
from srl.trajectory import Passage
from srl.workspace import Workspace

ANSWER = "Ossa Trell"
ASKED = ("who built the lighthouse of Velmar?", "who painted the gate of Quillon?")
SAID = ("<search>who built the lighthouse of Velmar</search>", f"<answer>{ANSWER}</answer>")
PAGES = [
    Passage("velmar", f'"Velmar"\nThe lighthouse of Velmar was built by {ANSWER}.'),
    Passage("quillon", f'"Quillon"\nThe gate of Quillon was painted by {ANSWER}.'),
]
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SMALL = {
    "model.lora_rank": 4, "data.train_batch_size": 2, "data.max_prompt_length": 560,
    "data.max_response_length": 160, "rollout.n": 8, "rollout.max_turns": 1, "rollout.max_turn_tokens": 40,
    "rollout.max_obs_length": 80, "rollout.max_num_seqs": 16, "rollout.deterministic": True,
    "actor.ppo_mini_batch_size": 1, "actor.ppo_max_token_len": 4096, "actor.optim.lr": 2e-3,
    "actor.optim.lr_warmup_steps": 0, "trainer.total_training_steps": 2, "trainer.save_freq": 1,
    "trainer.test_freq": 0, "trainer.val_before_train": False,
}  # fmt: skip


@dataclass(frozen=True)
class Own:
    """A user's own model, questions and corpus."""

    model: Path
    questions: Path
    corpus: Path

    def config(self, **settings: object) -> Config:
        paths = {"model.path": self.model, "data.train_files": [self.questions], "data.corpus": self.corpus}
        return load_config("one-gpu", None, None, {**SMALL, **paths, **settings}).config


def tokenizer(lacks: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template; without it, or without EOS and pad token too."""
    made = copy.deepcopy(byte_level_tokenizer())
    if lacks == "everything":
        made = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer)
    made.chat_template = None if lacks else CHAT
    return made


@cache
def taught(steps: int = 110) -> dict[str, torch.Tensor]:
    """Weights of a Llama that has learnt to search or to answer, either as likely, whichever it is asked."""
    model = sized("llama")
    forms = [Codec(tokenizer()), Codec(tokenizer("chat template"))]
    asked = [TEMPLATES["search-r1"].messages(text) for text in ASKED]
    prompts = [codec.encode_prompt(messages)[0] for codec in forms for messages in asked]
    texts = [forms[0].encode_text(text) for text in SAID]
    longest = max(map(len, texts))
    targets = torch.tensor([[*ids, *[-100] * (longest - len(ids))] for ids in texts])  # (2, longest)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    for step in range(steps):
        prompt = torch.tensor(prompts[step % 4]).expand(2, -1)
        rows = torch.cat([prompt, targets.clamp_min(0)], dim=1)
        hidden = model.model(input_ids=rows).last_hidden_state[:, prompt.shape[1] - 1 : -1]
        torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.state_dict()


def sized(kind: str) -> PreTrainedModel:
    return new_model(kind, vocab_size=400, layers=2, width=32, heads=4, kv_heads=2, ffn=64, max_length=768)


def bring(folder: Path, kind: str, lacks: str = "") -> Own:
    """A model that was taught, its tokenizer, two questions and two pages, in `folder`."""
    model, words = sized(kind), tokenizer(lacks)
    model.load_state_dict(taught(), strict=False)  # a Qwen2 is a Llama with biases, which are 0
    folder.mkdir()
    save_model(model, words, folder / "model", stop_strings=())
    asked = [{"id": f"q{n}", "question": text, "golden_answers": [ANSWER]} for n, text in enumerate(ASKED)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    write_corpus(folder / "corpus.jsonl", PAGES)
    return Own(folder / "model", folder / "train.jsonl", folder / "corpus.jsonl")


@pytest.fixture
def own(tmp_path: Path) -> Own:
    return bring(tmp_path / "qwen2", "qwen2")


def train(config: Config, root: Path, terminal: Said | None = None) -> Path:
    """A run from start to end in the workspace `root`; its directory."""
    summary = start(
        config, preset="one-gpu", algo="grpo", workspace=Workspace(root), terminal=terminal or Said()
    )
    assert summary.steps == config.trainer.total_training_steps
    return Workspace(root).runs / summary.run_id


def adapter(run: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / f"step-{step:06d}" / "trainer" / "actor.pt", weights_only=True)


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some.keys() | others.keys())


def test_adapter_learns_and_a_checkpoint_is_the_merged_model(own, tmp_path):
    """In bfloat16: the preset as it is, but small."""
    before = model_digest(own.model)
    run = train(own.config(), tmp_path)
    first, second = adapter(run, 1), adapter(run, 2)
    assert all("lora" in name and value.dtype == torch.bfloat16 for name, value in first.items())
    assert not same(first, second)
    assert model_digest(own.model) == before
    checkpoint = run / "checkpoints" / "step-000002"
    merged = AutoModelForCausalLM.from_pretrained(checkpoint)
    start = AutoModelForCausalLM.from_pretrained(own.model)
    assert not any("lora" in name for name in merged.state_dict())
    name = "model.layers.0.mlp.up_proj"
    down, up = (second[f"{name}.lora_{part}.default.weight"].float() for part in "AB")
    scale = 32 / SMALL["model.lora_rank"]
    expected = start.state_dict()[f"{name}.weight"].bfloat16().float() + scale * up @ down
    weight = merged.state_dict()[f"{name}.weight"].float()
    torch.testing.assert_close(weight, expected, rtol=2**-7, atol=1e-3)  # bfloat16 holds eight bits
    assert merged.generation_config.stop_strings == ["</search>", "</answer>"]
    assert (checkpoint / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("kind", "lacks"), [("llama", "chat template"), ("qwen2", "everything")])
def test_model_with_less_trains_too(tmp_path, kind, lacks):
    """In float32 trainer and sampler agree; without EOS a turn ends at a stop string or its cap."""
    said = Said()
    config = bring(tmp_path / "own", kind, lacks).config(**{"model.dtype": "float32"})
    run = train(config, tmp_path / "workspace", said)
    for (metrics,) in log_rows(run, "SELECT metrics FROM raw.steps WHERE phase = 'train'"):
        assert metrics["rollout/logprob_diff/max"] < 1e-3
        assert metrics["actor/grad_norm"] > 0
    assert not same(adapter(run, 1), adapter(run, 2))
    assert "no chat template" in said.text
    assert ("no EOS token" in said.text) == (lacks == "everything")
    prompts = [record.trajectory.segments[0].text for record in log_records(run)]
    assert all(prompt.startswith("Answer the given question.") for prompt in prompts)


@pytest.mark.slow
def test_gpu_benchmark_prints_its_points_in_lines():
    command = [sys.executable, str(Path(__file__).parent.parent / "bench" / "gpu.py"), "--models", "0.5B"]
    if not torch.cuda.is_available():
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
    out = subprocess.run([*command, "--smoke"], capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in out.splitlines()]
    assert not [line for line in found if "failed" in line]
    assert {line["point"] for line in found if "point" in line} == {"parity", "decode", "delivery"}
    assert next(line for line in found if "same_tokens" in line)["same_tokens"] == 1
