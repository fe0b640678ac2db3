"""The sections of the configuration: what each key takes, its default, and its documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""What numpy, torch and vLLM all take."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
KlEstimator = Literal["k1", "k2", "k3"]
KlLoss = Literal["k1", "k2", "k3", "k3+"]
LossMode = Literal["vanilla", "gspo", "cispo"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]

TRAINING = "rl sft rft"
SAMPLING = "rl rft"
EVERY = f"{TRAINING} eval"
"""Kinds of runs (`KINDS` in unread.py), for `Key.read_by`."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3+": "low_var_kl+"}
LOSS_AGG = {"constant": "seq-mean-token-sum-norm"}
"""verl's names of our values, where they differ."""

Action = Literal["off", "note", "stop"]
WatchName = Literal[
    "entropy_low", "kl", "sampler_mismatch", "skipped_steps", "searches_low", "valid_actions", "repetition",
    "equal_groups", "val_em",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """What is true of a key besides its type, default and documentation; on a section, of all keys in it.

    What has no effect, the translation to verl, what verl refuses, `srl train import` and the documentation
    come from here.
    """

    read_by: str = ""
    """The kinds of runs that read it. Empty: those that read its section."""
    verl: str = ""
    """verl's name of it. With a dot in front it is below its section's name there, and `.` has our name."""
    names: Mapping[Any, Any] = field(default_factory=dict)
    """verl's names of its values, where they differ."""
    needs: str = ""
    """The key without which it has no effect: `a.b` is neither false, 0, null nor off, or `a.b=c|d` is (or
    lists) one of these. With a dot in front it is a key of the same section."""
    refused: str = ""
    """Why `--backend verl` takes the default only."""
    resumes: bool = False
    """Whether a resumed run may change it: memory, speed, servers, checkpoints, not what is learned."""


SAME = Key(verl=".")
"""verl has the key too, under the same name and with the same values."""


def one_or_many(value: object) -> object:
    """A single text becomes a tuple of one; a list becomes a tuple, which is immutable."""
    if isinstance(value, str | PurePath):
        return (str(value),)
    return list_to_tuple(value)


def list_to_tuple(value: object) -> object:
    """A list from YAML becomes a tuple."""
    return tuple(value) if isinstance(value, list) else value


def parsed_bounds(value: float | str) -> tuple[float | None, float]:
    """`(lower, upper)` of `LOWER_UPPER`, or `(None, upper)` of a number. Raises ValueError."""
    first, between, second = str(value).partition("_")
    lower, upper = (float(first), float(second)) if between else (None, float(first))
    if not (0 < (upper if lower is None else lower) <= upper < math.inf):
        raise ValueError(f"{value}: expected 0 < lower ≤ upper")
    return lower, upper


def checked_bounds(value: float | str) -> float | str:
    """`value`, if `parsed_bounds` reads it."""
    parsed_bounds(value)
    return value


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Marks a text that is or may be a path."""


@dataclass(frozen=True, slots=True)
class Takes:
    """Says in words what a value with a pattern may be."""

    words: str


File = Annotated[str, Field(min_length=1), OnDisk()]
Files = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1), OnDisk()]
Texts = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1)]
Listed = BeforeValidator(list_to_tuple)


class Section(BaseModel):
    """A group of keys: frozen, strict, without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class PluginSection(Section):
    """A section with a subsection of options for each plugin, named after the plugin."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    def options(self, plugin: str) -> dict[str, Any]:
        """The options given to `plugin`; empty if there are none."""
        return dict((self.model_extra or {}).get(plugin) or {})


class Model(Section):
    """The policy: its weights, precision and device."""

    path: Annotated[File | None, SAME] = None
    """The model that training starts from: a directory, or ORG/NAME[@REVISION] of the Hugging Face hub. null:
    the small base model of data.world."""
    tokenizer: Annotated[File | None, Key(verl=".tokenizer_path")] = None
    """Directory of the tokenizer, or its name on the hub. null: the model's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. auto: bfloat16 on a GPU that supports it, else float32. float16 is for
    evaluation."""
    device: Annotated[str, Takes("auto, cpu, cuda or cuda:NUMBER")] = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$"
    )
    """auto (a GPU if there is one), cpu, cuda or cuda:1."""
    gradient_checkpointing: Annotated[
        bool, Key(TRAINING, verl=".enable_gradient_checkpointing", resumes=True)
    ] = False
    """Recompute activations in the backward pass. Takes less memory and about a third more time."""
    lora_rank: Annotated[Natural, Key(TRAINING, verl=".")] = 0
    """Rank of the LoRA adapters. 0: train all weights."""
    lora_alpha: Annotated[Count, Key(TRAINING, verl=".")] = 32
    """Scale of the LoRA adapters (alpha / rank)."""
    lora_target_modules: Annotated[
        str | Annotated[tuple[str, ...], Listed], Key(TRAINING, verl=".target_modules")
    ] = "all-linear"
    """Modules with an adapter: all-linear, or a list of module names."""
    trust_remote_code: Annotated[bool, SAME] = False
    """Run Python code from the model's directory. Only for models whose authors you trust."""
    attn_implementation: Annotated[str, Key(verl=".override_config.attn_implementation")] = "auto"
    """Attention implementation of transformers: sdpa, eager, flash_attention_2 … auto: sdpa where the model
    has it, else eager."""
    chat_template_kwargs: Annotated[dict[str, Any], Key(verl="data.apply_chat_template_kwargs")] = {}
    """What the model's chat template is called with, such as `enable_thinking: false`. `strftime_now` is the
    day that it writes into prompts, by default the day on which the run started."""
    cast_lm_head_to_fp32: Annotated[bool, Key(refused="its workers load the model")] = False
    """Compute logits in float32 from weights of lower precision, in sampling and in the update, which brings
    their log-probs closer together."""


class Data(Section):
    """Questions, passages, and limits of length."""

    world: Literal["tiny", "tiny-hard"] = "tiny"
    """The made-up world of a run without train_files, and its small base model. In tiny-hard names are alike,
    and a second search has to be learned."""
    train_files: Annotated[Files | None, SAME] = None
    """Training questions: files, Parquet in verl's schema or JSON lines. null: those of world."""
    exclude_files: Files | None = None
    """Files of demonstrations or questions whose ids are left out of train_files, such as those of a cold
    start."""
    val_files: Annotated[Files | None, SAME] = None
    """Questions for validation during training. Must not be the test questions."""
    test_files: Files | None = None
    """Questions for the final evaluation only."""
    corpus: Annotated[File | None, Key(EVERY)] = None
    """Passages to search: JSON lines, Parquet, CSV or a folder. The index is built from them."""
    template: Annotated[File | None, Key(EVERY)] = None
    """Prompt template: search-r1, short, r1, closed-book, cot, rag, few-shot, tools, tools-tagged, tiny,
    tiny-r1, or a text file with `{question}`. Where it has `{information}`, the question is searched for
    first. null: the prompts in the files; with calls of tools the template tools."""
    train_batch_size: Annotated[Count, Key(SAMPLING, verl=".")] = 128
    """Questions per training step; each is sampled rollout.n times."""
    max_prompt_length: Annotated[Count, Key(EVERY, verl=".")] = 2048
    """Longest rendered prompt, in tokens; a longer one is an error, unless filter_overlong_prompts."""
    max_response_length: Annotated[Count, Key(EVERY, verl=".")] = 4096
    """Longest episode after its prompt, in tokens: all that the policy writes and reads."""
    filter_overlong_prompts: Annotated[bool, Key(EVERY, verl=".")] = False
    """Skip questions whose prompt is longer than max_prompt_length, and report how many."""
    mix: Annotated[dict[str, NonNegative], Key(SAMPLING)] = {}
    """Shares of a training batch by data source, such as {nq: 1, hotpotqa: 2}, or by hops if all names are
    numbers (unknown: those without hops); 0 leaves questions out. Empty: all alike."""

    @property
    def max_episode_tokens(self) -> int:
        """Tokens of the longest possible episode, prompt included."""
        return self.max_prompt_length + self.max_response_length


class NamedRetriever(Section):
    """A retriever that the policy calls by name. Give exactly one of url, index and retriever."""

    url: Texts | None = None
    """URL of a search server, or a list of URLs that serve the same index."""
    index: File | None = None
    """Index directory, searched in this process."""
    retriever: str | None = None
    """A live retriever plugin, such as web: it searches an external service and has no index."""
    options: dict[str, Any] = {}
    """Options of the live retriever, or machine-dependent options of the index; no keys or passwords."""
    description: Annotated[str, Takes("one line of text without <, >, { and }")] = Field(
        default="", pattern=r"^[^<>{}\n]*$"
    )
    """Description in the prompt, such as: live results of a web search."""
    topk: Count | None = None
    """Passages per search. null: search.topk."""


class Search(Section):
    """What answers searches, and how failures are handled."""

    url: Annotated[Texts | None, Key(resumes=True)] = None
    """URL of a search server, or a list of URLs that serve the same index. null: search in this process."""
    index: File | None = None
    """Index directory, searched in this process. null: the index of data.corpus, built if missing."""
    digest: Annotated[str | None, Takes("12 to 32 digits of 0-9 and a-f, or null")] = Field(
        default=None, pattern=r"^[0-9a-f]{12,32}$"
    )
    """Expected digest of the index; a run with another index is refused. null: any index."""
    retrievers: dict[str, NamedRetriever] = {}
    """Further retrievers by name (a-z, 0-9, - and _), called by `<search engine="NAME">`."""
    cassette: Annotated[File | None, Takes("'record FILE', 'replay FILE' or null")] = Field(
        default=None, pattern=r"^(record|replay) +\S.*$"
    )
    """`record FILE` writes every search and its outcome to FILE; `replay FILE` answers searches from it."""
    topk: Count = 3
    """Passages per search."""
    timeout_s: Annotated[Positive, Key(resumes=True)] = 30.0
    """Time-out of a request, and of a call of a plugin in rollout.tools, in seconds."""
    retries: Annotated[Natural, Key(resumes=True)] = 3
    """Retries after a failed request."""
    max_failed: Annotated[Share, Key(TRAINING, resumes=True)] = 0.05
    """Largest share of a step's, validation's or test's episodes that faults may cost; above it the run
    stops."""

    @property
    def cassette_use(self) -> tuple[str, str] | None:
        """`record` or `replay` with the file, where there is a cassette."""
        if self.cassette is None:
            return None
        mode, _, file = self.cassette.partition(" ")
        return mode, file.strip()

    @property
    def replays(self) -> bool:
        """Whether a cassette answers, so that no server and no index are needed."""
        return self.cassette_use is not None and self.cassette_use[0] == "replay"


class Retriever(PluginSection):
    """How an index is built and searched. The options of a retriever go under its name."""

    name: str = "bm25"
    """The retriever plugin: an installed one (`srl plugins list`), or `module:Class`."""


class Tools(PluginSection):
    """Options of the plugins in rollout.tools, each under its name."""


class OpenAi(Section):
    """A server with OpenAI's API (vLLM, SGLang, llama.cpp, OpenAI), for rollout.engine=openai."""

    url: str | None = None
    """Base URL, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model on the server. null: the only one that it lists."""
    api: Literal["completions", "chat"] = "completions"
    """completions continues a text, as in training; chat sends passages as messages of the user."""
    key_variable: Annotated[str | None, Takes("the name of an environment variable, or null")] = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"
    )
    """Environment variable with the API key. null: OPENAI_API_KEY, or SRL_API_KEY."""


class Rollout(Section):
    """How episodes are sampled."""

    n: Annotated[Count, Key(SAMPLING, verl=".")] = 1
    """Episodes per question in a training step: the group size."""
    temperature: Annotated[Positive, Key(SAMPLING, verl=".")] = 1.0
    """Sampling temperature in training. Log-probs are computed at the same temperature."""
    top_p: Annotated[float, Key(SAMPLING, verl=".")] = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in training. Below 1, the sampled distribution differs from the trained one."""
    max_turns: Natural = 4
    """Turns that may search. One more generation may only answer (as Search-R1 counts)."""
    max_turn_tokens: Count = 500
    """Tokens that the policy may write per turn."""
    max_obs_length: Count = 500
    """Longest observation, in tokens. A longer one loses whole passages, or the middle of one."""
    search: bool = True
    """Let the policy search. false: the baseline that answers from its weights."""
    protocol: Literal["tags", "native", "auto"] = "tags"
    """How policy and tools talk. tags: Search-R1's. native: the model's own chat template and calls; its
    final message is the answer. auto: native where the model can, and nothing asks for tags."""
    tools: Annotated[
        Texts, Takes("list of search, open, find and tool plugins"), Key(needs=".protocol=native|auto")
    ] = ("search",)
    """What the policy may call. open reads a document that a search has shown, find finds a text in it.
    Others are plugins (`srl plugins list`), or `module:Class`."""
    max_calls: Annotated[Count, Key(needs=".protocol=native|auto")] = 4
    """Calls that one turn may make; each further one is answered by an error."""
    call_format: Annotated[
        Literal["auto", "hermes", "qwen-xml", "llama-json", "pythonic", "gemma4", "harmony"],
        Key(needs=".protocol=native|auto"),
    ] = "auto"
    """How calls are written. auto: as the model's chat template renders them, but for gemma4 and harmony
    (gpt-oss), which no model was run with yet."""
    deterministic: Annotated[bool, Key(refused="episodes arrive in no fixed order")] = False
    """Make a run bitwise repeatable on one thread; on a GPU as far as PyTorch has deterministic kernels.
    Needs the torch engine."""
    engine: Annotated[
        Literal["auto", "torch", "vllm", "openai"], Key(refused="cluster.rollout names the engine")
    ] = "auto"
    """What generates. torch: the policy's own model. vllm: vLLM, in this process. openai: a server with
    OpenAI's API, for evaluation. auto: vllm on a GPU where it is installed and runs need not repeat, else
    torch."""
    openai: Annotated[OpenAi, Key(needs="rollout.engine=openai")] = OpenAi()
    max_num_seqs: Annotated[Count, Key(verl=".", resumes=True)] = 128
    """Concurrent episodes; on verl, for each replica of the model."""
    gpu_memory_utilization: Annotated[Share, Key(verl=".", needs=".engine=auto|vllm", resumes=True)] = 0.5
    """Share of a GPU's memory that vLLM or SGLang takes while it generates; training needs the rest."""

    @property
    def tool_plugins(self) -> tuple[str, ...]:
        """The plugins in `tools`, where the policy may call tools."""
        may_call = self.search and self.protocol != "tags"
        return tuple(name for name in self.tools if may_call and name not in ("search", "open", "find"))


class OverlongBuffer(Section):
    """Soft punishment of long episodes (DAPO, arXiv 2503.14476, eq. 13). Names as in verl."""

    enable: bool = False
    """Punish episodes within `len` tokens of data.max_response_length: the part `overlong` of the reward."""
    len: Count = 256
    """Tokens below data.max_response_length from which the punishment grows, in a straight line."""
    penalty_factor: Positive = 1.0
    """The punishment at data.max_response_length."""


class Reward(PluginSection):
    """The reward of an episode: a weighted sum of plugins. The options of a reward go under its name."""

    weights: dict[str, float] = Field(default={"em": 1.0}, min_length=1)
    """Reward plugins, by name or `module:Class`, and their weights. A mapping in a file replaces the one
    below it; `--set reward.weights.format=0.2` adds to it."""
    overlong_buffer: Annotated[OverlongBuffer, Key(needs="reward.overlong_buffer.enable")] = OverlongBuffer()


class KlCtrl(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Annotated[Literal["fixed", "adaptive"], SAME] = "fixed"
    """fixed, or adaptive towards target_kl (Ziegler et al. 2019)."""
    kl_coef: Annotated[NonNegative, SAME] = 0.001
    """Coefficient of the penalty; the initial one if adaptive."""
    target_kl: Annotated[Positive, Key(verl=".", needs=".type=adaptive")] = 0.1
    """Target KL of the adaptive coefficient."""
    horizon: Annotated[Count, Key(verl=".", needs=".type=adaptive")] = 10000
    """Horizon of the adaptive coefficient, in episodes."""


class RolloutCorrection(Section):
    """Correction for a sampler whose probabilities differ from the trainer's, as in verl."""

    rollout_is: Literal["auto", "token", "sequence", "off"] = "auto"
    """Weight the loss by truncated importance sampling, π_trainer / π_sampler: of each token, or the product
    of a sequence's. auto: token if the engine samples from a copy of the weights, else off."""
    rollout_is_threshold: Annotated[
        float | str,
        AfterValidator(checked_bounds),
        Takes("number > 0, or LOWER_UPPER such as 0.5_5"),
        Key(needs=".rollout_is"),
    ] = 2.0
    """Upper bound of the weights. `0.5_5`: weights outside 0.5 to 5 become 0 instead (IcePop)."""

    @property
    def bounds(self) -> tuple[float | None, float]:
        """Lower and upper bound of the weights; without a lower one they are truncated."""
        return parsed_bounds(self.rollout_is_threshold)


class FilterGroups(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose scores agree are replaced. Names as in verl."""

    enable: Annotated[bool, Key(refused="it refills without a bound")] = False
    """Replace groups whose scores agree, which teach nothing where the group is the baseline, by those of
    further questions, up to ten batches of them. If no group differs, the run stops."""
    metric: str = "reward"
    """What must differ: reward (with turn_rloo from any turn on), or one of its parts, such as em."""


class Algorithm(PluginSection):
    """How advantages are estimated. The options of an algorithm go under its name."""

    name: Annotated[str, Key(SAMPLING, verl=".adv_estimator")] = "ppo"
    """The algorithm plugin: an installed one (`srl plugins list`), or `module:Class`."""
    gamma: Annotated[Share, SAME] = 1.0
    """Discount per policy token."""
    lam: Annotated[Share, SAME] = 1.0
    """λ of generalised advantage estimation."""
    use_kl_in_reward: Annotated[bool, SAME] = False
    """Subtract kl_ctrl.kl_coef × KL(policy, reference) from each token's reward."""
    kl_penalty: Annotated[KlEstimator, Key(verl=".", names=KL, needs=".use_kl_in_reward")] = "k1"
    """KL estimator in the reward: k1 (difference of log-probs), k2 (half its square), k3 (low variance)."""
    kl_ctrl: Annotated[KlCtrl, Key(verl=".", needs="algorithm.use_kl_in_reward")] = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filter_groups: Annotated[FilterGroups, Key(needs="algorithm.filter_groups.enable")] = FilterGroups()


class Optim(Section):
    """AdamW and its learning rate."""

    lr: Annotated[Positive, SAME] = 1e-6
    """Learning rate after the warm-up."""
    betas: Annotated[Annotated[tuple[Decay, Decay], Listed], SAME] = (0.9, 0.999)
    """Decay of the first and second moment."""
    weight_decay: Annotated[NonNegative, SAME] = 0.01
    """Decoupled weight decay."""
    lr_warmup_steps: Annotated[Natural, SAME] = 0
    """Warm-up steps, in which the learning rate rises from 0. 0: see lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Annotated[Share, Key(verl=".", needs=".lr_warmup_steps=0")] = 0.0
    """Warm-up as a share of the steps in which the network learns; only if lr_warmup_steps is 0."""
    lr_scheduler_type: Annotated[Literal["constant", "linear", "cosine"], SAME] = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 at the last step."""


class CriticOptim(Optim):
    """AdamW and its learning rate."""

    lr: Annotated[Positive, SAME] = 1e-5
    """Learning rate after the warm-up."""


class SftOptim(CriticOptim):
    """AdamW and its learning rate."""


class PolicyLoss(Section):
    """Which loss the policy has. Names as in verl."""

    loss_mode: LossMode = "vanilla"
    """vanilla: PPO's clipped objective. gspo: a ratio for each sequence. cispo: clipped weights of tokens,
    which all keep their gradient."""


class Actor(Section):
    """The update of the policy."""

    ppo_mini_batch_size: Annotated[Count, SAME] = 64
    """Questions (× rollout.n episodes) per optimiser step. Must divide data.train_batch_size."""
    ppo_epochs: Annotated[Count, SAME] = 1
    """Passes over the episodes of a step, of the policy and of the critic."""
    ppo_max_token_len: Annotated[Count, Key(TRAINING, verl=".ppo_max_token_len_per_gpu", resumes=True)] = (
        16384
    )
    """Tokens per forward and backward pass: sets the memory needed, not the result."""
    clip_ratio: Annotated[NonNegative, SAME] = 0.2
    """Clip range ε of PPO."""
    clip_ratio_low: Annotated[NonNegative | None, SAME] = None
    """Clip range below 1. null: clip_ratio."""
    clip_ratio_high: Annotated[NonNegative | None, SAME] = None
    """Clip range above 1. null: clip_ratio."""
    clip_ratio_c: Annotated[float | None, Key(verl=".", needs=".policy_loss.loss_mode=vanilla")] = Field(
        default=3.0, gt=1
    )
    """Bound of the ratio for negative advantages (dual clip, Ye et al. 2020). null: none."""
    policy_loss: PolicyLoss = PolicyLoss()
    entropy_coeff: Annotated[NonNegative, SAME] = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: Annotated[bool, SAME] = False
    """Add kl_loss_coef × KL(policy, reference) to the loss."""
    kl_loss_coef: Annotated[NonNegative, Key(verl=".", needs=".use_kl_loss")] = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: Annotated[KlLoss, Key(verl=".", names=KL, needs=".use_kl_loss")] = "k3"
    """KL estimator in the loss. k3+: the value of k3 with the gradient of k2, which is that of the KL."""
    loss_agg_mode: Annotated[LossAggMode, Key(verl=".", names=LOSS_AGG)] = "token-mean"
    """How token losses are aggregated: their mean over the mini-batch, the mean over episodes of their mean
    or sum, or each episode's sum divided by data.max_response_length (constant, as in Dr. GRPO)."""
    grad_clip: Annotated[Positive, Key(verl=".optim.clip_grad")] = 1.0
    """Largest gradient norm."""
    mask_observations: Annotated[bool, Key(refused="it has one mask")] = True
    """Train only on policy tokens. false: also on observations, for the ablation."""
    optim: Annotated[Optim, SAME] = Optim()


class Critic(Section):
    """The update of the value function, for algorithms with a critic."""

    ppo_mini_batch_size: Annotated[Count, SAME] = 64
    """Questions (× rollout.n episodes) per optimiser step. Must divide data.train_batch_size."""
    ppo_max_token_len: Annotated[Count, Key(verl=".ppo_max_token_len_per_gpu", resumes=True)] = 16384
    """Tokens per forward and backward pass, as for the actor."""
    lora_rank: Annotated[Natural, Key(refused="its critic is a process of its own")] = 0
    """Rank of the critic's own LoRA adapter, on a frozen trunk, with the alpha and modules of the policy's.
    0: train a copy with all its weights, which takes far more memory."""
    cliprange_value: Annotated[Positive, SAME] = 0.5
    """Clip range of the value around the old one."""
    grad_clip: Annotated[Positive, Key(verl=".optim.clip_grad")] = 1.0
    """Largest gradient norm."""
    loss_agg_mode: Annotated[LossAggMode, Key(verl=".", names=LOSS_AGG)] = "token-mean"
    """How token losses are aggregated, as for the actor."""
    optim: Annotated[CriticOptim, SAME] = CriticOptim()


class Ref(Section):
    """The reference policy of the KL terms."""

    path: Annotated[File | None, Key(refused="its reference is the policy's directory")] = None
    """Reference policy: a directory or a name on the hub. null: the policy as RL starts."""


class Sft(Section):
    """Supervised fine-tuning: `--algo sft`, the rounds of `--algo rft`, and the cold start of a run without
    model.path."""

    train_files: File | None = None
    """Demonstrations, JSON lines `{"question", "golden_answers", "turns": ["…", …]}`. null: those of
    data.world."""
    filter: Annotated[str, Key("rft")] = Field(default="em = 1 and searches >= 1", min_length=1)
    """Which sampled episodes `--algo rft` keeps: a condition in SQL on the columns of
    `trajectories` (docs/store.md)."""
    steps: Natural = 80
    """Optimiser steps; with `--algo rft` of each round. 0: none."""
    batch_size: Count = 32
    """Episodes per step."""
    optim: SftOptim = SftOptim()


class Rft(Section):
    """Rounds of rejection-sampling fine-tuning, `--algo rft`: sample, filter, fine-tune, validate. A round is
    a training step."""

    questions: Count | None = None
    """Questions per round, in the order of their epoch. null: all training questions."""


class Trainer(Section):
    """Length of a run, checkpoints, validation and logging."""

    total_training_steps: Annotated[Natural, Key(SAMPLING, verl=".")] = 30
    """Steps of RL."""
    save_freq: Annotated[Natural, Key("rl sft", verl=".", resumes=True)] = 10
    """Steps between checkpoints; a run that is stopped saves one too. 0: only the last step."""
    test_freq: Annotated[Natural, Key("rl sft", verl=".")] = 10
    """Steps between validations. 0: none."""
    val_before_train: Annotated[bool, SAME] = True
    """Validate before the first step."""
    critic_warmup: Annotated[Natural, Key("rl", verl=".")] = 0
    """First steps, in which only the critic learns; the actor's learning-rate schedule starts after them."""
    seed: Annotated[Seed, Key(EVERY, verl="data.seed")] = 0
    """Seed of everything random: question order, sampling, new weights."""
    max_ckpt_to_keep: Annotated[Count | None, Key(resumes=True)] = None
    """Number of newest checkpoints to keep, besides the one with the best validation EM. null: all."""
    logger: Annotated[
        tuple[Literal["console", "tensorboard", "wandb"], ...], BeforeValidator(one_or_many)
    ] = ("console",)
    """Where metrics go besides the run's log: console, tensorboard, wandb (into $WANDB_PROJECT, or srl)."""
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Key(EVERY, resumes=True)] = None
    """CPU threads of torch. null: 1 with rollout.deterministic, else $OMP_NUM_THREADS, else one for every 8
    million parameters, up to the cores of the process."""
    plugin_path: Annotated[Files | None, Key(EVERY)] = None
    """Directories with the modules of `module:Class` plugins. null: the current directory."""


class Watches(Section):
    """Watches over training: each fires when a metric has been beyond its threshold for some steps."""

    action: Action = "note"
    """What is done when a watch fires. note: say it and log it. stop: end the run, and print the command that
    starts again from the last good checkpoint with a lower learning rate. off: nothing."""
    actions: dict[WatchName, Action] = Field(default={"skipped_steps": "stop"})
    """What single watches do in place of watch.action, unless that is off."""
    thresholds: dict[WatchName, float] = Field(default={})
    """Thresholds of watches by name, in place of their own."""

    def does(self, name: WatchName) -> Action:
        """What is done when the watch fires."""
        return "off" if self.action == "off" else self.actions.get(name, self.action)


class Eval(Section):
    """Validation during training, and evaluation after it."""

    val_questions: Count | None = 512
    """Questions per validation, of every data source in proportion. null: all."""
    test_questions: Count | None = None
    """Questions per test, drawn in the same way. null: all."""
    temperature: Annotated[NonNegative, Key(EVERY, verl=f"{ROLLOUT}.val_kwargs.temperature")] = 0.0
    """Sampling temperature. 0: greedy."""
    max_failed: Annotated[Share, Key("eval")] = 0.01
    """Largest share of questions that may be lost to faults; above it the exit code is 1."""


class Cluster(Section):
    """Machines and processes. Only with `--backend verl`."""

    nnodes: Annotated[Count, Key(verl="trainer.nnodes")] = 1
    """Machines used for training."""
    n_gpus_per_node: Annotated[Count | None, Key(verl="trainer.n_gpus_per_node")] = None
    """GPUs per machine, a worker each. null: those of this machine; two workers if it has none."""
    address: str | None = None
    """Address of a running Ray cluster: auto, or host:port. null: start one on this machine."""
    rollout: Annotated[Literal["auto", "vllm", "sglang", "torch"], Key(verl=f"{ROLLOUT}.name")] = "auto"
    """The engine that generates. auto: vllm, or torch on a machine without a GPU."""
    tensor_model_parallel_size: Annotated[Count, Key(verl=f"{ROLLOUT}.tensor_model_parallel_size")] = 1
    """GPUs per replica of the model in generation (tensor parallelism)."""
    param_offload: Annotated[bool, Key(verl=f"{ACTOR}.fsdp_config.param_offload", resumes=True)] = False
    """Offload the weights to CPU memory while they are not in use."""
    optimizer_offload: Annotated[bool, Key(verl=f"{ACTOR}.fsdp_config.optimizer_offload", resumes=True)] = (
        False
    )
    """Offload the optimiser state to CPU memory while it is not in use."""
    watchdog_s: Annotated[Positive, Key(resumes=True)] = 1800.0
    """Seconds without progress after which the run is stopped, to be resumed."""
