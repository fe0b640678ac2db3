"""Train a small base model that comes with the package, in place of a user's pretrained one.

    python bench/base.py [--world tiny-hard] [--out DIRECTORY]

It first learns to copy (a random word list, then the same list again), which teaches it to read and repeat
names. Then it learns from right episodes in always new worlds, so that it cannot memorise pages. The base of
`tiny-hard` has seen no question of two hops; some of its episodes have a useless search, before the right one
or after it, and a search brings one to four pages. Takes about half an hour on one core. Writes a Hugging
Face directory with `card.json`: the stages, and the loss on the policy's own tokens at the end of each. The
tokenizer with which bases call tools is written too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from srl.data.corpus import write_corpus
from srl.data.demonstrations import demonstrations, guess_turn, look_up
from srl.data.world import RELATIONS, make_world, name_words, questions
from srl.data.write_world import KINDS
from srl.files import write_json
from srl.index import build_index, open_index
from srl.models.load import count_parameters
from srl.models.weights import save_model
from srl.protocol import TAGS, template
from srl.rollout.codec import Codec
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.serve.in_process import LocalSearch
from srl.train.make_missing import BASE_MODELS, HERMES
from srl.train.sft import demonstrate, fine_tune_step
from srl.trajectory import Question, Segment, Trajectory
from srl.update.optimiser import Optimiser, Schedule, schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

OPTIONS = EpisodeOptions(max_turns=3, max_turn_tokens=48, max_obs_length=400, max_response_length=640)
TOP_K = {"tiny": (2,), "tiny-hard": (1, 2, 3, 4)}
"""Pages a search, world after world."""
OnStep = Callable[[str, int, dict[str, float]], None]


SPELLED = {
    "<search>": '<tool_call>\n{"name": "search", "arguments": {"query": "',
    "</search>": '"}}\n</tool_call>',
    "<information>": "<|im_end|>",
    "</information>": "<|tool_end|>",
}
"""What tokens are called where the base calls tools. After a search the base says `<information>`, so this is
the end of a turn."""
CHAT = """\
{%- if tools %}{{ '\\n' }}{% endif %}
{%- for message in messages %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{% set f = call.function %}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ {'assistant': '<|im_end|>', 'tool': '\\n<|tool_end|>'}.get(message.role, '') }}{% endfor %}"""
"""It adds no token that the base has never seen, not even a list of the tools: any before the question or a
result costs its small heads what they find by position."""


def world_tokenizer(spelled: Mapping[str, str] = {}, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """One token per word of the worlds and per tag, or what is `spelled` in its place; any other word is
    `<unk>`."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    said = [f"{item.sentence} {item.question} {item.phrase}" for item in RELATIONS.values()]
    said += [look_up(""), guess_turn(""), template("tiny").prompt, template("tiny").feedback]
    text = " ".join([*said, "Doc ( Title : ) No results found . … ? &"]).replace("?", " ? ")
    words = [word for word in dict.fromkeys(text.split()) if not word.startswith(("<", "{"))]
    words += [str(number) for number in range(1, 10)]
    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: position for position, word in enumerate([*specials, *words, *name_words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tags = [mark.format(tag) for tag in TAGS for mark in ("<{}>", "</{}>")]
    tokenizer.add_tokens([AddedToken(spelled.get(tag, tag), normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, unk_token="<unk>"
    )


def hermes_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer for calls of tools: the same ids, hermes calls for tags, and a chat template."""
    tokenizer = world_tokenizer(SPELLED, eos="<|im_end|>")
    tokenizer.chat_template = CHAT
    return tokenizer


def new_base(vocab_size: int, seed: int) -> PreTrainedModel:
    """A Qwen2 of 4 layers, width 128, 4 heads, feed-forward 256."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size, num_hidden_layers=4, hidden_size=128, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=256, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def copying(tokenizer: PreTrainedTokenizerFast, steps: int, rng: random.Random) -> Iterator[list[Trajectory]]:
    """Batches of 64 rows: 16 random name words, then the same 16 again."""
    ids = tokenizer.convert_tokens_to_ids(list(name_words()))
    assert isinstance(ids, list), "a list of words has a list of ids"
    question = Question("copy", "", ())
    for _ in range(steps):
        lists = [tuple(rng.choices(ids, k=16)) for _ in range(64)]
        yield [Trajectory(question, [Segment("policy", row + row, "", 0)]) for row in lists]


def clean_episodes(codec: Codec, steps: int, seed: int, kind: str = "tiny") -> Iterator[list[Trajectory]]:
    """Batches of 32 clean episodes, a new world every 10 batches."""
    for number in range(-(-steps // 10)):
        episodes = world_episodes(codec, seed=1000 * seed + number, count=320, kind=kind)
        for batch in range(min(10, steps - 10 * number)):
            yield episodes[32 * batch : 32 * (batch + 1)]


def world_episodes(codec: Codec, *, seed: int, count: int, kind: str) -> list[Trajectory]:
    """`count` clean episodes of the base world `seed`, against its own index."""
    top_k = TOP_K[kind][seed % len(TOP_K[kind])]
    known = KINDS[kind]
    world = make_world("base", seed, words=known.words)
    asked = questions(world, "base", seed, count, known.two_hop, known.phrased)
    asked = [replace(item, id=f"{seed}/{item.id}") for item in asked]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, world.passages())
        build_index(corpus, Path(folder) / "index", "bm25", {"stemmer": "none"})
        search = LocalSearch(open_index(Path(folder) / "index"), top_k)
        shown = demonstrations(asked, world, known.base, seed)
        return demonstrate(shown, Environment(codec, template("tiny"), OPTIONS, search))


@dataclass(frozen=True, slots=True)
class BaseStage:
    """A stage of the training; its data come from worlds that no other stage uses."""

    name: str
    steps: int
    lr: float
    decay: Schedule
    observation_weight: float
    data: Callable[[PreTrainedTokenizerFast, int], Iterator[list[Trajectory]]]


def stages(seed: int, kind: str = "tiny") -> tuple[BaseStage, ...]:
    """The stages. Above a learning rate of 2e-3 copying is learnt slowly; the last ones remove errors."""

    def episodes(worlds: int) -> Callable[[PreTrainedTokenizerFast, int], Iterator[list[Trajectory]]]:
        return lambda tokenizer, steps: clean_episodes(Codec(tokenizer), steps, worlds, kind)

    lists = partial(_lists, seed)
    return (
        BaseStage("copying", 150, 1.5e-3, "constant", 1.0, lists),
        BaseStage("episodes", 1300, 1.5e-3, "linear", 0.2, episodes(seed)),
        BaseStage("episodes of other worlds", 600, 7e-4, "linear", 0.2, episodes(seed + 7)),
        BaseStage("episodes of yet other worlds", 800, 1e-3, "linear", 0.2, episodes(seed + 21)),
    )


def _lists(seed: int, tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[list[Trajectory]]:
    return copying(tokenizer, steps, random.Random(seed))


def make_base(
    seed: int = 0, kind: str = "tiny", on_step: OnStep = lambda stage, step, metrics: None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Train the base from random weights; about half an hour on one core."""
    tokenizer = world_tokenizer()
    model = new_base(len(tokenizer), seed)
    for stage in stages(seed, kind):
        plan = schedule(stage.decay, 20, stage.steps)
        optimiser = Optimiser(model.parameters(), lr=stage.lr, betas=(0.9, 0.98), schedule=plan)
        for step, batch in enumerate(stage.data(tokenizer, stage.steps), start=1):
            weight = stage.observation_weight
            on_step(stage.name, step, fine_tune_step(model, optimiser, batch, observation_weight=weight))
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", choices=list(KINDS), default="tiny")
    parser.add_argument("--out", type=Path, help="default: the base model of the world in the package")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out = arguments.out or BASE_MODELS[arguments.world]
    torch.set_num_threads(1)
    hermes_tokenizer().save_pretrained(HERMES)
    began, stages = time.perf_counter(), {}

    def report(stage: str, step: int, metrics: dict[str, float]) -> None:
        stages[stage] = {"steps": step, "policy_loss": round(metrics["sft/policy_loss"], 5)}
        if step % 50 == 0:
            print(f"{stage} {step}  loss {metrics['sft/policy_loss']:.4f}", file=sys.stderr, flush=True)

    model, tokenizer = make_base(arguments.seed, arguments.world, report)
    save_model(model, tokenizer, out)
    card = {
        "format": 1,
        "made_by": f"python bench/base.py --world {arguments.world}",
        "seed": arguments.seed,
        "parameters": count_parameters(model),
        "vocabulary": len(tokenizer),
        "seconds": round(time.perf_counter() - began),
        "stages": stages,
    }
    write_json(out / "card.json", card)
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
