"""The presets that reproduce published settings: what they come to, and where each number has its source.

That they are what was published, `tests/test_published_import.py` holds against the scripts' own settings.
"""

import pytest

from srl.config import load_config
from srl.train.memory import PUBLISHED, shape_of

MODELS = [
    ("search-r1-v0.2", "Qwen/Qwen2.5-3B"),
    ("search-r1-v0.2", "Qwen/Qwen2.5-3B-Instruct"),
    ("search-r1-v0.2", "Qwen/Qwen2.5-7B"),
    ("search-r1-v0.2", "Qwen/Qwen2.5-7B-Instruct"),
    ("search-r1-v0.2", "meta-llama/Llama-3.2-3B"),
    ("search-r1-v0.3", "Qwen/Qwen2.5-3B"),
    ("search-r1-v0.3", "Qwen/Qwen2.5-7B-Instruct"),
    ("search-r1-v0.3", "meta-llama/Llama-3.2-3B-Instruct"),
    ("search-r1-32b", "Qwen/Qwen2.5-32B"),
    ("search-r1-llama", "meta-llama/Llama-3.2-3B"),
]


@pytest.mark.parametrize(("preset", "model"), MODELS)
def test_the_longest_episode_fits_the_model(preset, model):
    config = load_config(preset, algo="grpo", flags={"model.path": model}).config
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= PUBLISHED[model.removesuffix("-Instruct")]["max_position_embeddings"]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_shape_of_a_published_model_has_its_number_of_parameters(model, parameters):
    """The numbers are those of the safetensors that the makers publish."""
    assert shape_of(load_config("one-gpu").config, model, needs_critic=False).parameters == parameters
