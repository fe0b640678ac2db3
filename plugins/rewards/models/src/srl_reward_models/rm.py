"""A reward model: a Hugging Face sequence classifier that reads an answer, or an episode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from srl.errors import UserError, error_line
from srl.models.load import load_tokenizer, loading_fault, named_directory, pick_device, pick_dtype
from srl.models.weights import quietly
from srl.trajectory import Score, Trajectory

LONGEST = 4096
"""The tokens that are read by default of a model that takes more."""
_CLASSIFIER = "ForSequenceClassification"
_ALSO = "; with --backend verl rewards run in processes without a GPU: set reward.rm.device=cpu"
Encoded = dict[str, list[int]]
"""The inputs of the model for one text, by name, each as long as the text in tokens."""


class Options(BaseModel):
    """Which model, what it reads, and how it runs."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True,
        protected_namespaces=(),
    )  # fmt: skip

    model: str = Field(min_length=1, json_schema_extra={"path": True})
    """A sequence classifier with one label (the score is its logit) or two (the difference of the logits): a
    Hugging Face directory with safetensors, or a name on the hub."""
    reads: Literal["answer", "episode"] = "answer"
    """answer: the question and the answer. episode: the question and all turns, with the passages. Both go
    through the chat template of the model's tokenizer; without one, question and answer are two texts."""
    no_answer: float | None = None
    """Value of an episode without an answer, if reads=answer. null: the model reads an empty answer."""
    max_length: int | None = Field(default=None, ge=8)
    """Most tokens that are read; a longer text loses its middle. null: the model's limit, at most 4,096."""
    batch_size: int = Field(default=1, ge=1)
    """Texts per forward pass. 1: a score is the same, bit for bit, whatever else is scored. More is faster on
    a GPU, and the last digits of a score then depend on the other texts of its batch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision. auto: bfloat16 on a GPU that computes in it, else float32."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (a GPU if there is one), cpu, cuda or cuda:1."""
    trust_remote_code: bool = False
    """Run Python code from the model's directory. Only for models whose authors you trust."""


class ModelReward:
    """The score of a sequence classifier, with the part `truncated`: 1 where the text was too long.

    Configuration and tokenizer are read at once, the weights by `load`. A score that is not finite is no
    score. Raises UserError.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        trusted = options.trust_remote_code
        self.directory = named_directory(options.model, trusted, "reward.rm")
        self._config = _classifier_config(self.directory, trusted)
        self._tokenizer: Any = load_tokenizer(self.directory, trusted)[0]
        try:
            self._device = pick_device(options.device)
        except UserError as error:
            raise UserError(f"reward.rm.device: {error}{_ALSO}") from error
        self._dtype = pick_dtype(options.dtype, self._device)
        self._longest = self._limit()
        self._special = _special_tokens(self._tokenizer)
        self._check_reading()
        self._model: Any = None

    def load(self) -> None:
        """Read the weights, which takes a while; the second time nothing happens. Raises UserError."""
        if self._model is None:
            model = _load(self.directory, self._dtype, self.options.trust_remote_code)
            self._model = model.to(self._device)

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        self.load()
        scores = [Score(0.0)] * len(trajectories)
        texts: dict[int, Encoded] = {}
        for row, trajectory in enumerate(trajectories):
            if trajectory.valid and self._is_missing(trajectory):
                scores[row] = Score(float(self.options.no_answer or 0.0), {"truncated": 0.0})
            elif trajectory.valid:
                texts[row] = self._encoded(trajectory)
        for row, value in self._values(texts):
            too_long = len(texts[row]["input_ids"]) > self._longest
            error = self._fault(value)
            scores[row] = Score(0.0 if error else value, {"truncated": float(too_long)}, error=error)
        return scores

    def _is_missing(self, trajectory: Trajectory) -> bool:
        options = self.options
        return options.no_answer is not None and options.reads == "answer" and trajectory.answer is None

    def _values(self, texts: dict[int, Encoded]) -> Iterator[tuple[int, float]]:
        """The rows of `texts` with their values, the longest text first: a lack of memory shows at once."""
        order = sorted(texts, key=lambda row: -len(texts[row]["input_ids"]))
        for start in range(0, len(order), self.options.batch_size):
            rows = order[start : start + self.options.batch_size]
            yield from zip(
                rows, self._forward([_cut(texts[row], self._longest) for row in rows]), strict=True
            )

    @torch.inference_mode()
    def _forward(self, texts: Sequence[Encoded]) -> list[float]:
        """The value of each text: its logit, or the second logit minus the first."""
        width = max(len(text["input_ids"]) for text in texts)
        pads = {"input_ids": self._config.pad_token_id or 0}
        inputs = {
            name: torch.tensor(
                [text[name] + [pads.get(name, 0)] * (width - len(text[name])) for text in texts],
                device=self._device,
            )
            for name in texts[0]
        }
        logits = self._model(**inputs).logits.double()  # (B, 1) or (B, 2)
        return (logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)).tolist()

    def _fault(self, value: float) -> str:
        """Why `value` is no score; empty where it is one."""
        if math.isfinite(value):
            return ""
        precision = str(self._dtype).removeprefix("torch.")
        advice = "its weights are damaged" if precision == "float32" else "try reward.rm.dtype=float32"
        return f"the model {self.options.model} gave {value} in {precision}; {advice}"

    def _encoded(self, trajectory: Trajectory) -> Encoded:
        """The text of an episode as inputs of the model, not yet cut."""
        messages = self._messages(trajectory)
        if self._tokenizer.chat_template is None:
            encoded = self._tokenizer(*(message["content"] for message in messages), verbose=False)
        else:
            encoded = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        return {name: list(values) for name, values in encoded.items()}

    def _messages(self, trajectory: Trajectory) -> list[dict[str, str]]:
        """The question, then the answer, or the turns of the policy and what it read."""
        parts_by_role = [("user", trajectory.question.text)]
        if self.options.reads == "answer":
            parts_by_role.append(("assistant", trajectory.answer or ""))
        else:
            parts_by_role += [
                ("assistant" if part.is_policy else "user", part.text)
                for part in trajectory.segments
                if part.kind != "prompt"
            ]
        return [
            {"role": role, "content": self._plain("".join(text for _, text in parts))}
            for role, parts in groupby(parts_by_role, key=lambda pair: pair[0])
        ]

    def _plain(self, text: str) -> str:
        """`text` with no special token in it: one that the policy or a passage spells gets a space inside."""
        text = text.encode("utf-8", "replace").decode()  # tokenizers reject unpaired surrogates
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _limit(self) -> int:
        """The most tokens that are read."""
        positions = getattr(self._config, "max_position_embeddings", None) or LONGEST
        longest = min(positions, self._tokenizer.model_max_length)
        limit = self.options.max_length
        if limit is not None and limit > longest:
            raise UserError(
                f"reward.rm.max_length={limit}: {self.options.model} takes at most {longest} tokens; "
                f"type: --set reward.rm.max_length={longest}"
            )
        return limit or min(longest, LONGEST)

    def _check_reading(self) -> None:
        """Raises UserError for a model that cannot read what it is asked to, or not so many at once."""
        options, where = self.options, self.options.model
        if options.batch_size > 1 and self._config.pad_token_id is None:
            raise UserError(
                f"reward.rm.batch_size={options.batch_size}: the config.json of {where} names no "
                "pad_token_id, so its texts are scored one by one; set reward.rm.batch_size=1"
            )
        if self._tokenizer.chat_template is None:
            if options.reads == "episode":
                raise UserError(
                    f"reward.rm.reads=episode needs a chat template, and the tokenizer of {where} has none; "
                    "set reward.rm.reads=answer"
                )
            return
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
        try:
            self._tokenizer.apply_chat_template(turns if options.reads == "episode" else turns[:2])
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"the chat template of {where} does not take turns of user and assistant: {error_line(error)}"
            ) from error


def _classifier_config(directory: Path, trust_remote_code: bool) -> Any:
    """The configuration of the model in `directory`. Raises UserError unless it is a sequence classifier."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise UserError(f"{directory}: config.json does not load: {error_line(error)}") from error
    names = config.architectures or ["model of no known kind"]
    if not trust_remote_code and not any(name.endswith(_CLASSIFIER) for name in names):
        raise UserError(f"reward.rm.model: {directory} is a {names[0]}; expected a sequence classifier")
    if config.num_labels not in (1, 2):
        raise UserError(f"reward.rm.model: {directory} has {config.num_labels} labels; expected 1 or 2")
    return config


def _load(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The classifier, in eval mode. Raises UserError."""
    from transformers import AutoModelForSequenceClassification

    try:
        with quietly():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                str(directory), dtype=dtype, use_safetensors=True, local_files_only=True,
                trust_remote_code=trust_remote_code, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:
        why = loading_fault(error)
        raise UserError(f"{directory} could not be loaded as a sequence classifier: {why}") from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{directory} is incomplete: no weights for {', '.join(missing[:3])}")
    return model.eval()


def _special_tokens(tokenizer: Any) -> list[str]:
    """The texts of the special tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = {text for text in added | set(tokenizer.all_special_tokens) if len(text) > 1}
    return sorted(texts, key=lambda text: (-len(text), text))


def _cut(text: Encoded, longest: int) -> Encoded:
    """The inputs without their middle where they are longer than `longest` tokens."""
    if len(text["input_ids"]) <= longest:
        return text
    tail = longest // 2
    return {name: values[: longest - tail] + values[-tail:] for name, values in text.items()}
