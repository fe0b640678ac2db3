"""Configuration: what wins, where it came from, and what is said about a mistake."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from srl.config import Resolved, describe, load_config, load_saved, preset_names, save_config, to_yaml
from srl.config.keys import keys
from srl.config.yaml12 import dump, parse
from srl.errors import UserError
from srl.plugins import manager


def write(directory: Path, text: str, name: str = "my.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def origin(resolved: Resolved, key: str) -> str:
    return resolved.origins[key]


def refused(**arguments) -> UserError:
    """The error, of one line, with which `load_config` refuses its arguments."""
    with pytest.raises(UserError) as caught:
        load_config(**arguments)
    return caught.value


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


def test_overlay_of_the_algorithm_lies_right_above_its_own_body(tmp_path):
    base = write(
        tmp_path, "extends: null\nrollout: {n: 2}\nper_algorithm: {grpo: {rollout: {n: 3}}}", "base.yaml"
    )
    top = write(tmp_path, "extends: base.yaml\nrollout: {n: 4}\nper_algorithm: {rloo: {rollout: {n: 5}}}")
    assert load_config(file=base, algo="grpo").config.rollout.n == 3
    assert load_config(file=base, algo="rloo").config.rollout.n == 2
    assert load_config(file=top, algo="grpo").config.rollout.n == 4
    assert load_config(file=top, algo="rloo").config.rollout.n == 5


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


# What a file stands on


def test_file_stands_on_the_preset_unless_it_extends(tmp_path):
    plain = write(tmp_path, "trainer: {seed: 1}")
    assert load_config(file=plain).config.data.template == "tiny"
    assert load_config("one-gpu", plain).config.data.template == "search-r1"
    extending = write(tmp_path, "extends: one-gpu\ntrainer: {seed: 1}", "b.yaml")
    resolved = load_config(file=extending)
    assert (resolved.config.data.template, resolved.preset) == ("search-r1", "b")
    assert load_config("one-gpu", extending).config == resolved.config
    assert load_config(file=write(tmp_path, "extends: null", "c.yaml")).config == load_config(None).config
    assert "no-mask" in str(refused(preset="no-mask", file=extending))


def test_extending_in_a_circle_is_refused(tmp_path):
    for name, base in {"a": "b.yaml", "b": "a.yaml", "c": f"../{tmp_path.name}/c.yaml"}.items():
        write(tmp_path, f"extends: {base}", f"{name}.yaml")
    for name in "ac":
        assert "extends itself" in str(refused(file=tmp_path / f"{name}.yaml"))


# Mistakes


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("actor.clip_ration", "actor.clip_ratio"),
        ("actor.lr", "actor.optim.lr"),
        ("lr", "actor.optim.lr"),
        ("rollot.n", "rollout.n"),
    ],
)
def test_unknown_key_names_the_nearest(key, hint):
    error = refused(sets=[f"{key}=1"])
    assert error.key == key
    assert f"'{hint}'" in str(error)


@pytest.mark.parametrize(
    "setting",
    [
        "actor.optim.lr=fast", "actor.optim.lr=0", "actor.optim.lr=1e999", "actor.optim.lr=true",
        "trainer.seed=1.5", "trainer.seed=" + "x" * 100, "rollout.search=no", "rollout.n=true",
        "rollout.top_p=1.1", "model.path=3", "actor.kl_loss_type=k4", "actor.optim.betas=[1]", "actor=3",
        "verl=3", "reward.weights={}", "reward.weights.em=x", "model.device=gpu", "data.train_files=[]",
        "algorithm.name=3",
    ],
)  # fmt: skip
def test_wrong_value_names_its_key_and_where_it_stands(tmp_path, setting):
    key, _, value = setting.partition("=")
    error = refused(sets=[setting])
    assert error.key == key
    assert str(error).startswith(f"--set: {key} is ")
    assert len(str(error)) < 250
    sections = key.split(".")
    file = write(tmp_path, f"# a line\n{': {'.join(sections)}: {value}{'}' * (len(sections) - 1)}\n")
    assert str(refused(file=file)).startswith(f"{file}:2: {key} is ")


LAUGHS = "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
"""A kilobyte of aliases of aliases, which stand for 9¹¹ values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", ":1: "), ("trainer: {seed: 1}\ntrainer: {seed: 2}", ":2: "),
        ("actor:\n  optim:\n\n    lr: 1\n    foo: 2\n", ":5: "),
        ("per_algorithm:\n  ppo:\n    rollout:\n      m: 3\n", ":4: "), ("1: 2", ":1: "),
        ("a: !!bool x", ": "), ("a: !!python/object:os.system x", ":1: "), ("a: &a {b: *a}", ":1: "),
        (LAUGHS, ":2: "), ("trainer: {seed: " + "9" * 5000 + "}", ": "), ("[" * 5000, ": "),
        ("extends: [a]", "extends"), ("extends: tini", "'tini'"), ("per_algorithm: 3", "per_algorithm"),
        ("per_algorithm: {ppo: 3}", "per_algorithm.ppo"),
        ("per_algorithm: {ppo: {algorithm: {name: grpo}}}", "algorithm.name"), (b"# \xe9\n", "UTF-8"),
        (None, ""),
    ],
    ids=str,
)  # fmt: skip
def test_file_that_is_no_configuration_is_one_line(tmp_path, text, message):
    file = tmp_path / "my.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = str(refused(file=file))
    assert "my.yaml" in said
    assert message in said


# Values that must fit each other


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["data.train_batch_size=100"], "actor.ppo_mini_batch_size"),
        (["critic.ppo_mini_batch_size=3"], "critic.ppo_mini_batch_size"),
        (["rollout.max_turn_tokens=5000"], "rollout.max_turn_tokens"),
        (["rollout.deterministic=true", "rollout.engine=vllm"], "rollout.deterministic"),
        (["rollout.engine=openai"], "rollout.engine"),
        (["rollout.engine=openai", "rollout.openai.url=h"], "rollout.openai.url"),
        (["search.url=http://h/", "search.index=i"], "search.url"),
        (["data.val_files=a", "data.test_files=./a"], "data.val_files"),
        (["algorithm.filter_groups.enable=true", "rollout.n=1"], "algorithm.filter_groups.enable"),
        (["reward.overlong_buffer={enable: true, len: 5000}"], "reward.overlong_buffer.len"),
        (["retriever.bm25.k2=1"], "retriever.bm25.k2"),
        (["retriever.bm25.k1=-1"], "retriever.bm25.k1"),
        (["reward.em.x=1"], "reward.em"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_key_and_origin(sets, key):
    error = refused(sets=sets)
    assert error.key == key
    assert "--set" in str(error)


@pytest.mark.parametrize(
    "url", ["https://me:secret@h/", "https://h/#secret", "127.0.0.1:1/retrieve?key=secret"]
)
def test_a_url_that_may_hold_a_secret_is_refused_without_it(url):
    judge = [f"reward.judge.url={url}", "reward.weights.judge=1"]
    for sets in ([f"search.url={url}"], judge, [f"rollout.openai.url={url}"]):
        assert "secret" not in str(refused(sets=sets))


@pytest.mark.parametrize(
    ("algo", "sets", "key"),
    [
        ("grpo", ["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward"),
        ("grpo", ["rollout.top_p=.95"], "rollout.top_p"),
        ("grpo", ["rollout.n=1"], "rollout.n"),
        ("grpo", ["trainer.critic_warmup=3"], "trainer.critic_warmup"),
        ("grpo", ["reward.weights={em: 0}"], "reward.weights"),
        ("grpo", ["critic.ppo_mini_batch_size=3"], "critic.ppo_mini_batch_size"),
        ("ppo", ["trainer.critic_warmup=3", "trainer.total_training_steps=3"], "trainer.critic_warmup"),
    ],
)
def test_doubtful_values_warn(algo, sets, key):
    (said,) = load_config(algo=algo, sets=sets).warnings
    assert key in said


# Plugins


def test_options_of_plugins_are_resolved_and_say_where_they_came_from(tmp_path):
    resolved = load_config(sets=["retriever.bm25.k1=1.2", "reward.weights.format=.2"])
    assert resolved.config.retriever.options("bm25")["k1"] == 1.2
    assert origin(resolved, "retriever.bm25.b") == "default"
    assert resolved.config.reward.options("format")["structure_score"] == 0.2
    file = write(tmp_path, "retriever:\n  bm25:\n    k1: -1\n")
    assert str(refused(file=file)).startswith(f"{file}:3: retriever.bm25.k1")


# Saving and showing


def test_saved_configuration_comes_back_the_same(tmp_path):
    sets = ["verl.a.b=[1, {c: no}]", "reward.weights={f1: .5}", "retriever.bm25.k1=1.7", "model.path='1e-6'"]
    config = load_config("no-mask", algo="grpo", sets=sets).config
    save_config(tmp_path, config)
    assert load_saved(tmp_path) == config
    assert load_saved(tmp_path / "config.yaml") == config
    assert load_config(file=tmp_path / "config.yaml").config == config
    assert to_yaml(config).startswith("format: 1\nextends: null\n")


def test_description_shows_every_key_with_value_and_origin():
    rows = describe(load_config(sets=["trainer.seed=5"]))
    assert ("trainer.seed", 5, "--set") in rows
    assert ("data.template", "tiny", "preset tiny") in rows
    assert ("actor.optim.betas", [0.9, 0.98], "preset tiny") in rows
    shown = {key.name for key in keys() if ".<name>." not in key.name} - {"reward.weights", "watch.actions"}
    assert shown <= {row[0] for row in rows}


# Presets


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("algo", [entry.name for entry in manager.installed("algorithm")])
def test_every_preset_works_with_every_algorithm(preset, algo):
    if (preset, algo) == ("no-mask", "turn_rloo"):
        with pytest.raises(UserError, match="no-mask") as caught:
            load_config(preset, algo=algo)
        assert caught.value.key == "actor.mask_observations"
        return
    resolved = load_config(preset, algo=algo)
    assert resolved.preset == preset
    assert resolved.warnings == ()


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
