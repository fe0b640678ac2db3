"""Loads models and tokenizers from directories. Nothing is downloaded, and only safetensors are read."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from srl.errors import UserError, error_line
from srl.files import check_checkpoint
from srl.models.check import check_merging, check_same
from srl.models.hub import HubName, fetched
from srl.models.weights import Float32Head, add_lora, quietly, shapes
from srl.protocol import TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- Devices


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
        raise UserError(f"no device {name!r}: type auto, cpu, cuda or cuda:N", key="model.device") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise UserError(f"no device {name!r}: this machine has {gpus} GPUs", key="model.device")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype `name`; `auto` is bfloat16 on a GPU that computes in it, else float32. Raises UserError.

    GPUs before Ampere only emulate bfloat16. Where no GPU is here to ask, it is one that computes in it.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UserError(f"no dtype {name!r}: type auto, {', '.join(DTYPES)}", key="model.dtype")
        return DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    has_gpu = torch.cuda.is_available()
    native = not has_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


@contextmanager
def on_device(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the weights of `model` are copies on `device`; afterwards the original tensors."""
    tensors = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in tensors:
            tensor.data = data.to(device, non_blocking=True)
        yield
    finally:
        for tensor, data in tensors:
            tensor.data = data


# ---- Models


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
    eager. `lora_rank` above 0 freezes the weights and adds a LoRA adapter to the modules named, which starts
    as the identity. `overrides` replace values of `config.json`. Raises UserError.
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
        what = f"{path} could not be loaded as a causal language model: {loading_fault(error)}"
        raise UserError(what) from error
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(f"{path} is incomplete: no weights for {', '.join(sorted(info['missing_keys'])[:3])}")
    text = model.config.get_text_config()
    model.to(target).eval()
    if attention is None and getattr(text, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves the cap out (Gemma 2)
    if hasattr(text, "output_router_logits"):  # more outputs, which nobody reads
        text.output_router_logits = False
    if lora_rank > 0:
        add_lora(model, lora_rank, lora_alpha, lora_target_modules)
    if cast_lm_head_to_fp32:
        cast_head(model)
    if lora_rank > 0:
        check_merging(model)
    if gradient_checkpointing:
        recompute_layers(model)
    return model.eval()


def check_saved(model: PreTrainedModel, directory: Path, trust_remote_code: bool = False) -> None:
    """Raises UserError where the model saved in `directory`, loaded anew on the CPU, computes something else
    than `model`."""
    dtype = str(model.dtype).removeprefix("torch.")
    saved = load_model(directory, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    check_same(model, saved, "what is saved of it is not what was trained")


def loading_fault(error: Exception) -> str:
    """Why transformers could not load a model, as one line."""
    mismatch = "its weights do not have the shapes of its config.json"
    return mismatch if "ignore_mismatched_sizes" in str(error) else error_line(error)


def cast_head(model: PreTrainedModel) -> None:
    """Make the head of `model` a Float32Head; its weight stays as it is, tied to the embeddings or not.

    Raises UserError for a head that is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        what = f"the head of this model is a {type(head).__name__}, not a linear layer without an adapter"
        raise UserError(f"model.cast_lm_head_to_fp32: {what}", key="model.cast_lm_head_to_fp32")
    head.__class__ = Float32Head


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the backward pass, which computes the layer again.

    transformers' own switch works in train mode only, which turns on dropout and noise as well. A policy is
    in eval mode always: the log-probs trained are those of the policy that sampled. Raises UserError.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        what = f"model.gradient_checkpointing: {type(model).__name__} has no layers to recompute"
        raise UserError(what, key="model.gradient_checkpointing")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `forward` of a layer returns; a backward pass computes it again."""
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def check_directory(path: Path, trust_remote_code: bool, key: str = "model.trust_remote_code") -> None:
    """Raises UserError if `path` is no whole model directory, or brings code that `key` does not allow."""
    if not path.is_dir():
        raise UserError(
            f"no model directory {path}",
            hint="give a directory with config.json and *.safetensors, or ORG/NAME of the Hugging Face hub",
        )
    check_checkpoint(path, leave_out="trainer/")
    config = _read_config(path)
    if config.get("auto_map") and not trust_remote_code:
        from transformers import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            what = f"{path} comes with Python code; read it, and if you trust it set {key}=true"
            raise UserError(what, key=key)
    if not shapes(path):
        what = f"{path} contains no *.safetensors file; other formats can run code and are not loaded"
        raise UserError(what, hint=of_run(path))


def named_directory(model: str, trust_remote_code: bool, plugin: str) -> Path:
    """The directory `model`, or the local copy of the hub's model of this name; it is checked.

    Raises UserError with the key below `plugin`, such as `retriever.e5`.
    """
    name = HubName.parse(model)
    try:
        directory = fetched(name, "model", trust_remote_code=trust_remote_code) if name else Path(model)
    except UserError as error:
        raise UserError(error, key=f"{plugin}.model") from error
    check_directory(directory, trust_remote_code, f"{plugin}.trust_remote_code")
    return directory


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
        why = f"an object and not a {type(config).__name__}"
    except (OSError, ValueError) as error:
        why = error_line(error)
    what = f"{path} is not a model directory: expected a config.json in it, {why}"
    raise UserError(what, hint=of_run(path))


def of_run(path: Path) -> str:
    """A hint if `path` is a run or inside one, else empty."""
    run = next((folder for folder in (path, *path.parents) if (folder / "run.json").is_file()), None)
    return (
        ""
        if run is None
        else f"{run}@best is its best checkpoint; `srl train export {run} --out DIR` writes its model"
    )


def count_parameters(model: torch.nn.Module) -> int:
    """The number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---- Tokenizers


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
    notes = []
    if "strftime_now" in str(tokenizer.chat_template or ""):
        notes.append("the chat template puts today's date into the prompts: they change from day to day")
    if tokenizer.eos_token is None:
        notes.append("the tokenizer has no EOS token: a turn ends at a stop string or its token cap only")
    if tokenizer.chat_template is None:
        notes.append("the tokenizer has no chat template: prompts are given as plain text")
    if (Path(path) / "config.json").is_file():
        vocabulary = _read_config(Path(path)).get("vocab_size")
        if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
            notes.append(f"the tokenizer has {len(tokenizer)} tokens, but the model embeds only {vocabulary}")
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
    text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
    class_name = json.loads(text).get("tokenizer_class")
    generic = class_name in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return PreTrainedTokenizerFast if generic and (path / "tokenizer.json").is_file() else AutoTokenizer


def check_tags(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError where a policy's tags would not be recognised in what is decoded.

    Special tokens are left out of it, and WordPiece puts spaces around brackets: `< search >`.
    """
    for name in TAGS:
        turn = f"<{name}>who</{name}>"
        ids = tokenizer.encode(turn, add_special_tokens=False)
        decoded = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if f"<{name}>" not in decoded or f"</{name}>" not in decoded:
            raise UserError(
                f"{tokenizer.name_or_path}: the tokenizer decodes {turn!r} as {decoded!r}, so no search or "
                "answer would be recognised",
                hint='tags that are special tokens need "special": false in tokenizer.json and '
                "tokenizer_config.json",
            )
