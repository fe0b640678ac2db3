"""What the answers of an evaluation depend on, saved as `evaluation.json` in its run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.files import FORMAT, digest_file, digest_text, read_json, write_json
from srl.model import model_digest, pick_device, pick_dtype
from srl.protocol import Template
from srl.rollout.episode import EpisodeOptions
from srl.train.load_components import engine_name
from srl.train.search import retriever_settings
from srl.trajectory import SearchTool

FILE = "evaluation.json"
_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """One model in one setting; `key` is the same where the answers are the same.

    `names` is what the user calls the model and what it searches. They are for messages; the digests in
    `model` and `retrievers` count.
    """

    setting: str
    model: Mapping[str, Any]
    retrievers: list[dict[str, Any]]
    template: Mapping[str, Any]
    episode: Mapping[str, Any]
    engine: Mapping[str, Any]
    seed: int
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """32 hex digits of everything but the names."""
        parts = {name: value for name, value in asdict(self).items() if name != "names"}
        return digest_text(json.dumps(parts, sort_keys=True))

    def save(self, run: Path) -> None:
        write_json(run / FILE, {"format": FORMAT, "key": self.key, **asdict(self)})

    @classmethod
    def read(cls, run: Path) -> Subject:
        """What the evaluation in the directory `run` was of. Raises UserError."""
        return read_json(run / FILE, lambda key, **fields: cls(**fields))

    def changes(self, before: Subject) -> Iterator[str]:
        """What is no longer as in `before`, in words, if the user calls both the same; else nothing."""
        if (self.setting, self.names) != (before.setting, before.names):
            return
        if self.model != before.model:
            yield f"the model {self.names['model']}"
        if [one["index"] for one in self.retrievers] != [one["index"] for one in before.retrievers]:
            yield f"the index {self.names['search']}"


def subject_of(
    config: Config,
    name: str,
    *,
    setting: str,
    template: Template,
    options: EpisodeOptions,
    search: SearchTool | None,
    engine: Mapping[str, str],
) -> Subject:
    """The subject of evaluating the model called `name` with the settings of `config`.

    `engine` has the engine's name and precision where the section `rollout` does not.
    """
    used = {"name": engine_name(config), "float32_head": config.model.cast_lm_head_to_fp32}
    if used["name"] != "openai":
        used["dtype"] = str(pick_dtype(config.model.dtype, pick_device(config.model.device)))
    found = config.search
    return Subject(
        setting=setting,
        model=_model(config, name),
        retrievers=[asdict(one) for one in retriever_settings(config, search)],
        template={key: value for key, value in asdict(template).items() if key != "name"},
        episode=asdict(options),
        engine=used | dict(engine),
        seed=config.trainer.seed,
        names={"model": name, "search": str(found.index or found.url or config.data.corpus or "")},
    )


def _model(config: Config, name: str) -> dict[str, str]:
    """Digests of the weights and of the files beside them; of a server only its name is known."""
    section = config.model
    tokenizer = section.tokenizer or section.path
    known = {} if tokenizer is None else {"tokenizer": _small_files(Path(tokenizer))}
    if engine_name(config) == "openai":
        return known | {"server": name, "api": config.rollout.openai.api}
    directory = Path(str(section.path))
    return known | {"weights": model_digest(directory), "config": _small_files(directory)}


def _small_files(directory: Path) -> str:
    """One digest of the model's configuration and tokenizer files."""
    files = (directory / name for name in _BESIDE_WEIGHTS)
    return digest_text(*(part for file in files if file.is_file() for part in (file.name, digest_file(file))))
