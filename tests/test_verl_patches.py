"""Every patch of verl: what goes wrong without it, which is why it is there, and that it is gone with it.

A test that fails on the first of its lines says that verl has caught up: the patch can go.
"""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.live_server import free_port
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import config

from srl.config import save_config
from srl.errors import UserError
from srl.models.weights import save_model
from srl.train.verl import patches, without_gpu

CHANGES = re.compile(r"\b(put|replace|_wrap_train_batch)\(|^    (metadata\.version|utils\.\w+) = ", re.M)
"""How a patch changes another package."""
slow = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """name → what the probe of that patch found before and after it."""
    pytest.importorskip("verl")
    folder = tmp_path_factory.mktemp("probe")
    model = tiny_model(max_length=128)
    model.config.attention_dropout = 0.1
    save_model(model, byte_level_tokenizer(), folder / "model")
    warm = {"actor__optim__lr_warmup_steps": 2, "actor__optim__lr_scheduler_type": "linear"}
    save_config(folder, config(folder, **warm, data__train_batch_size=4, actor__ppo_mini_batch_size=4))
    stub = folder / "site" / "trl"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    names = {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none", "SRL_VERL_RUN": str(folder),
        "PYTHONPATH": str(stub.parent),
    }  # fmt: skip
    program = Path(__file__).with_name("verl_probe.py")
    said = subprocess.run(
        [sys.executable, "-W", "ignore", program, folder], env=os.environ | names, cwd=folder,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    return json.loads((folder / "answer.json").read_text())


def slowly(test):
    for mark in slow:
        test = mark(test)
    return test


@pytest.mark.parametrize("module", [patches, without_gpu])
def test_every_patch_is_in_the_table(module):
    """A patch is a public function without arguments that changes an attribute of another package."""
    table = (*patches.PATCHES, *without_gpu.PATCHES, *without_gpu.VLLM_PATCHES)
    known = {patch.apply for patch in table}
    source = ast.parse(inspect.getsource(module))
    named = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    changing = {name for name, node in named.items() if name != "put" and CHANGES.search(ast.unparse(node))}
    found = {name for name in changing if not name.startswith("_") and not arguments(named[name])}
    assert found, "no patch is found"
    assert {getattr(module, name) for name in found} <= known
    assert all(patch.where and patch.without and patch.fixed_in for patch in table)


def test_every_scoped_patch_is_in_the_table():
    """Elsewhere a patch is a function that sets an attribute of a module, or a private one of an object."""
    folder = Path(patches.__file__).parent
    modules = [path for path in folder.rglob("*.py") if path.stem not in ("patches", "without_gpu")]
    sources = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in modules}
    changing = {f"{stem}.{name}" for stem, source in sources.items() for name in replacing(source)}
    assert changing == {patch.name for patch in patches.SCOPED_PATCHES}
    assert all(patch.where and patch.without and patch.fixed_in for patch in patches.SCOPED_PATCHES)


def replacing(module: ast.Module) -> set[str]:
    """The functions of `module`, and methods as `Class.method`, that replace something of another package."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for owner in module.body:
        if isinstance(owner, ast.ClassDef):
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
            functions |= {f"{owner.name}.{node.name}": node for node in methods}
    return {
        name for name, node in functions.items() if any(replaces(one, imported) for one in ast.walk(node))
    }


def replaces(node: ast.AST, imported: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("put", "setattr")
    targets = [one for one in getattr(node, "targets", ()) if isinstance(one, ast.Attribute)]
    owners = {one.attr: one.value.id for one in targets if isinstance(one.value, ast.Name)}
    return any(
        owner in imported or (re.match("_[a-z]", name) and owner != "self") for name, owner in owners.items()
    )


@pytest.mark.parametrize(
    "changing",
    [
        "put(buffer, 'wait', ours)",
        "utils.wait = ours",
        "buffer._wait = ours",
        "setattr(buffer, 'wait', ours)",
    ],
)
def test_a_scoped_patch_is_recognised(changing):
    source = f"from verl import utils\nclass Trainer:\n    def changed(self):\n        {changing}\n"
    assert replacing(ast.parse(source)) == {"Trainer.changed"}
    assert not replacing(ast.parse(source.replace(changing, "self._wait = buffer.interval = 1")))


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.args, *function.args.kwonlyargs]


@slowly
def test_every_patch_is_probed(found):
    known = {patch.name for patch in (*patches.PATCHES, *without_gpu.PATCHES)}
    assert set(found) == known | {"platform", "dropout", "again"}


@slowly
def test_verl_has_no_platform_for_a_cpu(found):
    before, after = found["platform"]
    assert "Unknown platform 'cpu'" in before
    assert after == ["cpu", "FSDPEngineWithLMHead", "FSDPEngineWithValueHead"]


@slowly
def test_verl_joins_one_device_twice(found):
    before, after = found["process_group_has_one_backend"]
    assert "uplicate device type cpu" in before
    assert after == "cpu:gloo"


@slowly
def test_verl_pins_the_reference(found):
    before, after = found["reference_is_not_offloaded"]
    assert isinstance(before, str), "verl's reference now loads without a GPU: the patch can go"
    assert "accelerator" in before or "NVIDIA" in before or "CUDA" in before, before
    assert after == 0


@slowly
def test_verl_finds_no_value_head_or_a_random_one(found):
    """Without flash-attention there is no critic; with it, the head starts at random numbers."""
    before, after = found["critic_head_starts_at_zero"]
    assert "not a value head model" in str(before) or before > 0
    assert after == 0


@slowly
def test_verl_stumbles_over_trl(found):
    before, after = found["trl_is_not_used"]
    assert "cannot import name 'AutoModelForCausalLMWithValueHead'" in before
    assert after.endswith("Qwen2ForCausalLM")


@slowly
def test_verl_trains_without_dropout_because_of_what_it_is_told_of_the_model(found):
    before, after = found["dropout"]
    assert max(before) == pytest.approx(0.1)
    assert after == [0]


@slowly
def test_verl_learns_nothing_in_the_first_step_of_a_warm_up(found):
    """Ours rises to the full rate in two steps, and falls along a line from there."""
    before, after = found["local_learning_rate"]
    assert before == pytest.approx([0, 0.5, 1, 1])
    assert after == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8])


@slowly
def test_verl_counts_rows_that_are_out(found):
    assert found["sequence_means_skip_masked_rows"] == pytest.approx([3 / 4, 1])


@slowly
def test_verl_learns_from_a_mini_batch_in_which_every_search_failed(found):
    before, after = found["empty_mini_batch_is_skipped"]
    assert before == {"token-mean": True, "seq-mean-token-mean": True}
    assert after == {"token-mean": False, "seq-mean-token-mean": False}


@slowly
def test_patches_may_be_applied_twice(found):
    assert found["again"] is True


def test_a_verl_that_was_not_tested_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__="0.10.0"))
    with pytest.raises(UserError, match=r"verl 0\.10\.0 .* 0\.9\.1.*SRL_VERL_UNTESTED=1") as error:
        patches.apply(cpu=True)
    assert "\n" not in str(error.value)


def test_a_verl_that_was_not_tested_may_be_tried(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__="0.10.0"))
    monkeypatch.setenv("SRL_VERL_UNTESTED", "1")
    patches.check_version()
