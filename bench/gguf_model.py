"""A GGUF file, llama.cpp's format, as a Hugging Face directory: how a small model comes out of a package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from srl.models.weights import quietly, save_model


def convert_file(file: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the model and the tokenizer of `file` to the directory `path`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with quietly():
        model: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=dtype, **source)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
    for name in ("eos_token", "pad_token"):  # as the file numbers them, not as the architecture's first model
        number = getattr(model.config, f"{name}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    model.config.dtype = dtype  # transformers keeps some files in float32 whatever is asked
    if hasattr(model.config, "quantization_config"):  # by transformers 5.17, though the weights no longer are
        del model.config.quantization_config
    model.to(dtype=dtype)
    save_model(model, tokenizer, path, stop_strings=())
