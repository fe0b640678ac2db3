"""What the import knows of Hydra and of verl is what they say themselves."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.import_inputs import GRPO, imported, said, search_r1, verl

from srl.config.keys import flat, plain
from srl.config.yaml12 import parse
from srl.errors import UserError
from srl.train.importing import import_file
from srl.train.importing.hydra import read_override, read_value, resolved
from srl.train.importing.key_table import KEY_TABLE, NO_DEFAULT, VERL

VALUES: dict[str, Any] = {
    "1": 1, "-7": -7, "1e-6": 1e-6, ".5": 0.5, "2.": 2.0, "1_000": 1000, "true": True, "False": False,
    "null": None, "words": "words", "a/b-c.d:80": "a/b-c.d:80", "'1'": "1", '"a, b"': "a, b", "[]": [],
    "[1,two,3.0]": [1, "two", 3.0], "[ 'a' , b ]": ["a", "b"], "[[1],[2,[3]]]": [[1], [2, [3]]],
    "${a.b}": "${a.b}", "${oc.select:a,1}": "${oc.select:a,1}", "x${a}y": "x${a}y", "a=b": "a=b",
    "['${a}',2]": ["${a}", 2], "[http://127.0.0.1:8000/x]": ["http://127.0.0.1:8000/x"],
    "http://127.0.0.1:8000/retrieve": "http://127.0.0.1:8000/retrieve", "~/data/a.b": "~/data/a.b", "{}": {},
}  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_value_is_read_as_it_is_meant(text):
    assert read_value(text) == VALUES[text]
    assert type(read_value(text)) is type(VALUES[text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "expected a list such as") for text in ("[1", "[1]]", "[${a},2]", "[" * 99, "[a]b")),
        *((text, "set each of its keys: NAME.KEY=VALUE") for text in ("{a:1}", "{a:1", "{a:{b:[1]}}")),
        ("[{a: 1}]", "a mapping in a list is not read"),
        *((text, "expected one closing quote") for text in ("'open", "'a'b", "'")),
    ],
)
def test_value_that_is_malformed_or_a_mapping_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_value(text)
    (tmp_path / "overrides.txt").write_text(f"data.seed=1\ntrainer.logger={shlex.quote(text)}\n")
    with pytest.raises(UserError, match=rf"overrides.txt:2: trainer.logger=.*{message}"):
        import_file(tmp_path / "overrides.txt")


def test_overrides_have_their_marks():
    assert read_override("a.b=1") == ("a.b", 1, False)
    assert read_override("+a.b=1") == ("a.b", 1, True)
    assert read_override("++a.b=x=y") == ("a.b", "x=y", True)
    assert read_override("~a.b") == ("a.b", None, False)
    assert read_override("a@b.c=d") == ("a@b.c", "d", False)
    assert read_override("a.b=") == ("a.b", None, False)
    assert [read_override(text) for text in ("a.b", "1a=2", "=3", "")] == [None] * 4


def test_reference_may_lead_over_others_but_not_in_a_circle():
    settings = {
        "a": "${b}",
        "b": "${c}",
        "c": 3,
        "d": "${e}",
        "e": "${d}",
        "f": ["${a}", "x${c}y"],
        "g": "${oc.env:X}",
    }
    found, dangling = resolved(settings, settings, {"X": "here"})
    assert found == {"a": 3, "b": 3, "c": 3, "f": [3, "x3y"], "g": "here"}
    assert dangling.keys() == {"d", "e"}


def test_references_that_multiply_come_to_an_end():
    settings: dict[str, Any] = {f"a{n}": f"${{a{n + 1}}}${{a{n + 1}}}" for n in range(60)}
    found, dangling = resolved({"a0": settings["a0"]}, settings, {})
    assert (found, list(dangling)) == ({}, ["a0"])


def shipped(name: str) -> dict[str, Any]:
    """The configuration that comes with verl, flat, its references as they stand."""
    verl_package = pytest.importorskip("verl")
    file = Path(verl_package.__file__).parent / "trainer" / "config" / f"_generated_{name}.yaml"
    tree = parse(file.read_text(encoding="utf-8"), name)
    return {".".join(path): plain(value) for path, value in flat(tree) if path[-1] != "_target_"}


@pytest.mark.slow
@pytest.mark.must_run
def test_values_are_those_of_hydra():
    pytest.importorskip("verl")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for text in VALUES:
        if not text.startswith(("~", "http")) and text != "a=b":
            expected = parser.parse_override(f"key={text}").value()
            assert read_value(text) == _plain(expected), text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.text if type(value).__name__ == "QuotedString" else value


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_every_key_of_verls_has_a_fate(tmp_path, name):
    lines = [f"{key}: {json.dumps(value)}" for key, value in shipped(name).items() if value != "???"]
    _, made = imported(tmp_path, "\n".join(lines), "verl.yaml")
    assert not [line for line in made.report if line.startswith("ignored, unknown")]
    assert [line for line in made.report if "verl's default: " in line and int(line.split()[-2]) > 600]


@pytest.mark.slow
@pytest.mark.must_run
def test_defaults_of_the_table_are_those_of_verl():
    found = shipped("ppo_trainer")
    values, _ = resolved(found, found, {})
    for row in KEY_TABLE:
        default = row.defaults.get(VERL, NO_DEFAULT)
        assert default is NO_DEFAULT or values[row.theirs] == default, row.theirs


@pytest.mark.slow
@pytest.mark.must_run
def test_references_are_resolved_as_omegaconf_does():
    found = shipped("ppo_trainer")
    from omegaconf import OmegaConf

    tree: dict[str, Any] = {}
    for key, value in found.items():
        node = tree
        *outer, last = key.split(".")
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = value
    tree["actor_rollout_ref"]["rollout"]["name"] = found["actor_rollout_ref.rollout.name"] = "vllm"
    container = OmegaConf.create(tree)
    values, dangling = resolved(found, found, {})
    assert not dangling
    assert len(values) > 500
    for key, value in values.items():
        theirs = OmegaConf.select(container, key, throw_on_missing=False)
        if OmegaConf.is_config(theirs):
            theirs = _without_targets(OmegaConf.to_container(theirs, resolve=True))
        assert value in (theirs, "???"), key


def _without_targets(value: Any) -> Any:
    """A section without the names of the classes that verl makes of it."""
    if not isinstance(value, dict):
        return value
    return {key: _without_targets(item) for key, item in value.items() if key != "_target_"}


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize(
    "text",
    [
        search_r1(*GRPO, "actor_rollout_ref.ref.fsdp_config.param_offload=True", "trainer.n_gpus_per_node=8",
                  "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        search_r1("actor_rollout_ref.actor.fsdp_config.fsdp_size=8",
                  "actor_rollout_ref.rollout.enforce_eager=True"),
        verl("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "search.nothing=1",
             "actor_rollout_ref.rollout.free_cache_engine=false",
             "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_log_stats=true",
             "+actor_rollout_ref.my_own=3", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"),
    ],
    ids=["grpo", "ppo", "verl"],
)  # fmt: skip
def test_imported_file_is_one_that_verl_accepts(tmp_path, text):
    pytest.importorskip("verl")
    from srl.train.verl.config_check import validated
    from srl.train.verl.job import Job

    config, made = imported(tmp_path, text)
    kept = said(made, "kept below verl:, read only").partition("--backend verl: ")[2].split(", ")
    place = tmp_path / "run"
    composed = validated(config, Job(place, resume=False, cpu=False, gpus_per_node=8))
    for key in kept:
        node: Any = composed
        for part in key.split("."):
            node = node[part]
        assert node is not None


def test_full_configuration_of_verls_keeps_nothing_that_is_its_default(tmp_path):
    file = "\n".join(
        f"{key}: {value}" for key, value in {"critic.fsdp.seed": 42, "critic.fsdp.fsdp_size": 3}.items()
    )
    config, made = imported(tmp_path, file, "full.yaml")
    assert config.verl["critic"]["fsdp"]["fsdp_size"] == 3
    said(made, "critic.fsdp.fsdp_size")
    said(made, "critic.fsdp.seed")
