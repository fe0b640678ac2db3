"""Configuration: what wins, where it came from, and what is said about a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from srl.config import (
    Config,
    Resolved,
    check_plugins,
    describe,
    load_config,
    load_saved,
    preset_names,
    save_config,
    to_yaml,
)
from srl.config.keys import keys, place, plain
from srl.config.yaml12 import dump, parse
from srl.errors import UserError
from srl.plugins import manager


def write(directory: Path, text: str, name: str = "my.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def origin(resolved: Resolved, key: str) -> str:
    return resolved.origins[key]


def refused(**arguments) -> str:
    """The one line that `load_config` refuses its arguments with."""
    with pytest.raises(UserError) as caught:
        load_config(**arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Layers


def test_each_layer_wins_over_the_one_before(tmp_path):
    key = "actor.kl_loss_coef"
    file = write(tmp_path, "actor:\n  kl_loss_coef: .3\nrollout:\n  n: 3\n")
    layers = [
        (load_config(None), 0.001, "default"),
        (load_config(None, algo="grpo"), 0.001, "algorithm grpo"),
        (load_config(None, file, algo="grpo"), 0.3, f"{file}:2"),
        (load_config(None, file, "grpo", {key: 0.4}), 0.4, "command line"),
        (load_config(None, file, "grpo", {key: 0.4}, [f"{key}=.5"]), 0.5, "--set"),
        (load_config(None, file, "grpo", {key: 0.4}, [f"{key}=.5", f"{key}=.6"]), 0.6, "--set"),
    ]
    for resolved, value, where in layers:
        assert (resolved.config.actor.kl_loss_coef, origin(resolved, key)) == (value, where)


def test_preset_lies_between_algorithm_and_file(tmp_path):
    assert origin(load_config(algo="grpo"), "rollout.n") == "preset tiny (grpo)"
    assert origin(load_config("one-gpu"), "rollout.n") == "algorithm grpo"
    file = write(tmp_path, "rollout: {n: 4}")
    assert load_config(algo="grpo", file=file).config.rollout.n == 4


ALGORITHMS = ("ppo", "grpo", "rloo", "turn_rloo", "gspo", "cispo", "reinforce", "reinforce_plus_plus")


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_preset_gives_every_algorithm_the_same_number_of_episodes(preset, algo):
    config = load_config(preset, algo=algo).config
    assert config.data.train_batch_size * config.rollout.n == 128


@pytest.mark.parametrize("preset", ["tiny", "small", "one-gpu"])
def test_another_name_of_an_algorithm_has_the_same_settings(preset):
    one, other = (
        plain(load_config(preset, algo=name).config.model_dump())
        for name in ("reinforce++", "reinforce_plus_plus")
    )
    assert one.pop("algorithm") != other.pop("algorithm"), "each has its own name"
    assert one == other


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_preset_small_shares_what_episodes_read_and_has_no_reference(algo):
    config = load_config("small", algo=algo).config
    assert config.rollout.n == 8
    assert not config.algorithm.use_kl_in_reward
    assert not config.actor.use_kl_loss


def test_algorithm_named_in_a_preset_brings_its_defaults():
    assert load_config("one-gpu").config.actor.use_kl_loss
    assert not load_config("one-gpu", algo="ppo").config.actor.use_kl_loss
    assert load_config("one-gpu", algo="ppo", sets=["algorithm.name=grpo"]).config.actor.use_kl_loss


def test_overlay_of_the_algorithm_lies_right_above_its_own_body(tmp_path):
    base = write(
        tmp_path, "extends: null\nrollout: {n: 2}\nper_algorithm: {grpo: {rollout: {n: 3}}}", "base.yaml"
    )
    top = write(tmp_path, "extends: base.yaml\nrollout: {n: 4}\nper_algorithm: {rloo: {rollout: {n: 5}}}")
    assert load_config(file=base, algo="grpo").config.rollout.n == 3
    assert load_config(file=base, algo="rloo").config.rollout.n == 2
    assert load_config(file=top, algo="grpo").config.rollout.n == 4
    assert load_config(file=top, algo="rloo").config.rollout.n == 5


def test_overlay_cannot_change_the_algorithm(tmp_path):
    file = write(tmp_path, "per_algorithm: {ppo: {algorithm: {name: grpo}}}")
    assert "per_algorithm cannot change algorithm.name" in refused(file=file)


def test_flags_that_were_not_given_change_nothing():
    resolved = load_config(flags={"rollout.n": None, "model.path": Path("/m"), "trainer.seed": 7})
    assert origin(resolved, "rollout.n") == "algorithm ppo"
    assert (resolved.config.model.path, resolved.config.trainer.seed) == ("/m", 7)


def test_set_values_are_yaml():
    sets = [
        "actor.optim.lr=1e-6",
        "model.lora_target_modules=[q_proj, v_proj]",
        "model.path=a=b",
        "ref.path=",
    ]
    config = load_config(sets=sets).config
    assert config.actor.optim.lr == 1e-6
    assert config.model.lora_target_modules == ("q_proj", "v_proj")
    assert config.model.path == "a=b"
    assert config.ref.path is None


def test_one_file_or_several_are_held_as_a_tuple():
    config = load_config(sets=["data.train_files=a.parquet", "data.val_files=[b, c]"]).config
    assert config.data.train_files == ("a.parquet",)
    assert config.data.val_files == ("b", "c")
    assert config.data.test_files is None


def test_weights_are_replaced_by_a_mapping_and_extended_by_a_key(tmp_path):
    file = write(tmp_path, "reward: {weights: {f1: 1}}")
    assert load_config(file=file).config.reward.weights == {"f1": 1.0}
    assert load_config(sets=["reward.weights.f1=.5"]).config.reward.weights == {"em": 1.0, "f1": 0.5}
    assert load_config(file=file, sets=["reward.weights={em: 2}"]).config.reward.weights == {"em": 2}


def test_verl_takes_anything_and_merges_it(tmp_path):
    file = write(tmp_path, "verl: {trainer: {nnodes: 2, logger: [console]}}")
    resolved = load_config(file=file, sets=["verl.trainer.nnodes=3", "verl.a.b={c: 1}"])
    assert resolved.config.verl == {"trainer": {"nnodes": 3, "logger": ["console"]}, "a": {"b": {"c": 1}}}


def test_key_below_a_value_takes_its_place():
    assert load_config(sets=["verl.a=1", "verl.a.b=2"]).config.verl == {"a": {"b": 2}}
    assert load_config(sets=["verl.a.b=2", "verl.a=1"]).config.verl == {"a": 1}


def test_dotted_keys_in_a_file_mean_nested_ones(tmp_path):
    assert load_config(file=write(tmp_path, "actor.optim.lr: 2e-6")).config.actor.optim.lr == 2e-6


def test_empty_files_and_sections_say_nothing(tmp_path):
    for text in ("", "# nothing\n", "actor:\nper_algorithm:\nretriever:\n  bm25:\n"):
        assert load_config(file=write(tmp_path, text)).config == load_config().config


# What a file stands on


def test_file_stands_on_the_preset_unless_it_extends(tmp_path):
    plain = write(tmp_path, "trainer: {seed: 1}")
    assert load_config(file=plain).config.data.template == "tiny"
    assert load_config("one-gpu", plain).config.data.template == "search-r1"
    extending = write(tmp_path, "extends: one-gpu\ntrainer: {seed: 1}", "b.yaml")
    resolved = load_config(file=extending)
    assert (resolved.config.data.template, resolved.preset) == ("search-r1", "b")
    assert load_config("one-gpu", extending).config == resolved.config
    assert "leave out the preset 'no-mask'" in refused(preset="no-mask", file=extending)


def test_file_that_extends_nothing_stands_on_the_defaults(tmp_path):
    assert load_config(file=write(tmp_path, "extends: null")).config == load_config(None).config


def test_extending_in_a_circle_is_refused(tmp_path):
    write(tmp_path, "extends: b.yaml", "a.yaml")
    write(tmp_path, "extends: a.yaml", "b.yaml")
    assert "extends itself: a → b → a" in refused(file=tmp_path / "a.yaml")
    write(tmp_path, f"extends: ../{tmp_path.name}/c.yaml", "c.yaml")
    assert "extends itself" in refused(file=tmp_path / "c.yaml")


# Mistakes


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("actor.clip_ration", "actor.clip_ratio"),
        ("actor.lr", "actor.optim.lr"),
        ("lr", "actor.optim.lr"),
        ("critic.optim.lrr", "critic.optim.lr"),
        ("rollot.n", "rollout.n"),
        ("algorithm.gama", "algorithm.gamma"),
        ("actor.optim.lr.x", "actor.optim.lr"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("trainer.steps", "trainer.total_training_steps"),
        ("data.batch_size", "data.train_batch_size"),
        ("sft.total_training_steps", "sft.steps"),
    ],
)
def test_unknown_key_names_the_nearest(key, hint):
    message = refused(sets=[f"{key}=1"])
    assert message.startswith(f"--set: no key '{key}'")
    assert f"did you mean '{hint}'" in message


def test_unknown_key_in_a_file_has_its_line(tmp_path):
    file = write(tmp_path, "actor:\n  optim:\n\n    lr: 1\n    foo: 2\n")
    assert refused(file=file).startswith(f"{file}:5: no key 'actor.optim.foo'")
    file = write(tmp_path, "per_algorithm:\n  grpo:\n    rollout:\n      m: 3\n")
    assert refused(file=file, algo="ppo").startswith(f"{file}:4: no key 'rollout.m'")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("actor.optim.lr=fast", "actor.optim.lr is 'fast', expected number > 0"),
        ("actor.optim.lr=0", "actor.optim.lr is 0, expected number > 0"),
        ("actor.optim.lr=1e999", "actor.optim.lr is inf, expected number > 0"),
        ("actor.optim.lr=true", "actor.optim.lr is True, expected number > 0"),
        ("trainer.seed=1.5", "trainer.seed is 1.5, expected integer ≥ 0 and ≤ 4,294,967,295"),
        ("rollout.search=no", "rollout.search is 'no', expected true or false"),
        ("rollout.n=true", "rollout.n is True, expected integer ≥ 1"),
        ("rollout.top_p=1.1", "rollout.top_p is 1.1, expected number > 0 and ≤ 1"),
        ("model.path=3", "model.path is 3, expected text or null"),
        ("actor.kl_loss_type=k4", "actor.kl_loss_type is 'k4', expected one of k1, k2, k3, k3+"),
        ("actor.optim.betas=[1]", "actor.optim.betas is [1], expected list of 2: number ≥ 0 and < 1"),
        (
            "trainer.seed=" + "x" * 100,
            f"trainer.seed is '{'x' * 78}…, expected integer ≥ 0 and ≤ 4,294,967,295",
        ),
        ("actor=3", "actor is 3, expected keys under it"),
        ("verl=3", "verl is 3, expected mapping"),
        ("reward.weights={}", "reward.weights is {}, expected mapping of names to numbers"),
        ("reward.weights.em=x", "reward.weights.em is 'x', expected number"),
        (
            "reward.weights.my.rewards.Mine=1",
            "reward.weights.my is {'rewards': {'Mine': 1}}, expected number; for a class in a module, type: "
            "--set reward.weights.my.rewards:Mine=1",
        ),
        ("model.device=gpu", "model.device is 'gpu', expected auto, cpu, cuda or cuda:NUMBER"),
        (
            "model.device=mps",
            "model.device is 'mps', expected auto, cpu, cuda or cuda:NUMBER: sampling takes float64, which "
            "mps does not have; set cpu",
        ),
        ("data.train_files=[]", "data.train_files is [], expected text or list of text or null"),
        ("algorithm.name=3", "algorithm.name is 3, expected text"),
    ],
)
def test_wrong_value_says_key_value_and_expectation(setting, expected):
    assert refused(sets=[setting]) == f"--set: {expected}"


def test_wrong_value_in_a_file_has_its_line(tmp_path):
    file = write(tmp_path, "extends: one-gpu\nactor:\n  optim:\n    lr: fast\n")
    assert refused(file=file) == f"{file}:4: actor.optim.lr is 'fast', expected number > 0"


@pytest.mark.parametrize("text", ["actor", "=3", ""])
def test_set_without_key_and_value_is_refused(text):
    assert "expected key=value" in refused(sets=[text])


LAUGHS = "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
"""A kilobyte of aliases of aliases, which stand for 9¹¹ values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", ":1: not YAML"),
        (
            "trainer: {seed: 1}\ntrainer: {seed: 2}",
            ":2: not YAML: duplicate key 'trainer', first in line 1",
        ),
        ("1: 2", ":1: not YAML: the key 1 is not text"),
        ("a: !!bool x", ":1: not YAML"),
        ("a: !!binary x", ":1: not YAML"),
        ("a: !!python/object:os.system x", ":1: not YAML"),
        ("a: !mine x", ":1: not YAML"),
        ("a: &a {b: *a}", ": not YAML"),
        (LAUGHS, ": not YAML"),
        ("trainer: {seed: " + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 5000, ": "),
        ("- a", ": expected sections"),
        ("format: 2", "has format 2"),
        ("extends: [a]", "extends is ['a']"),
        ("extends: tini", "no preset 'tini': there are tiny, "),
        ("per_algorithm: 3", "per_algorithm is 3"),
        ("per_algorithm: {ppo: 3}", "per_algorithm.ppo is 3"),
    ],
)
def test_file_that_is_no_configuration_is_one_line(tmp_path, text, message):
    assert message in refused(file=write(tmp_path, text))


def test_file_that_cannot_be_read_is_one_line(tmp_path):
    assert "No such file" in refused(file=tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"# \xe9\n")
    assert "expected text in UTF-8" in refused(file=tmp_path / "latin.yaml")


def test_unknown_preset_names_the_nearest():
    assert "did you mean 'tiny'?" in refused(preset="tyny")


# Values that must fit each other


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.train_batch_size=100"], "actor.ppo_mini_batch_size = 64 (preset tiny (ppo)) must divide"),
        (
            ["data.train_batch_size=128", "actor.ppo_mini_batch_size=48"],
            "must divide data.train_batch_size = 128 (--set); set actor.ppo_mini_batch_size=32",
        ),
        (["critic.ppo_mini_batch_size=3"], "critic.ppo_mini_batch_size = 3 (--set) must divide"),
        (["rollout.max_turn_tokens=5000"], "must not exceed data.max_response_length = 640"),
        (["rollout.max_turn_tokens=5000"], "; lower the first or raise the second"),
        (["rollout.min_answer_tokens=100"], "must not exceed rollout.max_turn_tokens = 48"),
        (["search.url=http://h/", "search.index=i"], "give one of search.url"),
        (["search.url=https://me:secret@h/"], "search.url"),
        (["search.url=https://secret@h/"], "search.url"),
        (["search.url=[http://h/, 'https://h/retrieve?k=secret']"], "search.url"),
        (["search.url=https://h/#secret"], "search.url"),
        (["search.url=http://h/;secret"], "search.url"),
        (["search.url=http://h/a;secret/b"], "search.url"),
        (["search.url=127.0.0.1:18703/retrieve?api_key=secret"], "search.url"),
        (["search.url=http://[::1"], "search.url"),
        (["data.val_files=a", "data.test_files=[a, b]"], "data.val_files and data.test_files share a"),
        (
            ["algorithm.filter_groups.enable=true", "rollout.n=2", "algorithm.filter_groups.metric=emm"],
            "algorithm.filter_groups.metric = emm (--set) is no part of the reward; use one of reward, em",
        ),
        (
            ["reward.judge.url=http://u:secret@h/v1", "reward.weights.judge=1"],
            "reward.judge.url",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(sets, message):
    said = refused(sets=sets)
    assert message in said
    assert "secret" not in said


def test_one_file_for_validation_and_test_is_refused_however_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./q.jsonl", str(tmp_path / "q.jsonl"), "../" + tmp_path.name + "/q.jsonl"):
        assert "share q.jsonl" in refused(sets=["data.val_files=q.jsonl", f"data.test_files={name}"])


def test_critic_is_not_checked_where_there_is_none():
    (said,) = load_config(algo="grpo", sets=["critic.ppo_mini_batch_size=3"]).warnings
    assert "critic.ppo_mini_batch_size" in said


@pytest.mark.parametrize(("warmup", "learns"), [(3, False), (2, True)])
def test_a_policy_that_never_learns_is_a_warning(warmup, learns):
    sets = [f"trainer.critic_warmup={warmup}", "trainer.total_training_steps=3"]
    warnings = load_config(algo="ppo", sets=sets).warnings
    said = "trainer.critic_warmup = 3: only the critic learns in all of the 3 steps"
    assert [line.startswith(said) for line in warnings] == [True] * (not learns)


@pytest.mark.parametrize(
    ("sets", "warning"),
    [
        (["algorithm.use_kl_in_reward=true"], "the KL counts twice"),
        (["rollout.top_p=.95"], "rollout.top_p = 0.95"),
        (["rollout.n=1"], "rollout.n = 1: grpo compares"),
        (["trainer.critic_warmup=3"], "trainer.critic_warmup = 3: grpo has no critic, so nothing learns"),
        (["reward.weights={em: 0}"], "every weight in reward.weights is 0 (em)"),
    ],
)
def test_doubtful_values_warn(sets, warning):
    (said,) = load_config(algo="grpo", sets=sets).warnings
    assert said.startswith(warning)


@pytest.mark.parametrize("algo", ["ppo", "reinforce", "reinforce_plus_plus", "grpo", "rloo", "turn_rloo"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-hard"])
def test_every_algorithm_has_128_episodes_a_step_and_checkpoints_at_validated_steps(preset, algo):
    config = load_config(preset, algo=algo).config
    assert config.data.train_batch_size * config.rollout.n == 128
    assert config.trainer.save_freq % config.trainer.test_freq == 0


# Plugins


def test_options_of_plugins_are_validated_and_say_where_they_came_from(tmp_path):
    assert load_config(sets=["retriever.bm25.k1=1.2"]).config.retriever.options("bm25")["k1"] == 1.2
    assert "no option retriever.bm25.k2" in refused(sets=["retriever.bm25.k2=1"])
    assert refused(sets=["retriever.bm25.k1=-1"]).startswith("--set: retriever.bm25.k1")
    file = write(tmp_path, "retriever:\n  bm25:\n    k1: -1\n")
    assert refused(file=file).startswith(f"{file}:3: retriever.bm25.k1")
    assert "takes no options" in refused(sets=["reward.em.x=1"])


@pytest.mark.parametrize("in_reward", [False, True])
@pytest.mark.parametrize("in_loss", [False, True])
def test_reference_is_needed_for_a_kl_in_the_rewards_or_the_loss(in_reward, in_loss):
    sets = [f"algorithm.use_kl_in_reward={in_reward}", f"actor.use_kl_loss={in_loss}"]
    assert load_config(sets=[text.lower() for text in sets]).config.needs_reference is (in_reward or in_loss)


def test_every_option_of_the_plugins_in_use_is_resolved():
    resolved = load_config()
    assert resolved.config.retriever.options("bm25")["k1"] == 0.9
    assert origin(resolved, "retriever.bm25.k1") == "default"
    assert resolved.config.reward.options("format") == {}
    assert (
        load_config(sets=["reward.weights.format=.2"]).config.reward.options("format")["structure_score"]
        == 0.2
    )


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("retriever.name=nope", "retriever"),
        ("retriever.nope.x=1", "retriever"),
        ("reward.weights.nope=1", "reward"),
        ("algorithm.name=nope", "algorithm"),
    ],
)
def test_plugin_that_is_not_installed_is_named(setting, kind):
    assert f"no {kind} 'nope': installed are " in refused(sets=[setting])


def test_retriever_that_nothing_would_load_is_not_asked_for():
    for sets in (["search.url=http://h/"], ["rollout.search=false"]):
        load_config(sets=["retriever.name=elsewhere", *sets])


def test_configuration_alone_can_be_checked_for_plugins():
    check_plugins(Config())
    with pytest.raises(UserError, match="takes no options"):
        check_plugins(Config.model_validate({"reward": {"em": {"x": 1}}}))


# Saving and showing


def test_saved_configuration_comes_back_the_same(tmp_path):
    sets = ["verl.a.b=[1, {c: no}]", "reward.weights={f1: .5}", "retriever.bm25.k1=1.7", "model.path='1e-6'"]
    config = load_config("no-mask", algo="grpo", sets=sets).config
    save_config(tmp_path, config)
    assert load_saved(tmp_path) == config
    assert load_saved(tmp_path / "config.yaml") == config
    assert load_config(file=tmp_path / "config.yaml").config == config
    assert to_yaml(config).startswith("format: 1\nextends: null\n")


def test_a_saved_configuration_that_was_emptied_is_refused(tmp_path):
    write(tmp_path, "", "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml is empty; restore it, or start a new run"):
        load_saved(tmp_path)


def test_saved_configuration_of_a_newer_version_is_refused(tmp_path):
    write(tmp_path, to_yaml(Config()).replace("format: 1", "format: 2"), "config.yaml")
    with pytest.raises(UserError, match="has format 2"):
        load_saved(tmp_path)


def test_description_shows_every_key_with_value_and_origin():
    rows = describe(load_config(sets=["trainer.seed=5"]))
    assert ("trainer.seed", 5, "--set") in rows
    assert ("data.template", "tiny", "preset tiny") in rows
    assert ("actor.optim.betas", [0.9, 0.98], "preset tiny") in rows
    shown = {key.name for key in keys() if ".<name>." not in key.name} - {"reward.weights"}
    assert shown <= {row[0] for row in rows}


def test_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        Config().trainer.seed = 3


@pytest.mark.parametrize("key", list(keys()), ids=lambda key: key.name)
def test_every_key_is_documented(key):
    assert key.doc.rstrip().endswith((".", "…"))
    assert place(key.name.split("."))[0] in ("leaf", "mapping", "free")


# Presets


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("algo", [entry.name for entry in manager.installed("algorithm")])
def test_every_preset_works_with_every_algorithm(preset, algo):
    if (preset, algo) == ("no-mask", "turn_rloo"):
        with pytest.raises(UserError, match=r"turn_rloo needs actor.mask_observations=True, not .*no-mask"):
            load_config(preset, algo=algo)
        return
    resolved = load_config(preset, algo=algo)
    assert resolved.preset == preset
    assert resolved.warnings == ()


def test_default_preset_is_first():
    assert preset_names()[0] == "tiny"
    assert {"one-gpu", "no-search", "no-mask"} <= set(preset_names())


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_ablations_change_what_they_are_named_after_and_nothing_else(algo):
    tiny = {key: value for key, value, _ in describe(load_config(algo=algo))}
    changed = {}
    for preset in ("no-mask", "no-search"):
        rows = describe(load_config(preset, algo=algo))
        changed[preset] = {key for key, value, _ in rows if tiny[key] != value}
    assert changed == {
        "no-mask": {"actor.mask_observations"},
        "no-search": {"data.template", "rollout.search"},
    }


# YAML


PLAIN_WORDS = {
    "1e-6": 1e-6, "-1.5E+3": -1500.0, ".5": 0.5, "5.": 5.0, "010": 10, "-7": -7, "~": None, "": None,
    "true": True, "FALSE": False, "null": None, "no": "no", "on": "on", "1:30": "1:30", "0x10": "0x10",
    "2020-01-01": "2020-01-01", "1_000": "1_000", "e5": "e5", ".": ".", "'1'": "1",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), PLAIN_WORDS.items())
def test_plain_words_are_read_by_the_rules_of_yaml_1_2(text, value):
    found = parse(text, "x")
    assert (found, type(found)) == (value, type(value))


def test_core_tags_and_a_few_aliases_are_read():
    text = "a: &x [1, 2]\nb: *x\nc: !!str 1\nd: !!float 1\ne: !!int '3'\nf: !!bool TRUE\ng: !!null ''"
    assert parse(text, "x") == {
        "a": [1, 2], "b": [1, 2], "c": "1", "d": 1.0, "e": 3, "f": True, "g": None
    }  # fmt: skip


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["1e-6", "no", "~", "1:30"]
)
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(values)
@example({"\x85": "a\nb \n\u2028"})
def test_what_is_dumped_is_parsed_back(value):
    assert parse(dump({"x": value}), "x") == {"x": value}
