"""Sections about what acts: the model, its questions, the search, the episodes and their reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from srl.config.base import (
    Count,
    File,
    Files,
    Listed,
    Natural,
    PluginSection,
    Positive,
    Section,
    Share,
    Texts,
)


class Model(Section):
    """The policy: which weights, in which precision, where."""

    path: File | None = None
    """Hugging Face directory of the policy that training starts from. null: the small base
    model that comes with the tiny world."""
    tokenizer: File | None = None
    """Directory of the tokenizer; null: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. auto: bfloat16 on a GPU that has it, else float32."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora_rank: Natural = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Count = 32
    """Scale of the LoRA adapters (alpha / rank)."""
    lora_target_modules: str | Annotated[tuple[str, ...], Listed] = "all-linear"
    """Modules that get an adapter: all-linear, or a list of module names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's files. Only for models whose authors you trust."""
    attn_implementation: str = "sdpa"
    """Attention of transformers: sdpa, eager, flash_attention_2 …"""


class Data(Section):
    """Questions and how much of them is read."""

    train_files: Files | None = None
    """Training questions: one file or several, Parquet in verl's schema or JSON lines. null: those of the
    tiny world."""
    val_files: Files | None = None
    """Questions for validation during training; never the test questions."""
    test_files: Files | None = None
    """Questions that only the last evaluation sees."""
    corpus: File | None = None
    """The passages to search, JSON lines with `id` and `contents`; the index is built from it."""
    template: File | None = None
    """Prompt around a question: search-r1, r1, tiny, tiny-r1, or a text file with `{question}`. null: the
    prompts as the files have them."""
    train_batch_size: Count = 128
    """Questions of a training step; each is sampled rollout.n times."""
    max_prompt_length: Count = 2048
    """Tokens of a rendered prompt; a longer one is an error, or is left out with filter_overlong_prompts."""
    max_response_length: Count = 4096
    """Tokens of an episode after its prompt: everything the policy writes and everything it reads."""
    filter_overlong_prompts: bool = False
    """Leave questions out whose prompt is longer than max_prompt_length, and say how many."""
    shuffle: bool = True
    """Draw the questions of each epoch in a new order (that depends on trainer.seed only)."""


class Engine(Section):
    """A search engine that the policy asks by name; one of url, index and retriever says what it is."""

    url: Texts | None = None
    """URL of a search server's `/retrieve`, or a list of them for one index."""
    index: File | None = None
    """Index directory to search in this process."""
    retriever: str | None = None
    """A live retriever plugin, such as web, which searches something outside and has no index."""
    options: dict[str, Any] = Field(default={})
    """Options of the live retriever, or those of the index's that belong to the machine. No keys and no
    passwords: they come from the environment."""
    description: str = Field(default="", pattern=r"^[^<>{}\n]*$")
    """What the prompt says of it, such as: live results of a web search."""
    topk: Count | None = None
    """Passages that a search by this engine returns. null: search.topk."""


class Search(Section):
    """What answers a search, and what happens when it does not answer."""

    url: Texts | None = None
    """URL of a search server's `/retrieve`, or a list of them for one index. null: search in this process."""
    index: File | None = None
    """Index directory to search in this process. null: the index of data.corpus, built when missing."""
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{12,32}$")
    """The digest of the index that must answer, or its first 12 digits and more: another one ends the run
    before it starts. null: any."""
    engines: dict[str, Engine] = Field(default={})
    """Further search engines by name (a-z, 0-9, - and _): `<search engine="NAME">` asks one, `<search>` the
    default one that the keys above describe. The prompt lists them where it is made from a template."""
    cassette: File | None = Field(default=None, pattern=r"^(record|replay) +\S.*$")
    """`record FILE` writes every search and what came of it to a tape; `replay FILE` answers from the tape,
    with no server and no index. null: neither."""
    topk: Count = 3
    """Passages that a search returns."""
    timeout_s: Positive = 30.0
    """Seconds until one request counts as failed."""
    retries: Natural = 3
    """Further attempts after a failed request."""
    max_query_chars: Count = 1000
    """Characters of a query; a longer one is refused, and the policy is told so."""
    max_failed: Share = 0.05
    """Share of a step's episodes that may be lost to search faults before the run stops."""

    @property
    def tape(self) -> tuple[str, str] | None:
        """`record` or `replay` with the file, where there is a cassette."""
        if self.cassette is None:
            return None
        mode, _, file = self.cassette.partition(" ")
        return mode, file.strip()

    @property
    def replays(self) -> bool:
        """Whether a tape answers, so that there need be nothing to search."""
        return self.tape is not None and self.tape[0] == "replay"


class Retriever(PluginSection):
    """How an index is built and searched. Options of a retriever lie under its name."""

    name: str = "bm25"
    """The retriever plugin; `srl plugins list` shows those installed."""


class Rollout(Section):
    """How episodes are sampled."""

    n: Count = 1
    """Episodes for each question of a training step: the size of a group."""
    temperature: Positive = 1.0
    """Sampling temperature in training; log-probs are computed at the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in training. Below 1 the sampled distribution is not the trained one, which warns."""
    max_turns: Natural = 4
    """Turns that may search; one more generation may only answer (Search-R1's counting)."""
    max_turn_tokens: Count = 500
    """Tokens that the policy may write in one turn."""
    max_obs_length: Count = 500
    """Tokens of one observation; a longer one loses whole passages, or the middle of one."""
    min_answer_tokens: Count = 16
    """Tokens that must remain for an answer; an observation that leaves fewer ends the episode before it."""
    search: bool = True
    """Whether the policy may search at all; false is the baseline that answers from its weights."""
    stop_at_answer: bool = True
    """End the episode at `</answer>`. false: the policy goes on until it samples its end-of-text token."""
    deterministic: bool = False
    """Fix the order in which episodes enter the batch, so that a run repeats bit for bit on one thread."""
    max_num_seqs: Count = 128
    """Episodes that generate at the same time; on verl, of each copy of the model."""
    logprobs: Literal["trainer", "sampler"] = "trainer"
    """What the loss takes the sampler to be. Old log-probs are always the trainer's own; sampler also weighs
    each token by truncated importance sampling, for a sampler whose probabilities differ."""
    sampler_is_cap: Positive = 2.0
    """Upper bound of the importance weight between trainer and sampler (only with logprobs: sampler)."""


class Reward(PluginSection):
    """What an episode earns: a weighted sum of reward plugins. Options of a reward lie under its name."""

    weights: dict[str, float] = Field(default={"em": 1.0}, min_length=1)
    """Reward plugins and their weights. A mapping in a file replaces the one below it;
    `--set reward.weights.format=0.2` adds to it."""
