"""A model directory written from weights alone; what describes the model is taken from another directory."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.errors import UserError
from srl.files import write_json
from srl.model import one_line, quietly
from srl.protocol import STOP_STRINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION = "generation_config.json"


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """`state` with its numbers in `dtype`. Raises UserError where one is too large for it."""
    made = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    for name, tensor in made.items():
        if not torch.isfinite(tensor).all() and torch.isfinite(state[name]).all():
            raise UserError(f"{name} holds numbers too large for {str(dtype)[6:]}; type --dtype bfloat16")
    return made


def write_weights(
    folder: Path,
    state: dict[str, Tensor],
    described: Path,
    *,
    trust_remote_code: bool = False,
    stop_strings: Sequence[str] = STOP_STRINGS,
) -> None:
    """Write `state` and the configuration in `described` to `folder`, as `from_pretrained` expects it.

    The stop strings are in the generation config, as with `srl.model.save_model`. Raises UserError where
    the weights are not those of the configuration.
    """
    model = _empty(described, next(iter(state.values())).dtype, trust_remote_code)
    state = _untied(model, state)
    _check(model, state)
    with quietly():
        model.save_pretrained(folder, state_dict=state)
    for file in (described / GENERATION, *described.glob("*.py")):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    known = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
    write_json(folder / GENERATION, {**known, "stop_strings": list(stop_strings) or None})


def _empty(described: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model that a directory's config.json is of, without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(described), trust_remote_code=trust_remote_code, local_files_only=True
        )
        with torch.device("meta"):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        why = one_line(error)
        raise UserError(f"{described} describes no causal language model: {why}") from error
    return made


def _untied(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with each tied weight once, under the name it is stored by."""
    tied = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            tied[id(parameter)].append(name)
    for first, *others in tied.values():
        if any(not torch.equal(state[first], state[other]) for other in others):
            raise UserError(f"{first} and {', '.join(others)} are tied by config.json, and yet they differ")
    again = {name for _, *others in tied.values() for name in others}
    return {name: tensor for name, tensor in state.items() if name not in again}


def _check(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Raises UserError where a weight is missing, is one too many, or has another shape."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    missing, unknown = (once & shapes.keys()) - state.keys(), state.keys() - shapes.keys()
    odd = {name for name in state.keys() & shapes.keys() if state[name].shape != shapes[name]}
    for names, what in ((missing, "no weights for"), (unknown, "unknown weights"), (odd, "other shapes of")):
        if names:
            raise UserError(
                f"the checkpoint does not fit its config.json: {what} {', '.join(sorted(names)[:3])}"
            )
