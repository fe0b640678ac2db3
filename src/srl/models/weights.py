"""A model's weights: LoRA adapters, merging them, saving, and digests."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from srl.errors import UserError, error_line
from srl.files import atomic_directory
from srl.protocol import STOP_STRINGS

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

SHARD = "2GB"
"""The most weights in one file."""


class Float32Head(nn.Linear):
    """A language-model head that computes logits in float32 from its weight in any precision."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


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


# ---- LoRA


def add_lora(
    model: PreTrainedModel, rank: int, alpha: int = 32, target_modules: str | Sequence[str] = "all-linear",
    key: str = "model.lora_rank",
) -> None:  # fmt: skip
    """Freeze `model` and add a trainable LoRA adapter (arXiv 2106.09685) in place, ΔW = alpha/rank · BA.

    `all-linear` is every linear layer but the head. Raises UserError, also for a rank above the model's
    width, which names the `key` that sets it.
    """
    if rank > (width := model.config.get_text_config().hidden_size):
        raise UserError(f"{key}={rank} is more than the model's width, {width}: give a smaller one", key=key)
    from peft import LoraConfig

    names = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT's, of settings that it corrects itself
            model.add_adapter(config)
        if model.device.type != "meta":
            with torch.no_grad():
                model(input_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    except Exception as error:
        raise UserError(f"LoRA on {names!r} of {type(model).__name__} failed: {error_line(error)}") from error


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
        for own, name, module, layers in without_wrappers(model)
        for attribute, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if f"{own}{attribute}" in stored
    ]  # fmt: skip


def without_wrappers(
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
        yield from without_wrappers(below, f"{own}{child}.", f"{name}{child}.")


def _different_weights(model: nn.Module) -> Iterable[StoredWeight]:
    """The stored weights, tied ones once, unless an adapter adds to one of them alone."""
    different: dict[tuple[int, ...], StoredWeight] = {}
    for weight in stored_weights(model):
        different.setdefault((id(weight.held), *map(id, weight.layers)), weight)
    return different.values()


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each weight under its name in the plain model, any LoRA adapter merged in; sorted by name.

    One matrix is merged at a time, on its device, when it is asked for: nothing else is copied, and the model
    itself is not changed. Of tied weights only the first is given, and each of those that an adapter unties.
    """
    for weight in sorted(_different_weights(model), key=attrgetter("name")):
        yield weight.name, weight.merged()


def plain_config(model: PreTrainedModel) -> Any:
    """A copy of the configuration that fits `merged_weights`: without the ties that an adapter ended."""
    config = copy.deepcopy(model.config)
    if any(count > 1 for count in Counter(id(weight.held) for weight in _different_weights(model)).values()):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    return config


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and config in eval mode, without adapter or memory for its weights."""
    with torch.device("meta"):
        plain: Any = type(model)(plain_config(model))
    return plain.to(model.dtype).eval()


# ---- Saving


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    stop_strings: Sequence[str] = STOP_STRINGS,
) -> None:
    """Write a Hugging Face directory that any tool reads, whole or not at all.

    A LoRA adapter is merged into the weights, and also saved by itself in `adapter/`; the merged matrices are
    in host memory meanwhile. The generation config has the stop strings, so other programs end turns where
    the policy was trained to. transformers writes the weights, under their published names.
    """
    with atomic_directory(directory) as folder, quietly():
        plain = plain_model(model)
        plain.generation_config = _saved_generation_config(model)
        plain.generation_config.stop_strings = list(stop_strings) or None
        adapted = {weight.name for weight in stored_weights(model) if weight.adapters}
        weights = {
            name: tensor.cpu() if name in adapted else tensor for name, tensor in merged_weights(model)
        }
        plain.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD)
        tokenizer.save_pretrained(folder)
        if has_lora(model):
            trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            with warnings.catch_warnings(action="ignore"):  # PEFT's, of base weights in an adapter
                model.save_pretrained(folder / "adapter", state_dict=trained)


def _saved_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """A copy of the model's generation config that transformers saves.

    Many models are published with a temperature and without `do_sample=true`, which it reads but refuses to
    write. Then sampling is on; if that is not all, only the special tokens are kept.
    """
    from transformers import GenerationConfig

    config = copy.deepcopy(model.generation_config)
    for sampling in (config.do_sample, True):
        config.do_sample = sampling
        with suppress(ValueError):
            config.validate(strict=True)
            return config
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(config, name) for name in tokens})


# ---- Digests


def model_digest(model: PreTrainedModel | str | Path) -> str:
    """32 hex digits (blake2b-128) of the weights: names, dtypes, shapes and bytes.

    A model (any LoRA merged in) and the directory that `save_model` makes of it have the same, where
    the architecture is stored under the names of its parameters, as Qwen2 and Llama are. A process reads a
    directory once as long as its files are the same.
    """
    if not isinstance(model, (str, Path)):
        return _digest(merged_weights(model))
    files = [(file.name, file.stat()) for file in sorted(Path(model).glob("*.safetensors"))]
    if not files:
        raise UserError(f"{model} contains no *.safetensors file, so there are no weights to digest")
    return _directory_digest(Path(model).absolute(), *((name, s.st_size, s.st_mtime_ns) for name, s in files))


@cache
def _directory_digest(directory: Path, *files: tuple[str, int, int]) -> str:
    with ExitStack() as stack:
        opened = _opened(directory, stack)
        return _digest((name, opened[name].get_tensor(name)) for name in sorted(opened))


def _digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    digest = blake2b(digest_size=16)
    for name, tensor in weights:
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in a directory. Raises UserError for a file that is damaged or truncated."""
    with ExitStack() as stack:
        files = _opened(directory, stack)
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}


def _opened(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """The file, opened, of each weight in a directory."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            opened: Any = stack.enter_context(safe_open(file, "pt"))
        except SafetensorError as error:
            raise UserError(f"{file} is damaged, copy it again: {error_line(error)}") from error
        files |= dict.fromkeys(opened.keys(), opened)
    return files
