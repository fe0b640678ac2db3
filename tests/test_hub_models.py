"""`--model ORG/NAME`: what is fetched from the hub, what the cache answers, and how each failure reads."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.hub import COMMIT, Hub, serving
from tests.store_builder import log_rows
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import Said, config, train, write_setting

from srl.config import Config, load_config
from srl.errors import UserError
from srl.models.hub import HubName, hub_name
from srl.models.load import load_model, load_tokenizer, named_directory
from srl.models.weights import model_digest, save_model
from srl.train.make_missing import with_local_models
from srl.train.run import resume
from srl.workspace import Workspace

NAME = "acme/searcher"
BAD = {"pytorch_model.bin": os.urandom(100), "original/consolidated.00.pth": os.urandom(100), "run.py": b"1"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A model in two shards, as large ones are published."""
    path = tmp_path_factory.mktemp("published") / "model"
    save_model(tiny_model(), byte_level_tokenizer(), path)
    model = load_model(path)
    model.save_pretrained(path, max_shard_size="100KB")
    (path / "model.safetensors").unlink()
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture
def hub(directory, monkeypatch, tmp_path) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in directory.iterdir()}
    fake = Hub({NAME: files | BAD})
    fake.tags = ["license:apache-2.0"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serving(fake) as running:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


def configured(path: str = NAME, **settings: object) -> Config:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config("tiny", flags={"model.path": path, **given}).config


def local(path: str = NAME, said: list[str] | None = None, **settings: object) -> Path:
    """The directory that the run's model has on this machine."""
    note = [].append if said is None else said.append
    found = with_local_models(configured(path, **settings), note)
    return Path(str(found.model.path))


def refused(path: str = NAME, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        local(path, **settings)
    return str(caught.value)


def test_a_model_is_fetched_once_into_the_hubs_cache(hub, directory, tmp_path):
    said: list[str] = []
    folder = local(said=said)
    assert folder == tmp_path / "hub" / "models--acme--searcher" / "snapshots" / COMMIT
    assert {file.name for file in folder.iterdir()} == {file.name for file in directory.iterdir()}
    assert model_digest(folder) == model_digest(directory)
    assert torch.equal(load_model(folder).lm_head.weight, load_model(directory).lm_head.weight)
    assert load_tokenizer(folder)[0].encode("Who?") == load_tokenizer(directory)[0].encode("Who?")
    assert len(said) == 1
    assert NAME in said[0]
    ranges = len(hub.ranges)
    assert local(said=said) == folder
    assert len(said) == 1
    assert len(hub.ranges) == ranges
    assert not {file for file, _ in hub.ranges} & BAD.keys()
    assert "run.py" in {file.name for file in local(model__trust_remote_code=True).iterdir()}


def test_a_directory_wins_over_a_name(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert local() == Path(NAME)
    assert hub.asked == []


def test_tokenizer_and_reference_take_names_too(hub):
    config = configured("here", model__tokenizer=NAME, ref__path=NAME, actor__use_kl_loss=True)
    found = with_local_models(config, lambda text: None)
    assert found.model.path == "here"
    assert hub_name(found.model.tokenizer) == hub_name(found.ref.path) == f"{NAME}@{COMMIT}"


def test_offline_the_cache_answers_or_one_line_says_what_to_do(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert NAME in refused()
    assert hub.asked == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = local()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    said: list[str] = []
    assert local(said=said) == folder
    assert said == hub.asked == []


@pytest.mark.parametrize("path", ["acme/unknown", f"{NAME}@v9", "bin/only", "only/adapter", "only/weights"])
def test_what_the_hub_does_not_have_is_one_line(hub, path):
    config = hub.repositories[NAME]["config.json"]
    hub.repositories["bin/only"] = {"config.json": config, "pytorch_model.bin": os.urandom(100)}
    tensors = {"adapter_config.json": b"{}", "adapter_model.safetensors": os.urandom(100)}
    hub.repositories["only/adapter"] = tensors
    hub.repositories["only/weights"] = {"model.safetensors": os.urandom(100)}
    assert path in refused(path)
    assert not {file for file, _ in hub.ranges} & {"pytorch_model.bin"}
    with pytest.raises(UserError) as caught:
        named_directory(path, False, "reward.rm")
    assert caught.value.key == "reward.rm.model"


def test_a_gated_model_asks_for_its_terms_and_a_token(hub, monkeypatch):
    hub.gated = {NAME}
    assert f"{hub.url}/{NAME}" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert local().is_dir()


def test_a_run_and_its_checkpoints_name_the_model_and_resume_without_the_hub(hub, tmp_path, workspace):
    setting = tmp_path / "towns"
    setting.mkdir()
    files = write_setting(setting)
    hub.repositories["acme/towns"] = {
        file.name: file.read_bytes() for file in Path(str(files["model.path"])).iterdir()
    }
    said = Said()
    train(config(setting, model__path="acme/towns"), workspace, terminal=said)
    (run,) = Workspace(workspace).all_runs()
    name = f"acme/towns@{COMMIT}"
    assert said.text.count("fetching acme/towns") == 1
    assert log_rows(run, "SELECT model FROM runs") == [(name,)]
    hub.asked.clear()
    summary = resume(run, workspace=Workspace(workspace), terminal=Said(), steps=3)
    assert summary.steps == 3
    assert hub.asked == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b@v1.0", HubName("a/b", "v1.0")),
        ("a/b/c", None), ("./a/b", None), ("/a/b", None), ("../b", None), ("gpt2", None),
        ("a/", None), ("a/b@", None),
    ],
)  # fmt: skip
def test_names_and_paths_are_told_apart(text, name):
    assert HubName.parse(text) == name
