"""GGUF files, llama.cpp's format: converted once to a Hugging Face directory in the workspace."""

from __future__ import annotations

from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from srl.config.sections import Model
from srl.errors import UserError
from srl.files import ABOUT, digest_file
from srl.install import pip_install
from srl.models.load import loading_fault, pick_device, pick_dtype
from srl.models.weights import quietly, save_model
from srl.train.make_missing import Note, make_if_missing
from srl.train.model_card import write_card
from srl.workspace import Workspace

MAGIC = b"GGUF"


def converted(file: Path, workspace: Workspace, model: Model, note: Note) -> Path:
    """The directory made of `file`, in the precision of the section `model`; made first if missing.

    Its name has a digest of the file, so a run that starts from it can be resumed without the file. Raises
    UserError.
    """
    check_gguf(file)
    dtype = pick_dtype(model.dtype, pick_device(model.device))
    name = f"{file.stem}-{str(dtype).removeprefix('torch.')}-{digest_file(file)[:8]}"

    def convert(path: Path) -> None:
        note(f"converting {file} in {str(dtype).removeprefix('torch.')}, once, to {path}")
        convert_file(file, path, dtype)

    return make_if_missing(workspace.models / name, convert)


def check_gguf(file: Path) -> None:
    """Raises UserError where `file` is missing or no GGUF file, or the package that reads it is missing."""
    if not file.is_file():
        raise UserError(f"no GGUF file {file}; give a model directory, a GGUF file or ORG/NAME")
    with open(file, "rb") as content:
        if content.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{file} is not a GGUF file: it does not begin with GGUF")
    if find_spec("gguf") is None:
        raise UserError(f"reading {file} needs the package gguf; type: {pip_install('gguf')}")


def convert_file(file: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the model and the tokenizer of `file` as a Hugging Face directory. Raises UserError."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": file.name, "local_files_only": True}
    try:
        if GGUFReader(file).get_field("tokenizer.ggml.tokens") is None:  # transformers would make one up
            raise ValueError("it has no tokenizer")
        with quietly(), redirect_stderr(StringIO()):  # its progress bar has no switch
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=dtype, output_loading_info=True, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
    except Exception as error:  # the reader has many for a damaged file
        why = loading_fault(error, "metadata")
        raise UserError(f"{file} could not be converted: {why}; give another file") from error
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(f"{file} is incomplete: no weights for {', '.join(sorted(info['missing_keys'])[:3])}")
    _take_special_tokens(tokenizer, model.config)
    model.config.dtype = dtype  # transformers keeps some files in float32 whatever is asked
    if hasattr(model.config, "quantization_config"):  # by transformers 5.17, though the weights no longer are
        del model.config.quantization_config
    save_model(model.to(dtype), tokenizer, path, stop_strings=())
    write_card(path / ABOUT, {"base_model": file.name})


def _take_special_tokens(tokenizer: Any, config: Any) -> None:
    """EOS and pad as the file numbers them. transformers takes those of the architecture's first model:
    for Qwen2.5-Instruct, EOS would be `<|endoftext|>` and not `<|im_end|>`."""
    for name in ("eos_token", "pad_token"):
        number = getattr(config, f"{name}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
