"""`srl train export`: a checkpoint as a directory that any tool loads, of either backend."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.training import SETTINGS, tokenizer
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from srl.cli import main
from srl.config import Config, load_config, save_config
from srl.errors import UserError
from srl.files import checksums, write_json, write_manifest
from srl.model import load_model, load_tokenizer, model_digest, new_model, save_model
from srl.protocol import STOP_STRINGS
from srl.train.export import cast, export, is_tokenizer_read_as_written, whole_checkpoints, write_weights
from srl.train.make_missing import BASE_MODEL
from srl.train.model_settings import settings_of
from srl.train.model_size import shape_of
from srl.train.named_checkpoint import model_directory
from srl.train.sharded_weights import merged, shard_files, sharding
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
    return folder


def made(folder: Path, backend: str, **settings: object) -> None:
    """The directory of a run without checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    save_config(folder, load_config(None, None, "grpo", {**SETTINGS, **settings}).config)
    known = {"preset": "tiny", "algo": "grpo", "started": "2026-01-01T00:00:00+00:00"}
    write_json(folder / "run.json", {"format": 1, **known, "backend": backend, "index_digest": "abc"})


def model(seed: int = 0, **sizes: int):
    small = {"layers": 1, "width": 16, "heads": 2, "ffn": 16, "max_length": 64, **sizes}
    return new_model("qwen2", vocab_size=len(tokenizer()), eos_token_id=0, pad_token_id=1, seed=seed, **small)


@pytest.fixture
def verl_run(workspace: Path) -> Path:
    """A run on verl with step 3, whole, and step 6, half-written; one process saved each."""
    folder = workspace / "runs" / NAME
    made(folder, "verl")
    for step in (3, 6):
        saved_by_one(model(step), folder / "checkpoints" / f"global_step_{step}" / "actor")
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3", encoding="utf-8")
    tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def saved_by_one(policy, actor: Path) -> None:
    """As verl lays a checkpoint out, of one process and so of undivided weights."""
    policy.config.save_pretrained(actor / "huggingface")
    torch.save(dict(policy.state_dict()), actor / "model_world_size_1_rank_0.pt")
    write_json(actor / "fsdp_config.json", {"FSDP_version": 2, "world_size": 1})


# --- a run of the local backend ---


def test_export_is_the_newest_checkpoint_without_trainer_state(run: Path, tmp_path: Path) -> None:
    found = export(run, tmp_path / "out")
    assert (found.step, found.backend, found.dtype, found.run) == (20, "local", "float32", NAME)
    source = run / "checkpoints" / "step-000020"
    there = {file.name for file in (tmp_path / "out").iterdir()}
    expected = {file.name for file in source.iterdir()} - {"trainer"} | {"manifest.json"}
    assert there == expected
    assert model_digest(tmp_path / "out") == model_digest(source)
    assert (tmp_path / "out" / "srl.json").read_text() == (source / "srl.json").read_text()


def test_step_is_chosen_and_a_wrong_one_lists_those_there_are(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", step=10)
    assert model_digest(tmp_path / "out") == model_digest(model(10))
    with pytest.raises(UserError, match=r"no checkpoint of step 15; it has 10, 20$"):
        export(run, tmp_path / "other", step=15)


def test_weights_are_linked_and_small_files_are_not(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    links = {file.name: os.stat(file).st_nlink for file in (tmp_path / "out").iterdir()}
    assert links.pop("model.safetensors") == 2
    assert set(links.values()) == {1}


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


def test_run_without_a_whole_checkpoint_is_said(workspace: Path, tmp_path: Path) -> None:
    made(workspace / "runs" / NAME, "local")
    with pytest.raises(UserError, match="no complete checkpoint yet"):
        export(workspace / "runs" / NAME, tmp_path / "out")
    with pytest.raises(UserError, match=r"not a run: it has no run\.json"):
        export(tmp_path, tmp_path / "out")


# --- a run on verl ---


def test_newest_whole_checkpoint_of_verl_is_taken(verl_run: Path, tmp_path: Path) -> None:
    found = export(verl_run, tmp_path / "out")
    assert (found.step, found.backend, found.dtype) == (3, "verl", "float32")
    assert model_digest(tmp_path / "out") == model_digest(model(3))
    with pytest.raises(UserError, match="no checkpoint of step 6; it has 3"):
        export(verl_run, tmp_path / "other", step=6)


def test_checkpoint_whose_actor_was_dropped_or_is_not_whole_is_none(verl_run: Path) -> None:
    folder = verl_run / "checkpoints"
    (folder / "latest_checkpointed_iteration.txt").write_text("9\n", encoding="utf-8")
    assert list(whole_checkpoints(verl_run)) == [3, 6]
    (folder / "global_step_9" / "critic").mkdir(parents=True)
    (folder / "global_step_6" / "actor" / "model_world_size_1_rank_0.pt").unlink()
    assert list(whole_checkpoints(verl_run)) == [3]
    (folder / "latest_checkpointed_iteration.txt").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"latest_checkpointed_iteration\.txt"):
        whole_checkpoints(verl_run)


def test_exported_model_is_a_directory_like_a_local_checkpoint(verl_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(verl_run, out)
    assert {file.name for file in out.iterdir()} == {
            "config.json", "generation_config.json", "manifest.json", "model.safetensors", "srl.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert stop_strings(out) == list(STOP_STRINGS)
    loaded, plain = load_model(out, device="cpu"), AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([tokenizer().encode(TEXT)])
    with torch.no_grad():
        expected = model(3)(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
        assert torch.equal(plain(ids).logits, expected)
    assert settings_of(out, None, None, {}, []).data.template == "tiny"


def test_what_a_model_was_taught_is_in_srl_json(verl_run: Path, tmp_path: Path) -> None:
    known = {"format": 1, "step": 3, "template": "tiny", "search": True}
    export(verl_run, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "srl.json").read_text())
    assert said == {**known, "index_digest": "abc", "retriever_digests": {}}
    write_json(verl_run / "checkpoints" / "global_step_3" / "srl.json", {**known, "index_digest": "other"})
    export(verl_run, tmp_path / "out", overwrite=True)
    said = json.loads((tmp_path / "out" / "srl.json").read_text())
    assert said == {**known, "index_digest": "other"}


def test_tokenizer_is_the_runs_also_where_the_checkpoint_has_another(verl_run: Path, tmp_path: Path) -> None:
    odd = verl_run / "checkpoints" / "global_step_3" / "actor" / "huggingface" / "tokenizer.json"
    odd.write_text("{}", encoding="utf-8")
    out = export(verl_run, tmp_path / "out").directory
    for read in (
        PreTrainedTokenizerFast.from_pretrained(out),
        load_tokenizer(out)[0],
    ):
        assert read.encode(TEXT) == tokenizer().encode(TEXT)
    shutil.rmtree(verl_run / "tokenizer")
    with pytest.raises(UserError, match="empty or missing"):
        export(verl_run, tmp_path / "other")


def test_whole_model_that_megatron_saved_is_taken(verl_run: Path, tmp_path: Path) -> None:
    actor = verl_run / "checkpoints" / "global_step_3" / "actor"
    shutil.rmtree(actor)
    model(5).bfloat16().save_pretrained(actor / "model" / "huggingface")
    assert export(verl_run, tmp_path / "out").dtype == "bfloat16"
    assert model_digest(tmp_path / "out") == model_digest(model(5).bfloat16())
    assert stop_strings(tmp_path / "out") == list(STOP_STRINGS)
    assert export(verl_run, tmp_path / "wide", dtype="float32").dtype == "float32"


def test_adapter_of_megatron_is_refused(workspace: Path, tmp_path: Path) -> None:
    run = workspace / "runs" / NAME
    made(run, "verl", **{"model.lora_rank": 4})
    model().save_pretrained(run / "checkpoints" / "global_step_1" / "actor" / "model" / "huggingface")
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
    with pytest.raises(UserError, match="Megatron cannot be merged"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parts_of_megatrons_own_are_said(verl_run: Path, tmp_path: Path) -> None:
    actor = verl_run / "checkpoints" / "global_step_3" / "actor"
    shutil.rmtree(actor)
    (actor / "model" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(UserError, match=r"verl\.model_merger merge --backend megatron"):
        export(verl_run, tmp_path / "out")


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


def test_adapter_that_is_not_read_is_refused(tmp_path: Path) -> None:
    dora = {f"{LINEAR}.lora_magnitude_vector.default.weight": torch.ones(2)}
    with pytest.raises(UserError, match="adapter of an unsupported kind"):
        merged(adapted(tmp_path / "a", **dora))
    embedding = {"base_model.model.embed.lora_embedding_A.default": torch.ones(1, 2)}
    folder = adapted(tmp_path / "c", **embedding)
    (file,) = shard_files(folder)
    torch.save({name: tensor for name, tensor in torch.load(file).items() if LINEAR not in name}, file)
    with pytest.raises(UserError):
        merged(folder)
    folder = adapted(tmp_path / "b")
    (file,) = shard_files(folder)
    torch.save({name: tensor for name, tensor in torch.load(file).items() if "lora" in name}, file)
    with pytest.raises(UserError, match="an adapter without the weights"):
        merged(folder)


# --- weights that do not fit ---


def test_file_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Danger:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'harmed'}",)

    saved_by_one(model(), tmp_path / "actor")
    torch.save({"weight": Danger()}, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    with pytest.raises(UserError, match="cannot be read as weights alone"):
        merged(tmp_path / "actor")
    assert not (tmp_path / "harmed").exists()


def test_shard_that_is_cut_short_is_said(tmp_path: Path) -> None:
    saved_by_one(model(), tmp_path)
    (file,) = shard_files(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read as weights alone"):
        merged(tmp_path)


def test_undivided_weight_that_differs_between_processes_is_an_error(tmp_path: Path) -> None:
    saved_by_one(model(), tmp_path)
    write_json(tmp_path / "fsdp_config.json", {"FSDP_version": 2, "world_size": 2})
    for rank in range(2):
        torch.save(
            {"a": torch.zeros(2), "b": torch.ones(2) * rank}, tmp_path / f"model_world_size_2_rank_{rank}.pt"
        )
    with pytest.raises(UserError, match="b is not sharded, but differs"):
        merged(tmp_path)


def placed(*placements: Placement) -> SimpleNamespace:
    """What `sharding` looks at of a tensor that four processes hold, two by two."""
    return SimpleNamespace(
        placements=placements, device_mesh=SimpleNamespace(mesh=torch.tensor([[0, 1], [2, 3]]))
    )


def test_parts_of_a_weight_are_those_of_one_group_of_copies() -> None:
    assert sharding("w", placed(Replicate(), Shard(1))) == ([0, 1], 1)
    assert sharding("w", placed(Shard(0), Replicate())) == ([0, 2], 0)
    assert sharding("w", placed(Replicate(), Replicate())) == ([0], None)
    for odd in ((Shard(0), Shard(1)), (Replicate(), Partial())):
        with pytest.raises(UserError, match="w is sharded in a way that is not supported"):
            sharding("w", placed(*odd))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop("model.norm.weight"), "config.json: missing model.norm.weight"),
        (lambda state: state.update(more=torch.zeros(1)), "config.json: unknown more"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(3)}),
            "of another shape: model.norm.weight",
        ),
        (
            lambda state: state.update({"lm_head.weight": state["lm_head.weight"] + 1}),
            "lm_head.weight are tied by config.json, but their values differ",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, change, complaint: str) -> None:
    state = dict(model().state_dict())
    change(state)
    model().config.save_pretrained(tmp_path / "described")
    with pytest.raises(UserError, match=complaint):
        write_weights(tmp_path / "out", state, tmp_path / "described")


def test_number_too_large_for_the_dtype_is_said() -> None:
    with pytest.raises(UserError, match="w has values too large for float16"):
        cast({"w": torch.tensor([1e6])}, torch.float16)
    infinite = cast({"w": torch.tensor([float("inf")]), "n": torch.tensor([70000])}, torch.float16)
    assert infinite["n"].tolist() == [70000]


# --- tokenizers ---


def test_tokenizer_that_auto_tokenizer_misreads_is_told_from_others(tmp_path: Path) -> None:
    assert not is_tokenizer_read_as_written(BASE_MODEL)
    tokenizer().save_pretrained(tmp_path)
    new_model(
        "llama", vocab_size=len(tokenizer()), layers=1, width=16, heads=2, ffn=16
    ).config.save_pretrained(tmp_path)
    assert is_tokenizer_read_as_written(tmp_path)


def test_exported_tokenizer_trusts_no_code(run: Path, tmp_path: Path) -> None:
    exported = export(run, tmp_path / "out").directory
    for file in exported.glob("*.json"):
        assert "trust_remote_code" not in file.read_text()


# --- the command, and other commands that are given a run ---


def test_command_says_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my model"
    assert main(["train", "export", "last@10", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}  step 10 of {NAME}, float32\n"
    command = (
        f"srl --workspace {run.parent.parent} eval run '{out}' --config {run / 'config.yaml'} --data FILE"
    )
    assert command in said.err
    assert main(["train", "export", "00ff", "--out", str(out), "--overwrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"directory": str(out), "run": NAME, "backend": "local", "step": 20, "dtype": "float32"}


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


def test_file_that_somebody_put_into_an_exported_model_is_not_dropped(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", step=10)
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"srl did not write thesis\.tex in it"):
        export(run, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").is_file()


def test_damaged_checkpoint_is_not_exported_and_the_one_before_is_named(run: Path, tmp_path: Path) -> None:
    path = run / "checkpoints" / "step-000020"
    write_manifest(path, "checkpoint", {"files": checksums(path)})
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_text() != (path / "manifest.json").read_text()
    (path / "srl.json").write_text("{}")
    with pytest.raises(UserError, match=r"srl\.json is damaged.*the checkpoint before it is step-000010"):
        export(run, tmp_path / "other")


def test_nothing_is_left_of_an_export_that_fails(verl_run: Path, tmp_path: Path) -> None:
    (verl_run / "checkpoints" / "global_step_3" / "actor" / "huggingface" / "config.json").unlink()
    with pytest.raises(UserError, match="does not describe a causal language model"):
        export(verl_run, tmp_path / "new" / "out")
    assert list(tmp_path.glob("new")) == []


def test_run_given_as_a_model_says_how_to_name_its_checkpoint(run: Path) -> None:
    with pytest.raises(UserError, match=f"{run}@best is the best checkpoint of that run"):
        load_model(run)
    with pytest.raises(UserError, match="not a model directory") as told:
        load_model(run / "checkpoints")
    assert "@best" not in str(told.value)
    assert f"`srl train export {run} --out DIR` writes its model" in str(told.value)


def test_run_on_verl_given_as_a_model_says_to_export_it(verl_run: Path) -> None:
    with pytest.raises(UserError, match=f"trained on verl.*srl train export {NAME} --out DIR"):
        model_directory("last", Workspace.resolve())
    actor = verl_run / "checkpoints" / "global_step_3" / "actor"
    for given in (verl_run, actor, actor / "huggingface"):
        with pytest.raises(UserError, match=f"`srl train export {verl_run} --out DIR`"):
            load_model(given)
    with pytest.raises(UserError, match=f"`srl train export {verl_run} --out DIR`"):
        shape_of(Config(), verl_run, needs_critic=False)
