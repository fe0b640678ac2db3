"""Models and tokenizers: load, save, digest, LoRA adapters, and small models from scratch.

A model is a Hugging Face directory with safetensors. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from srl.errors import UserError
from srl.files import atomic_directory, check_checkpoint
from srl.protocol import STOP_STRINGS, TAGS

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

SHARD = 2 * 10**9
"""Bytes of weights that saving a model holds in host memory."""
TOLERANCE, ROUNDED = 1e-3, 0.2
"""How far logits of merged weights may be from those of the adapter apart, as a share of their spread: in
float32 and where the weights have fewer bits."""
_WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def return_free_memory() -> None:
    """Give the free pages of the host's heap back to the system, where the C library has `malloc_trim`.

    Freed tensors of less than 32 MiB stay in glibc's heap, between others that are in use.
    """
    trim = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim", None)
    if trim is not None:
        trim(0)


def pick_device(name: str = "auto") -> torch.device:
    """The device `name`; `auto` is CUDA where there is one, else the CPU. Raises UserError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"no device {name!r}: type auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"no device {name!r}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype `name`; `auto` is bfloat16 on a GPU that computes in it, else float32. Raises UserError."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and _computes_bfloat16() else torch.float32
    if name not in DTYPES:
        raise UserError(f"no dtype {name!r}: type auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _computes_bfloat16() -> bool:
    """False on a GPU that only emulates it (before Ampere); true where none is here to ask."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: int = 32,
    lora_target_modules: str | Sequence[str] = "all-linear",
    cast_lm_head_to_fp32: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The causal language model in the directory `path`, in eval mode, on its device.

    `attn_implementation="auto"` is sdpa where the model has it and it computes all that the model wants, else
    eager. `lora_rank` above 0 freezes the
    weights and adds a LoRA adapter to the modules named, which starts as the identity. `overrides` replace
    values of `config.json`. Only safetensors are read. Raises UserError.
    """
    from transformers import AutoModelForCausalLM

    check_directory(Path(path), trust_remote_code)
    target = pick_device(device)
    attention = None if attn_implementation == "auto" else attn_implementation
    try:
        with quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=pick_dtype(dtype, target), attn_implementation=attention,
                trust_remote_code=trust_remote_code, use_safetensors=True, local_files_only=True,
                output_loading_info=True, **overrides or {},
            )  # fmt: skip
    except Exception as error:  # transformers has many for a directory at fault
        if attention and _lacks(path, attention, trust_remote_code):
            why = error_line(error).partition(". ")[0]
            raise UserError(f"model.attn_implementation={attention}: {why}") from error
        why = loading_fault(error)
        raise UserError(f"{path} could not be loaded as a causal language model: {why}") from error
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(f"{path} is incomplete: no weights for {', '.join(sorted(info['missing_keys'])[:3])}")
    model.to(target).eval()
    if attention is None and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves the cap out (Gemma 2)
    if hasattr(model.config.get_text_config(), "output_router_logits"):  # more outputs, which nobody reads
        model.config.get_text_config().output_router_logits = False
    if lora_rank > 0:
        add_lora(model, lora_rank, lora_alpha, lora_target_modules)
    if cast_lm_head_to_fp32:
        cast_head(model)
    if lora_rank > 0:
        check_merging(model)
    if gradient_checkpointing:
        recompute_layers(model)
    return model.eval()


def _lacks(path: str | Path, attention: str, trust_remote_code: bool) -> bool:
    """Whether the model in `path` can be made, without its weights, but not with this attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(attention: str | None) -> None:
        config = AutoConfig.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, trust_remote_code=trust_remote_code
            )

    with suppress(Exception):
        make(None)
        try:
            make(attention)
        except Exception:
            return True
    return False


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the backward pass, which computes the layer again.

    transformers' own switch works in train mode only, which turns on dropout and noise as well. A policy is
    in eval mode always: the log-probs trained are those of the policy that sampled. Raises UserError.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"model.gradient_checkpointing=true: {type(model).__name__} has no layers to recompute"
        )
    for layer in layers:
        layer.forward = Recomputed(layer.forward)


class Recomputed:
    """Calls the `forward` of a layer so that its backward pass computes it again."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **options)
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


class Float32Head(nn.Linear):
    """A language-model head that computes logits in float32 from its weight in any precision."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


def cast_head(model: PreTrainedModel) -> None:
    """Make the head of `model` a Float32Head; its weight stays as it is, tied to the embeddings or not.

    Raises UserError for a head that is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"model.cast_lm_head_to_fp32=true: the head of this model is a {type(head).__name__}, not a "
            "linear layer without an adapter; set it to false"
        )
    head.__class__ = Float32Head


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, transformers prints no table of mismatched weights and no progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def check_directory(
    path: Path,
    trust_remote_code: bool,
    setting: str = "model.trust_remote_code=true",
    also: str = ", or a GGUF file",
) -> None:
    """Raises UserError if `path` is no model directory, or brings code that `setting` does not allow.

    `also` ends the list of what may be given instead.
    """
    if not path.is_dir():
        raise UserError(
            f"no model directory {path}; give a directory with config.json and *.safetensors, or ORG/NAME of "
            f"the Hugging Face hub{also}"
        )
    check_checkpoint(path, leave_out="trainer/")
    check_code(path, trust_remote_code, setting)
    files = list(path.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{path} contains no *.safetensors file; other formats can run code and are not loaded"
            f"{of_run(path)}"
        )
    for file in files:
        header(file)


def check_code(path: Path, trust_remote_code: bool, setting: str = "model.trust_remote_code=true") -> None:
    """Raises UserError if the model in `path` needs Python code of its own that `setting` does not allow."""
    config = _read_config(path)
    if config.get("auto_map") and not trust_remote_code:
        from transformers import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            raise UserError(f"{path} comes with Python code; read it, and if you trust it set {setting}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
        why = f"an object and not a {type(config).__name__}"
    except (OSError, ValueError) as error:
        why = error_line(error)
    raise UserError(f"{path} is not a model directory: expected a config.json in it, {why}{of_run(path)}")


def of_run(path: Path) -> str:
    """A hint for the error message if `path` is a run or inside one, else empty."""
    run = next((folder for folder in (path, *path.parents) if (folder / "run.json").is_file()), None)
    if run is None:
        return ""
    checkpoints = f"; {run}@best is the best checkpoint of that run" if run == path else ""
    return f"{checkpoints}; `srl train export {run} --out DIR` writes its model"


def loading_fault(error: Exception, sizes: str = "config.json") -> str:
    """Why transformers could not load a model, as one line; `sizes` is the file that states its shapes."""
    mismatch = f"its weights do not have the shapes of its {sizes}"
    return mismatch if "ignore_mismatched_sizes" in str(error) else error_line(error)


def error_line(error: BaseException) -> str:
    """A library's error as one line: its first line, or the second if the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"unknown {line}" if isinstance(error, KeyError) else re.sub(r"^\w+Error: ", "", line)


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer in the directory `path`, and notes on what it lacks.

    No token is added; without a pad token, EOS is used for padding. Raises UserError.
    """
    if not Path(path).is_dir():
        raise UserError(f"no tokenizer directory {path}")
    try:
        tokenizer = _tokenizer_class(Path(path)).from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise UserError(f"{path} contains no tokenizer that can be loaded: {error_line(error)}") from error
    if not tokenizer.encode("who", add_special_tokens=False):
        raise UserError(f"{path} contains no tokenizer with a vocabulary: expected a tokenizer.json in it")
    notes = _notes(tokenizer, Path(path))
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, notes


def _tokenizer_class(path: Path) -> Any:
    """AutoTokenizer, or the generic class if the directory names it.

    For some models (Qwen2) AutoTokenizer takes the model's own tokenizer in place of the generic class, and
    that one splits words differently from the directory's `tokenizer.json`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = path / "tokenizer_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") if file.is_file() else None
    generic = named in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return PreTrainedTokenizerFast if generic and (path / "tokenizer.json").is_file() else AutoTokenizer


def context_of(config: Any) -> int | None:
    """The longest sequence of a model with this configuration, in tokens; None if it does not say.

    A model with `longrope` has other rotary frequencies for texts that are longer than those it was first
    trained on, for all rows of a batch at once. Rows would depend on what shares their batch, so its context
    ends there.
    """
    text = config.get_text_config()
    stated = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    context = min((each for each in stated if each), default=None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return context
    first = getattr(text, "original_max_position_embeddings", None)
    found = (context, first, rope.get("original_max_position_embeddings"))
    return min((each for each in found if each), default=None)


def check_tags(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Raises UserError where a policy's tags would not be recognised in what is decoded.

    Special tokens are left out of it, and WordPiece puts spaces around brackets: `< search >`.
    """
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tags = sorted(tag for name in TAGS for tag in (f"<{name}>", f"</{name}>") if tag in known)
    if tags:
        raise UserError(
            f"{path}: {', '.join(tags)} are special tokens of the tokenizer, and these are left out of what "
            'a model writes, so no search or answer would be found; give them "special": false in '
            "tokenizer.json and tokenizer_config.json"
        )
    for name in TAGS:
        first, last = f"<{name}>", f"</{name}>"
        turn = f"{first}who{last}"
        ids = tokenizer.encode(turn, add_special_tokens=False)
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if first not in decoded or last not in decoded:
            raise UserError(
                f"{path}: the tokenizer decodes {turn!r} as {decoded!r}, so no search or answer "
                "would be recognised: a model with this tokenizer cannot be trained to search"
            )


def _notes(tokenizer: PreTrainedTokenizerBase, path: Path) -> list[str]:
    notes = []
    if "strftime_now" in str(tokenizer.chat_template or ""):
        notes.append(
            "the chat template puts today's date into the prompts: they change from day to day, also when a "
            "run is resumed"
        )
    if tokenizer.eos_token is None:
        notes.append("the tokenizer has no EOS token: a turn ends at a stop string or its token cap only")
    if tokenizer.chat_template is None:
        notes.append("the tokenizer has no chat template: prompts are given as plain text")
    if (path / "config.json").is_file():
        vocabulary = _read_config(path).get("vocab_size")
        if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
            notes.append(f"the tokenizer has {len(tokenizer)} tokens, but the model embeds only {vocabulary}")
    return notes


def add_lora(
    model: PreTrainedModel, rank: int, alpha: int = 32, target_modules: str | Sequence[str] = "all-linear",
    key: str = "model.lora_rank",
) -> None:  # fmt: skip
    """Freeze `model` and add a trainable LoRA adapter (arXiv 2106.09685) in place, ΔW = alpha/rank · BA.

    `all-linear` is every linear layer but the head. Raises UserError, also for a rank above its width, which
    names the `key` that sets it.
    """
    if rank > (width := model.config.get_text_config().hidden_size):
        raise UserError(f"{key}={rank} is more than the model's width, {width}: give a smaller one")
    from peft import LoraConfig

    names = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT's, of settings that it corrects itself
            model.add_adapter(config)
        if model.device.type != "meta":
            with weights_kept(model):
                _probe(model)
    except Exception as error:
        raise UserError(f"LoRA on {names!r} of {type(model).__name__} failed: {error_line(error)}") from error


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Raises UserError where what runs inside changes a weight, as RWKV's first forward pass does."""
    before = _norms(model)
    yield
    if changed := [name for name, norm in _norms(model).items() if norm != before[name]]:
        raise UserError(f"{type(model).__name__}: a forward pass changes the weights ({changed[0]})")


def _norms(model: nn.Module) -> dict[str, str]:
    """The norm of each weight, as text: NaN is then equal to itself."""
    weights = model.named_parameters()
    return {
        name: str(float(weight.detach().norm())) for name, weight in weights if weight.is_floating_point()
    }


def has_lora(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def without_lora(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before its adapter, inside the block: the reference policy of a LoRA run."""
    if not has_lora(model):
        raise ValueError("the model has no LoRA adapter to switch off")
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def on_device(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the weights of `model` are copies on `device`; afterwards the original tensors."""
    held = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in held:
            tensor.data = data.to(device, non_blocking=True)
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor that a plain model stores: its name there, where it is, and the LoRA layers that add to it."""

    name: str
    module: nn.Module
    attribute: str
    layers: tuple[Any, ...]

    @property
    def held(self) -> Tensor:
        """The tensor, without what the adapters add; tied weights hold the same one."""
        held: Tensor = getattr(self.module, self.attribute)
        return held

    @property
    def adapters(self) -> list[tuple[Any, str]]:
        """Each LoRA layer with the name of an active adapter of it that is not in the tensor already."""
        return [
            (layer, name)
            for layer in self.layers
            for name in layer.active_adapters
            if name not in layer.merged_adapters
        ]

    def merged(self) -> Tensor:
        """The tensor, and where there are adapters a new one with what they add, summed in float32."""
        tensor = self.held.detach()
        total = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if self.adapters else tensor
        for layer, adapter in self.adapters:
            total = total + layer.get_delta_weight(adapter).detach()
        return total.to(tensor.dtype)


def stored_weights(model: nn.Module) -> list[StoredWeight]:
    """The weights that the plain model under any adapters stores, in its order; tied ones under each name."""
    stored = model.state_dict().keys()
    return [
        StoredWeight(f"{name}{attribute}", module, attribute, tuple(
            layer for layer in layers if getattr(layer, "parameter_name", "weight") == attribute
        ))
        for own, name, module, layers in _without_wrappers(model)
        for attribute, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if f"{own}{attribute}" in stored
    ]  # fmt: skip


def _without_wrappers(
    module: nn.Module, own: str = "", name: str = ""
) -> Iterator[tuple[str, str, nn.Module, list[Any]]]:
    """Each module that is no part of an adapter: the prefix of its weights' names here and in the plain
    model, and the LoRA layers around it. PEFT nests one for each parameter of a module of experts."""
    inner: Any = module
    layers = []
    while hasattr(inner, "get_delta_weight"):
        layers.append(inner)
        inner, own = inner.base_layer, f"{own}base_layer."
    yield own, name, inner, layers
    for child, below in inner.named_children():
        yield from _without_wrappers(below, f"{own}{child}.", f"{name}{child}.")


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each weight under its name in the plain model, any LoRA adapter merged in; sorted by name.

    One matrix is merged at a time, on its device, when it is asked for: nothing else is copied, and the model
    itself is not changed. Of tied weights only the first is given, and each of those that an adapter unties.
    """
    for weight in sorted(_different_weights(model), key=attrgetter("name")):
        yield weight.name, weight.merged()


def _different_weights(model: nn.Module) -> Iterable[StoredWeight]:
    """The stored weights, tied ones once, unless an adapter adds to one of them alone."""
    different: dict[tuple[int, ...], StoredWeight] = {}
    for weight in stored_weights(model):
        different.setdefault((id(weight.held), *map(id, weight.layers)), weight)
    return different.values()


def plain_config(model: PreTrainedModel) -> Any:
    """A copy of the configuration that fits `merged_weights`: without the ties that an adapter ended."""
    config = copy.deepcopy(model.config)
    if any(count > 1 for count in Counter(id(weight.held) for weight in _different_weights(model)).values()):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    return config


def check_merging(model: PreTrainedModel) -> None:
    """Raises UserError where a plain model with the merged weights of `model` computes something else.

    Meanwhile the adapters are random, so that each adds half the size of its weight; they are put back to
    the bit.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    kept = [weight.detach().clone() for weight in trained]
    try:
        _randomise_adapters(model)
        _check_same(
            model,
            lambda: _with_weights_of(model),
            "its adapter cannot be merged into its weights (model.lora_target_modules chooses others)",
        )
    finally:
        for weight, before in zip(trained, kept, strict=True):
            weight.data.copy_(before)


@torch.no_grad()
def _randomise_adapters(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in stored_weights(model):
        for layer, adapter in weight.adapters:
            wanted = 0.5 * float(weight.held.float().std())  # of scaling · BA, whose terms are r products
            size = (wanted / (layer.scaling[adapter] * layer.r[adapter] ** 0.5)) ** 0.5
            for name in layer.adapter_layer_names:
                for factor in getattr(layer, name).parameters():
                    factor.copy_(size * torch.randn(factor.shape, generator=generator))


def check_saved(model: PreTrainedModel, directory: Path, trust_remote_code: bool = False) -> None:
    """Raises UserError where the model saved in `directory`, loaded anew, computes something else."""

    def load() -> tuple[PreTrainedModel, Mapping[str, Tensor]]:
        attention, dtype = model.config._attn_implementation, str(model.dtype).removeprefix("torch.")
        loaded = load_model(
            directory, dtype=dtype, device="cpu", attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        return loaded, loaded.state_dict()

    _check_same(model, load, "what is saved of it is not what was trained")


def _with_weights_of(model: PreTrainedModel) -> tuple[PreTrainedModel, Mapping[str, Tensor]]:
    """The plain model on the meta device, and its weights, which are merged when they are asked for."""
    plain, weights = _plain(model), {weight.name: weight for weight in stored_weights(model)}
    plain.load_state_dict({name: weight.held.to("meta") for name, weight in weights.items()}, assign=True)
    for _, name, module, _ in _without_wrappers(model):
        for attribute, buffer in module.named_buffers(recurse=False):
            setattr(plain.get_submodule(name.removesuffix(".")), attribute, buffer)
    return plain, _Merged(weights)


class _Merged(dict[str, Any]):
    """Stored weights by name, each merged when it is read."""

    def __getitem__(self, name: str) -> Tensor:
        weight: StoredWeight = super().__getitem__(name)
        return weight.merged()


@torch.no_grad()
def _check_same(
    model: PreTrainedModel, load: Callable[[], tuple[PreTrainedModel, Mapping[str, Tensor]]], fault: str
) -> None:
    """Raises UserError with `fault` where the logits of `model` differ from those of the plain model and its
    weights that `load` gives, of which one layer at a time is on the device of `model`."""
    expected = _probe(model)
    try:
        plain, weights = load()
        if isinstance(model.get_output_embeddings(), Float32Head):
            cast_head(plain)
        _hold_one_block(plain, weights, model.device)
        apart = float((_probe(plain, model.device) - expected).norm())
    except Exception as error:
        raise UserError(f"{type(model).__name__}: {fault}: {error_line(error)}") from error
    limit = TOLERANCE if model.dtype.itemsize >= 4 else ROUNDED
    spread = float((expected - expected.mean()).norm())
    if expected.isfinite().all() and not apart <= limit * spread:
        raise UserError(f"{type(model).__name__}: {fault}: logits are {apart:.2g} off, of {spread:.2g}")


def _hold_one_block(plain: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Have `plain` take its `weights` to `device` as it computes: those of a block only while that runs."""
    put = partial(plain.load_state_dict, strict=False, assign=True)
    names = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    outside = set(names)
    for prefix, block in plain.named_modules():
        for attribute, buffer in block.named_buffers(recurse=False):
            setattr(block, attribute, buffer.to(device))
        if type(block).__name__ in (plain._no_split_modules or ()):
            inside = {name for name in names if name.startswith(f"{prefix}.")}
            outside -= inside

            def fill(*_: object, inside: set[str] = inside) -> None:
                put({name: weights[name].to(device) for name in inside})

            def empty(*_: object, inside: set[str] = inside) -> None:
                put({name: plain.get_parameter(name).to("meta") for name in inside})

            block.register_forward_pre_hook(fill)
            block.register_forward_hook(empty)
            empty()
    put({name: weights[name].to(device) for name in outside})


@torch.no_grad()
def _probe(model: PreTrainedModel, device: torch.device | None = None) -> Tensor:
    """The logits `(2, 8, V)`, of a trunk its states, for some random ids; float32."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, 8), generator=generator)
    output: Any = model(input_ids=ids.to(device or model.device), use_cache=False)
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits.float()


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    stop_strings: Sequence[str] = STOP_STRINGS,
) -> None:
    """Write a Hugging Face directory that any tool reads, whole or not at all.

    A LoRA adapter is merged into the weights, and also saved by itself in `adapter/`. The generation config
    has the stop strings, so other programs end turns where the policy was trained to. Beside the model there
    is one merged matrix on its device, and at most `SHARD` bytes of weights in host memory.
    """
    with atomic_directory(directory) as folder:
        plain = _plain(model)
        plain.generation_config = _saved_generation_config(model)
        plain.generation_config.stop_strings = list(stop_strings) or None
        _save_weights(plain, merged_weights(model), folder)
        tokenizer.save_pretrained(folder)
        if has_lora(model):
            trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            with quietly(), warnings.catch_warnings(action="ignore"):  # PEFT's, of base weights in an adapter
                model.save_pretrained(folder / "adapter", state_dict=trained)


def _saved_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """A copy of the model's generation config that transformers saves.

    Many models are published with a temperature and without `do_sample=true`, which it reads but refuses to
    write. Then sampling is on; if that is not all, only the special tokens are kept.
    """
    from transformers import GenerationConfig

    made = copy.deepcopy(model.generation_config)
    for sampling in (made.do_sample, True):
        made.do_sample = sampling
        with suppress(ValueError):
            made.validate(strict=True)
            return made
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(made, name) for name in tokens})


def _save_weights(plain: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Config and weights: one file, or shards with an index. transformers writes each shard by itself, under
    the published names of its weights; a layer is never cut in two."""
    files: list[Path] = []

    def write(shard: dict[str, Tensor]) -> None:
        with quietly():
            plain.save_pretrained(folder, state_dict=shard)
        files.append((folder / _WEIGHTS).rename(folder / f"shard-{len(files) + 1}"))

    shard: dict[str, Tensor] = {}
    for _, layer in groupby(weights, key=lambda item: re.findall(r"\D*\d*", item[0])[0]):
        held = {name: tensor.cpu() for name, tensor in layer}
        if shard and sum(tensor.nbytes for tensor in [*shard.values(), *held.values()]) > SHARD:
            write(shard)
            shard = {}
        shard |= held
    write(shard)
    _name_shards(files, folder)


def _name_shards(files: Sequence[Path], folder: Path) -> None:
    """Give the files of a model their usual names, and an index where there are several."""
    if len(files) == 1:
        files[0].rename(folder / _WEIGHTS)
        return
    stem, names, size = Path(_WEIGHTS).stem, dict[str, str](), 0
    for number, file in enumerate(files, start=1):
        named = file.rename(folder / f"{stem}-{number:05}-of-{len(files):05}.safetensors")
        for name, entry, _ in header(named):
            names[name] = named.name
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (folder / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and config in eval mode, without adapter or memory for its weights."""
    with torch.device("meta"):
        made: Any = type(model)(plain_config(model))
    return made.to(model.dtype).eval()


def model_digest(model: PreTrainedModel | str | Path) -> str:
    """32 hex digits (blake2b-128) of the weights: names, dtypes, shapes and bytes.

    A model (any LoRA merged in) and the directory that `save_model` makes of it have the same, where
    the architecture is stored under the names of its parameters, as Qwen2 and Llama are.
    """
    stored = _stored_tensors(Path(model)) if isinstance(model, (str, Path)) else _live_tensors(model)
    digest = blake2b(digest_size=16)
    for name, dtype, shape, data in stored:
        digest.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


_Stored = tuple[str, str, Iterable[int], memoryview]


def _live_tensors(model: PreTrainedModel) -> Iterator[_Stored]:
    """(name, dtype, shape, bytes) of the weights, sorted by name."""
    for name, tensor in merged_weights(model):
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield name, _STORED_DTYPES[tensor.dtype], tensor.shape, data.data


def _stored_tensors(directory: Path) -> Iterator[_Stored]:
    """The same from a directory's safetensors files, memory-mapped."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} contains no *.safetensors file, so there are no weights to digest")
    entries = [(name, entry, file, base) for file in files for name, entry, base in header(file)]
    for name, entry, file, base in sorted(entries, key=lambda item: item[0]):
        first, last = (base + offset for offset in entry["data_offsets"])
        data = np.memmap(file, dtype=np.uint8, mode="r")[first:last]
        yield name, entry["dtype"], entry["shape"], data.data


def header(file: Path) -> list[tuple[str, Mapping[str, Any], int]]:
    """(name, entry, offset of the data) for each tensor that a safetensors file says it holds."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(length) if length < 1 << 27 else b"")
        except ValueError as error:
            raise UserError(f"{file} is not a safetensors file: its header does not parse") from error
    entries = [(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    if any(base + entry["data_offsets"][1] > file.stat().st_size for _, entry, base in entries):
        raise UserError(f"{file} is truncated: its header describes more data than it holds; copy it again")
    return entries


def count_parameters(model: torch.nn.Module, *, trainable: bool = False) -> int:
    """The number of parameters, tied ones once; with `trainable`, only those that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def new_model(
    kind: Literal["qwen2", "llama"],
    *,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    ffn: int,
    kv_heads: int | None = None,
    max_length: int = 2048,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A small float32 model with tied embeddings and random weights, the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    classes = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    if kind not in classes:
        raise UserError(f"no kind of model {kind!r}: there are {', '.join(classes)}")
    make_config, make_model = classes[kind]
    config = make_config(
        vocab_size=vocab_size, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, intermediate_size=ffn, max_position_embeddings=max_length,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(config).eval()
