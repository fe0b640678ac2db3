"""Shapes of models that presets name, as their makers publish them in `config.json`: no weights, no files.

A dry run needs nothing else of a model. Base and instruct models are of one shape.
"""

from __future__ import annotations

from typing import Any


def _qwen(width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """A Qwen2.5; `more` is what the small ones have otherwise."""
    return {
        "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False, **more,
    }  # fmt: skip


_SMALL = {"vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}

_BASE: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _qwen(896, 24, 14, 2, 4864, **_SMALL),
    "Qwen/Qwen2.5-1.5B": _qwen(1536, 28, 12, 2, 8960, **_SMALL),
    "Qwen/Qwen2.5-3B": _qwen(2048, 36, 16, 2, 11008, **_SMALL),
    "Qwen/Qwen2.5-7B": _qwen(3584, 28, 28, 4, 18944),
    "Qwen/Qwen2.5-14B": _qwen(5120, 48, 40, 8, 13824),
    "Qwen/Qwen2.5-32B": _qwen(5120, 64, 40, 8, 27648),
    "meta-llama/Llama-3.2-3B": {
        "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = _BASE | {
    f"{name}-Instruct": shape | ({"max_position_embeddings": 32768} if name.startswith("Qwen/") else {})
    for name, shape in _BASE.items()
}
