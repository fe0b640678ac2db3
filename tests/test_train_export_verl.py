"""Checkpoints that verl's own code saved in parts, exported: not a bit is lost."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_models import new_model
from tests.training import tokenizer

from srl.models.weights import save_model
from srl.train.export import merged

pytestmark = [pytest.mark.slow, pytest.mark.must_run]
SCRIPT = Path(__file__).with_name("verl_shards.py")


def model():
    """Sizes that two processes cannot divide evenly."""
    return new_model(
        "qwen2", vocab_size=len(tokenizer()), layers=2, width=20, heads=2, kv_heads=1, ffn=21, max_length=64,
        eos_token_id=0, pad_token_id=1, seed=7,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `verl_shards.py` made of `model()`."""
    pytest.importorskip("verl")
    place = tmp_path_factory.mktemp("verl")
    save_model(model(), tokenizer(), place / "model")
    (place / "out").mkdir()
    command = [sys.executable, str(SCRIPT), str(place / "model"), str(place / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=place, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return place / "out"


@pytest.mark.parametrize(
    ("name", "dtype"), [("fsdp2", torch.float32), ("fsdp", torch.float32), ("copies", torch.bfloat16)]
)
def test_parts_make_the_weights_that_were_divided(saved: Path, name: str, dtype: torch.dtype) -> None:
    found, expected = merged(saved / name), model().state_dict()
    assert found.keys() == expected.keys()
    for weight, tensor in found.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[weight].to(dtype)), weight


def test_merged_weights_are_those_of_verls_own_tool(saved: Path) -> None:
    theirs = load_file(saved / "merged" / "model.safetensors")
    ours = merged(saved / "fsdp2")
    assert theirs.keys() == ours.keys() - {"lm_head.weight"}
    assert all(torch.equal(ours[name].bfloat16(), theirs[name]) for name in theirs)


def test_adapter_is_merged_as_peft_does(saved: Path) -> None:
    expected, plain = load_file(saved / "adapter.safetensors"), model().state_dict()
    found = merged(saved / "adapter")
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    assert not torch.equal(
        found["model.layers.1.mlp.up_proj.weight"], plain["model.layers.1.mlp.up_proj.weight"]
    )


def test_shards_of_a_gpu_are_read_without_one(saved: Path, tmp_path: Path) -> None:
    """The name of the device in the files is the only difference; there is no GPU here to make real ones."""
    shutil.copytree(saved / "fsdp2", tmp_path / "gpu")
    files = sorted((tmp_path / "gpu").glob("model_*.pt"))
    for file in files:
        rename_device(file)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(files[0], weights_only=True)
    found, expected = merged(tmp_path / "gpu"), model().state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def rename_device(file: Path) -> None:
    """Put `cuda:0` where a saved file says `cpu`."""
    import zipfile

    with zipfile.ZipFile(file) as archive:
        parts = {entry: archive.read(entry) for entry in archive.namelist()}
    (pickled,) = (name for name in parts if name.endswith("data.pkl"))
    parts[pickled] = parts[pickled].replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
