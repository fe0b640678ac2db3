"""`srl train export`: a checkpoint as a directory that any tool loads, of either backend."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.native_models import family_codec, native
from tests.tiny_models import new_model
from tests.training import SETTINGS, tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from srl.cli import main
from srl.config import Config, load_config, save_config
from srl.config.sections import Model
from srl.errors import UserError
from srl.files import write_json, write_manifest
from srl.models.load import load_model, load_tokenizer
from srl.models.weights import model_digest, save_model
from srl.protocol import STOP_STRINGS
from srl.train.export import Exported, export, merged, with_weights
from srl.train.load_protocol import model_card
from srl.train.memory import shape_of
from srl.train.model_settings import settings_of
from srl.train.named_checkpoint import model_directory
from srl.workspace import Workspace

TEXT = "what flag has velmar ? <search> flag of velmar </search>"
NAME = "20260101T000000Z-test-grpo-s0-00ff"


@pytest.fixture
def run(workspace: Path) -> Path:
    """A run of the local backend with checkpoints of the steps 10 and 20, whose weights differ."""
    folder = workspace / "runs" / NAME
    made(folder, "local")
    for step in (10, 20):
        path = folder / "checkpoints" / f"step-{step:06d}"
        save_model(model(step), tokenizer(), path)
        write_json(path / "srl.json", {"format": 1, "step": step, "template": "tiny", "search": False})
        (path / "trainer").mkdir()
        (path / "trainer" / "actor-optimiser.pt").write_bytes(b"of the trainer")
        write_manifest(path, "checkpoint", {"files": {}})
    return folder


def made(folder: Path, backend: str, **settings: object) -> None:
    """The directory of a run without checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    save_config(folder, load_config(None, None, "grpo", {**SETTINGS, **settings}).config)
    known = {"preset": "tiny", "algo": "grpo", "started": "2026-01-01T00:00:00+00:00"}
    write_json(folder / "run.json", {"format": 1, **known, "backend": backend})


def model(seed: int = 0, **sizes: int):
    small = {"layers": 1, "width": 16, "heads": 2, "ffn": 16, "max_length": 64, **sizes}
    return new_model("qwen2", vocab_size=len(tokenizer()), eos_token_id=0, pad_token_id=1, seed=seed, **small)


@pytest.fixture
def verl_run(workspace: Path) -> Path:
    """A run on verl with step 3, whole, and step 6, half-written; one process saved each."""
    folder = workspace / "runs" / NAME
    made(folder, "verl")
    for step in (3, 6):
        path = folder / "checkpoints" / f"global_step_{step}"
        saved_by_one(model(step), path / "actor")
        write_json(path / "srl.json", {"format": 1, "step": step, "template": "tiny", "search": True})
    write_manifest(folder / "checkpoints" / "global_step_3", "checkpoint", {"files": {}})  # the last
    tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def saved_by_one(policy, actor: Path) -> None:
    """As verl lays a checkpoint out, of one process and so of undivided weights."""
    policy.config.save_pretrained(actor / "huggingface")
    torch.save(dict(policy.state_dict()), actor / "model_world_size_1_rank_0.pt")
    write_json(actor / "fsdp_config.json", {"FSDP_version": 2, "world_size": 1})


# --- a run of the local backend ---


def test_export_is_the_newest_checkpoint_without_trainer_state(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(run, out) == Exported(out, NAME, "local", 20, "float32")
    source = run / "checkpoints" / "step-000020"
    assert {file.name for file in out.iterdir()} == {file.name for file in source.iterdir()} - {"trainer"}
    assert model_digest(out) == model_digest(source)
    for name in ("srl.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_text() == (source / name).read_text()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        export(run, tmp_path / "out", overwrite=True)


def test_other_dtype_is_the_rounded_weights(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out", dtype="bfloat16").dtype == "bfloat16"
    saved = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(run / "checkpoints" / "step-000020" / "model.safetensors")
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name].bfloat16()) for name in source)
    assert load_tokenizer(tmp_path / "out")[0].encode(TEXT) == tokenizer().encode(TEXT)
    assert stop_strings(tmp_path / "out") == list(STOP_STRINGS)


def stop_strings(directory: Path) -> list[str]:
    return json.loads((directory / "generation_config.json").read_text())["stop_strings"]


# --- a run on verl ---


def test_newest_whole_checkpoint_of_verl_is_a_directory_like_a_local_one(
    verl_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = export(verl_run, out)
    assert (found.step, found.backend, found.dtype) == (3, "verl", "float32")
    with pytest.raises(UserError, match="no checkpoint of step 6; it has 3"):
        export(verl_run, tmp_path / "other", step=6)
    assert {file.name for file in out.iterdir()} == {
        "config.json", "generation_config.json", "manifest.json", "model.safetensors", "srl.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (model_digest(out), stop_strings(out)) == (model_digest(model(3)), list(STOP_STRINGS))
    ids = torch.tensor([tokenizer().encode(TEXT)])
    with torch.no_grad():
        for loaded in (load_model(out, device="cpu"), AutoModelForCausalLM.from_pretrained(out)):
            assert torch.equal(loaded(ids).logits, model(3)(ids).logits)
    assert settings_of(out, None, None, {}, []).data.template == "tiny"


def test_tokenizer_is_the_runs_also_where_the_checkpoint_has_another(verl_run: Path, tmp_path: Path) -> None:
    odd = verl_run / "checkpoints" / "global_step_3" / "actor" / "huggingface" / "tokenizer.json"
    odd.write_text("{}", encoding="utf-8")
    out = export(verl_run, tmp_path / "out").directory
    for read in (PreTrainedTokenizerFast.from_pretrained(out), load_tokenizer(out)[0]):
        assert read.encode(TEXT) == tokenizer().encode(TEXT)
    shutil.rmtree(verl_run / "tokenizer")
    with pytest.raises(UserError, match="tokenizer"):
        export(verl_run, tmp_path / "other")


# --- adapters ---

LINEAR = "base_model.model.layer"


def adapted(folder: Path, **more: torch.Tensor) -> Path:
    """A checkpoint of one linear layer with an adapter of rank 1 and alpha 3, and of `more`."""
    state = {
        f"{LINEAR}.base_layer.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        f"{LINEAR}.base_layer.bias": torch.tensor([5.0, 6.0]),
        f"{LINEAR}.lora_A.default.weight": torch.tensor([[10.0, 20.0]]),
        f"{LINEAR}.lora_B.default.weight": torch.tensor([[1.0], [-1.0]]),
    }
    folder.mkdir()
    torch.save({**state, **more}, folder / "model_world_size_1_rank_0.pt")
    write_json(folder / "fsdp_config.json", {"FSDP_version": 2, "world_size": 1})
    write_json(folder / "lora_train_meta.json", {"r": 1, "lora_alpha": 3})
    return folder


def test_adapter_is_added_to_its_weight(tmp_path: Path) -> None:
    found = merged(adapted(tmp_path / "a", **{"base_model.model.norm.weight": torch.ones(2)}))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "layer.weight": [[31.0, 62.0], [-27.0, -56.0]],
        "layer.bias": [5.0, 6.0],
        "norm.weight": [1.0, 1.0],
    }


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({f"{LINEAR}.lora_magnitude_vector.default.weight": torch.ones(2)}, ""),  # DoRA
        ({"base_model.model.embed.lora_embedding_A.default": torch.ones(1, 2)}, "embed"),
        ({}, "lora"),
    ],
    ids=["another kind", "of an embedding", "without its weights"],
)
def test_adapter_that_is_not_read_is_refused(
    tmp_path: Path, more: dict[str, torch.Tensor], kept: str
) -> None:
    file = adapted(tmp_path / "a", **more) / "model_world_size_1_rank_0.pt"
    torch.save({name: tensor for name, tensor in torch.load(file).items() if kept in name}, file)
    with pytest.raises(UserError):
        merged(tmp_path / "a")


# --- weights that do not fit ---


def test_file_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Danger:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'harmed'}",)

    saved_by_one(model(), tmp_path / "actor")
    torch.save({"weight": Danger()}, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    with pytest.raises(UserError):
        merged(tmp_path / "actor")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("model.norm.weight"),
        lambda state: state.update(more=torch.zeros(1)),
        lambda state: state.update({"model.norm.weight": torch.zeros(3)}),
        lambda state: state.update({"lm_head.weight": state["lm_head.weight"] + 1}),  # they are tied
    ],
    ids=["missing", "unknown", "another shape", "tied"],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, change) -> None:
    state = dict(model().state_dict())
    model().config.save_pretrained(tmp_path)
    assert model_digest(with_weights(tmp_path, state)) == model_digest(model())
    change(state)
    with pytest.raises(UserError):
        with_weights(tmp_path, state)


# --- the command, and other commands that are given a run ---


def test_command_says_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my model"
    assert main(["train", "export", "last@10", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}  step 10 of {NAME}, float32\n"
    assert f"--model '{out}'" in said.err
    assert f"srl --workspace {run.parent.parent} eval run '{out}' --config {run / 'config.yaml'}" in said.err
    assert main(["train", "export", "00ff", "--out", str(out), "--overwrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "directory": str(out), "run": NAME, "backend": "local", "step": 20, "dtype": "float32", "vllm": ""
    }  # fmt: skip


PARSERS = {"qwen2.5": "hermes", "qwen3.5": "qwen3_coder", "llama": "llama3_json", "lfm2": "lfm2"}


@pytest.mark.parametrize("family", PARSERS)
def test_a_models_card_names_vllms_parser_of_its_calls(family: str) -> None:
    assert model_card(native(family_codec(family)), Model())["vllm"].split()[-1] == PARSERS[family]


def test_command_says_how_to_serve_a_model_that_calls_tools_in_its_own_way(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = model_card(native(family_codec("qwen3.5")), Model())
    write_json(run / "checkpoints" / "step-000010" / "srl.json", {"format": 1, **card})
    out = tmp_path / "model"
    assert main(["train", "export", "last@10", "--out", str(out)]) == 0
    options = "--enable-auto-tool-choice --tool-call-parser qwen3_coder"
    assert f"--model {out} {options} --host" in capsys.readouterr().err
    assert json.loads((out / "srl.json").read_text())["vllm"] == options


def test_existing_directory_is_replaced_only_when_it_is_a_model_and_that_is_asked_for(
    run: Path, tmp_path: Path
) -> None:
    export(run, tmp_path / "out", step=10)
    with pytest.raises(UserError, match=r"exists already.*--overwrite"):
        export(run, tmp_path / "out")
    export(run, tmp_path / "out", overwrite=True)
    assert model_digest(tmp_path / "out") == model_digest(model(20))
    for own in (run, run.parent, run / "checkpoints", run / "checkpoints" / "step-000010", run / "run.json"):
        with pytest.raises(UserError, match=r"is not an exported model|found 'checkpoint'"):
            export(run, own, overwrite=True)
    assert (run / "checkpoints" / "step-000010" / "trainer" / "actor-optimiser.pt").is_file()


def test_run_on_verl_given_as_a_model_says_to_export_it(verl_run: Path) -> None:
    with pytest.raises(UserError, match=f"trained on verl.*srl train export {NAME} --out DIR"):
        model_directory("last", Workspace.resolve())
    actor = verl_run / "checkpoints" / "global_step_3" / "actor"
    for given in (verl_run, actor, actor / "huggingface"):
        with pytest.raises(UserError, match=f"`srl train export {verl_run} --out DIR`"):
            load_model(given)
    with pytest.raises(UserError, match=f"`srl train export {verl_run} --out DIR`"):
        shape_of(Config(), verl_run, needs_critic=False)
