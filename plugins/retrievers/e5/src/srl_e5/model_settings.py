"""Prefixes, pooling and normalisation of an encoder, from the options, its files or its model family."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from logging import getLogger
from pathlib import Path
from typing import Any, Literal

from srl.errors import UserError, first_line, parsing
from srl.models.weights import model_digest
from srl_e5.options import Options

_log = getLogger("srl.e5")


@dataclass(frozen=True, slots=True)
class Family:
    """Models that were trained with the same settings. `names` is a regular expression for model names."""

    names: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"
    normalize: bool = True


_FAMILIES = (
    Family(r"\be5\b(?!.*\b(instruct|mistral)\b)", "query: ", "passage: "),
    Family(r"\bbge\b.*\ben\b", "Represent this sentence for searching relevant passages: ", pooling="cls"),
    Family(r"\bbge\b.*\bzh\b", "为这个句子生成表示以用于检索相关文章：", pooling="cls"),
    Family(r"\bbge\b", pooling="cls"),
    Family(r"\bcontriever\b", normalize=False),
    Family(r"\bminilm\b|\bmpnet\b|\bdistilroberta\b|\bgtr\b"),
)
"""Prefixes and pooling as published by the models' authors. bge-m3 has no query prefix."""

_MODULES = {"Transformer", "Pooling", "Normalize"}
_POOLINGS: dict[str, Literal["mean", "cls"]] = {
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
    "pooling_mode_cls_token": "cls",
    "cls": "cls",
}
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt",
    "sentencepiece.bpe.model", "spiece.model",
)  # fmt: skip
_IGNORED_KEYS = {
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache",
}  # fmt: skip
"""Keys of config.json that differ between copies of the same model, and are not part of the digest."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings, besides the weights, that affect a vector."""

    query_prefix: str
    passage_prefix: str
    pooling: str
    normalize: bool


def resolve(directory: Path, options: Options) -> Settings:
    """The effective settings: from `options`, else from the model's files, else from its family.

    A model of an unknown family and without prompts of its own is used without prefixes, with a warning.
    Raises UserError.
    """
    pooling, prompts = _own_pooling(directory), _own_prompts(directory)
    family = _family(options.model, directory)
    if family is None and prompts is None and None in (options.query_prefix, options.passage_prefix):
        _log.warning(
            "unknown model family: %s; it is used without prefixes: set query_prefix and passage_prefix if "
            "it was trained with some",
            options.model,
        )
    family = family or Family("")
    query, passage = prompts or (family.query_prefix, family.passage_prefix)
    return Settings(
        query_prefix=query if options.query_prefix is None else options.query_prefix,
        passage_prefix=passage if options.passage_prefix is None else options.passage_prefix,
        pooling=options.pooling or pooling or family.pooling,
        normalize=family.normalize if options.normalize is None else options.normalize,
    )


def encoder_digest(directory: Path) -> str:
    """Digest, 32 hex digits, of all files that affect a vector: weights, configuration, tokenizer."""
    config = {name: value for name, value in _config(directory).items() if name not in _IGNORED_KEYS}
    digest = blake2b(digest_size=16)
    digest.update(model_digest(directory).encode() + json.dumps(config, sort_keys=True).encode())
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            digest.update(f"\0{name}\0".encode() + (directory / name).read_bytes())
    return digest.hexdigest()


def _config(directory: Path) -> dict[str, Any]:
    """The model's config.json, which `named_directory` has validated."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def dimension_of(directory: Path, trust_remote_code: bool = False) -> int:
    """The dimension of the model's vectors. Raises UserError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
        return int(config.hidden_size)
    except Exception as error:
        what = first_line(error)
        raise UserError(f"{directory}: config.json does not describe an encoder: {what}") from error


def _family(model: str, directory: Path) -> Family | None:
    """The family that matches the given name, else the name in the model's configuration; None if unknown."""
    for name in (model, str(_config(directory).get("_name_or_path", ""))):
        words = re.sub(r"[_.]", "-", Path(name).name).lower()  # not the folder: e5/all-MiniLM-L6-v2
        for family in _FAMILIES:
            if re.search(family.names, words):
                return family
    return None


def _own_prompts(directory: Path) -> tuple[str, str] | None:
    """The prompts for queries and passages in the files of sentence-transformers; None without any."""
    config = _read(directory / "config_sentence_transformers.json") or {}
    prompts = config.get("prompts") or {}
    default = prompts.get(config.get("default_prompt_name")) or ""
    query, passage = (
        next((prompts[name] for name in names if prompts.get(name)), default)
        for names in (("query",), ("document", "passage", "corpus"))
    )
    return (query, passage) if query or passage else None


def _own_pooling(directory: Path) -> Literal["mean", "cls"] | None:
    """The pooling in the files of sentence-transformers; None without such files.

    Raises UserError if the model has layers after the pooling, or uses another kind of pooling.
    """
    for module in _read(directory / "modules.json") or []:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise UserError(f"{directory} has a module {kind!r} (modules.json), which is not supported")
    config = _read(directory / "1_Pooling" / "config.json") or {}
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes += [config["pooling_mode"]] if "pooling_mode" in config else []
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise UserError(f"{directory} pools with {', '.join(map(str, modes))}; mean and cls are supported")
    return _POOLINGS[modes[0]]


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    with parsing(path):
        return json.loads(path.read_text(encoding="utf-8"))
