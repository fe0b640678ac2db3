"""The sections of the configuration: what each key takes, its default, and its documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""What numpy, torch and vLLM all take."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
KlEstimator = Literal["k1", "k2", "k3"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def one_or_many(value: object) -> object:
    """A single text becomes a tuple of one, a list a tuple: nobody can change it afterwards."""
    if isinstance(value, str | PurePath):
        return (str(value),)
    return list_to_tuple(value)


def list_to_tuple(value: object) -> object:
    """Lists, as YAML has them, become tuples."""
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Marks a text that is, or may be, a path."""


File = Annotated[str, OnDisk()]
Files = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1), OnDisk()]
Texts = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1)]
Listed = BeforeValidator(list_to_tuple)


class Section(BaseModel):
    """A group of keys: frozen, strict, and closed to unknown ones."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class PluginSection(Section):
    """A section that also holds one subsection of options for each plugin, named like the plugin."""

    model_config = ConfigDict(extra="allow")

    def options(self, plugin: str) -> dict[str, Any]:
        """The options given to `plugin`; empty when there are none."""
        return dict((self.model_extra or {}).get(plugin) or {})


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


class NamedRetriever(Section):
    """A further retriever that the policy asks by name. One of url, index and retriever says what it is."""

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
    """Passages that a search with this retriever returns. null: search.topk."""


class Search(Section):
    """What answers a search, and what happens when it does not answer."""

    url: Texts | None = None
    """URL of a search server's `/retrieve`, or a list of them for one index. null: search in this process."""
    index: File | None = None
    """Index directory to search in this process. null: the index of data.corpus, built when missing."""
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{12,32}$")
    """The digest of the index that must answer, or its first 12 digits and more: another one ends the run
    before it starts. null: any."""
    retrievers: dict[str, NamedRetriever] = Field(default={})
    """Further retrievers by name (a-z, 0-9, - and _): `<search engine="NAME">` asks one, `<search>` the
    default one, which the keys above describe. The prompt lists them where it is made from a template."""
    cassette: File | None = Field(default=None, pattern=r"^(record|replay) +\S.*$")
    """`record FILE` writes every search and its outcome to FILE, a cassette; `replay FILE` answers searches
    from it, without a server or an index. null: neither."""
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
    """How an index is built and searched. Options of a retriever lie under its name."""

    name: str = "bm25"
    """The retriever plugin: an installed one (`srl plugins list`), or `module:Class`."""


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
    """Reward plugins, by name or `module:Class`, and their weights. A mapping in a file replaces the one
    below it; `--set reward.weights.format=0.2` adds to it."""


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive towards target_kl (Ziegler et al. 2019)."""
    kl_coef: NonNegative = 0.001
    """Coefficient of the penalty; where adaptive starts."""
    target_kl: Positive = 0.1
    """KL that the adaptive coefficient aims at."""
    horizon: Count = 10000
    """Episodes over which the adaptive coefficient moves."""


class Algorithm(PluginSection):
    """From rewards to advantages. Options of an algorithm lie under its name."""

    name: str = "ppo"
    """The algorithm plugin: an installed one (`srl plugins list`), or `module:Class`."""
    gamma: Share = 1.0
    """Discount for each token that the policy wrote."""
    lam: Share = 1.0
    """λ of generalised advantage estimation."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef × KL(policy, reference) from the reward of each token."""
    kl_penalty: KlEstimator = "k1"
    """Estimator of the KL in the reward: k1 (difference of log-probs), k2 (half its square), k3 (low
    variance)."""
    kl_ctrl: KlCtrl = KlCtrl()


class Optim(Section):
    """AdamW and its learning rate."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Listed,
    ] = (0.9, 0.999)
    """Decay of the first and second moment."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    lr_warmup_steps: Natural = 0
    """Training steps over which the learning rate rises from 0; 0: see lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Share = 0.0
    """The same as a share of the steps in which the network learns; only where lr_warmup_steps is 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at the last step."""


class CriticOptim(Optim):
    """AdamW and its learning rate."""

    lr: Positive = 1e-5
    """Learning rate after the warm-up."""


class SftOptim(CriticOptim):
    """AdamW and its learning rate."""


class Actor(Section):
    """The update of the policy."""

    ppo_mini_batch_size: Count = 64
    """Questions (× rollout.n episodes) of one optimiser step; divides data.train_batch_size."""
    ppo_epochs: Count = 1
    """Passes over the episodes of a step."""
    ppo_max_token_len: Count = 16384
    """Tokens of a forward and backward pass, padding included: the knob for memory. What is computed does
    not depend on it."""
    clip_ratio: NonNegative = 0.2
    """ε of PPO's clipping."""
    clip_ratio_low: NonNegative | None = None
    """ε below 1; null: clip_ratio."""
    clip_ratio_high: NonNegative | None = None
    """ε above 1; null: clip_ratio."""
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """Bound of the ratio where the advantage is negative (dual clip, Ye et al. 2020); null: none."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL(policy, reference) to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: KlEstimator = "k3"
    """Estimator of the KL in the loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one: the mean over all policy tokens of the mini-batch, a mean over episodes of
    their mean or sum, or the sum divided by loss_agg_constant for each episode."""
    loss_agg_constant: Count | None = None
    """Tokens that the sum of an episode is divided by with loss_agg_mode: constant; null:
    data.max_response_length."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    mask_observations: bool = True
    """Train only on what the policy wrote. false also trains on what it read; only for the ablation."""
    optim: Optim = Optim()


class Critic(Section):
    """The update of the value function, for algorithms that have one."""

    ppo_mini_batch_size: Count = 64
    """Questions (× rollout.n episodes) of one optimiser step; divides data.train_batch_size."""
    ppo_epochs: Count = 1
    """Passes over the episodes of a step."""
    ppo_max_token_len: Count = 16384
    """Tokens of a forward and backward pass, padding included."""
    cliprange_value: Positive = 0.5
    """How far a value may move from the old one before its loss is clipped."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one, as for the actor."""
    optim: CriticOptim = CriticOptim()


class Ref(Section):
    """The reference policy of the KL terms."""

    path: File | None = None
    """Directory of the reference; null: the policy as RL starts."""


class Sft(Section):
    """Supervised fine-tuning before RL, on episodes that a script plays."""

    train_files: File | None = None
    """Demonstrations, JSON lines `{"question", "golden_answers", "turns": ["…", …]}`; null: those of the
    tiny world."""
    steps: Natural = 80
    """Optimiser steps; 0: none."""
    batch_size: Count = 32
    """Episodes of a step."""
    observation_weight: Share = 0.0
    """Weight of retrieved tokens in the loss; the policy's own have 1."""
    optim: SftOptim = SftOptim()


class Trainer(Section):
    """The length of a run and what it leaves behind."""

    total_training_steps: Natural = 30
    """Steps of RL."""
    save_freq: Natural = 10
    """Steps between checkpoints; 0: only the last step."""
    test_freq: Natural = 10
    """Steps between validations; 0: none."""
    val_before_train: bool = True
    """Validate before the first step."""
    critic_warmup: Natural = 0
    """First steps in which only the critic learns; the actor's learning rate counts from the step after."""
    seed: Seed = 0
    """Seed of everything random: order of questions, sampling, new weights."""
    max_ckpt_to_keep: Count | None = None
    """Checkpoints that are kept, the newest; null: all."""
    logger: Annotated[
        tuple[Literal["console", "tensorboard", "wandb"], ...], BeforeValidator(one_or_many)
    ] = ("console",)
    """Where metrics go besides the run's own log: console, tensorboard, wandb."""
    project_name: str = "srl"
    """Project in external loggers."""
    experiment_name: str | None = None
    """Name in external loggers; null: the run's."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch; null: what a short measurement finds fastest."""
    plugin_path: Files | None = None
    """Directories with the modules of plugins named as `module:Class`, besides Python's own path. null: the
    current directory, which a run writes down here."""
    sample_freq: Natural = 10
    """Steps between showing a few episodes; 0: never."""
    sample_count: Natural = 2
    """Episodes shown."""


class Eval(Section):
    """Validation inside training, and evaluation after it."""

    val_questions: Count | None = 512
    """Questions of a validation, the same each time; null: all."""
    test_questions: Count | None = None
    """Questions of a test; null: all."""
    batch_size: Count | None = None
    """Questions in flight; null: rollout.max_num_seqs."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    max_failed: Share = 0.01
    """Share of questions that may be lost to search faults before the exit code says so."""


class Cluster(Section):
    """Machines and what runs on them; read only with `--backend verl`."""

    nnodes: Count = 1
    """Machines that train."""
    n_gpus_per_node: Count | None = None
    """GPUs of each machine, one worker each. null: those of this machine, two workers if it has none."""
    address: str | None = None
    """A Ray cluster that is there already: auto, or host:port. null: one of this machine's own."""
    strategy: Literal["fsdp2", "fsdp", "megatron"] = "fsdp2"
    """How the model is split over the workers while it is trained."""
    rollout: Literal["auto", "vllm", "sglang", "torch"] = "auto"
    """What generates. torch: the engine of the local trainer, for machines without a GPU. auto: torch there,
    else vllm."""
    tensor_model_parallel_size: Count = 1
    """GPUs that share one copy of the model while it generates."""
    gpu_memory_utilization: Share = 0.6
    """Share of a GPU's memory that generation may take; training needs the rest."""
    param_offload: bool = False
    """Keep the weights in the machine's memory while they are not in use."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in the machine's memory while it is not in use."""
    agent_workers: Count = 8
    """Processes in which episodes run: what talks to the policy and to the search servers. Without a GPU, at
    most one for each worker."""
    watchdog_s: Positive = 1800.0
    """Seconds without any progress after which the run is ended, to be resumed."""
