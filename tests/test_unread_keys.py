"""Nothing that is typed is ignored: each kind of run reads a key, or it is named in a warning."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli_mistakes import place, train

import srl.config
from srl.cli import main
from srl.config import Config, load_config, load_saved, save_config
from srl.config.keys import facts, keys, named_section_of, section_of, value_of
from srl.config.load import typed_settings, with_changes
from srl.config.sections import Section
from srl.config.unread import KINDS, Backend, Kind, unread
from srl.errors import UserError
from srl.train import model_settings

__all__ = ["place"]
KEYS = [key.name for key in keys()]


def prefixes(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[type[Section], str]]:
    """Every class of sections, with what its keys begin with; each is in one place."""
    yield section, prefix
    for name, field in section.model_fields.items():
        if inner := section_of(field):
            yield from prefixes(inner, f"{prefix}{name}.")
        elif inner := named_section_of(field):
            yield from prefixes(inner, f"{prefix}{name}.<name>.")


PREFIXES = dict(prefixes())


@pytest.fixture(scope="module")
def accessed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, set[str]]:
    """The keys that a tiny run of each kind has looked at, once its configuration was loaded."""
    seen = set[str]()
    original = Section.__getattribute__

    def look(section: Section, name: str) -> object:
        if name in type(section).model_fields and type(section) in PREFIXES:
            seen.add(PREFIXES[type(section)] + name)
        return original(section, name)

    def then_clear(load: Callable[..., object]) -> Callable[..., object]:
        def loaded(*arguments: object, **keywords: object) -> object:
            resolved = load(*arguments, **keywords)
            seen.clear()
            return resolved

        return loaded

    out = tmp_path_factory.mktemp("runs")
    shown_file, any_episode = f"sft.train_files={place / 'shown.jsonl'}", "sft.filter='true'"
    measured = ("--index", place / "index", "--data", place / "test.parquet")
    ways: list[tuple[Kind, tuple[object, ...]]] = [
        ("rl", train(place, "--set", "algorithm.use_kl_in_reward=true", "--algo", "ppo")),
        ("rl", train(place, "--set", "actor.use_kl_loss=true", "--set", "rollout.n=2", "--algo", "grpo")),
        ("sft", train(place, "--algo", "sft", "--set", shown_file, "--steps", 2)),
        ("rft", train(place, "--algo", "rft", "--set", any_episode, "--set", "sft.steps=1")),
        ("eval", ("-q", "eval", "run", place / "model", "--config", place / "small.yaml", *measured)),
    ]
    seen_by: dict[Kind, set[str]] = {kind: set() for kind in KINDS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        patch.setenv("SRL_WORKSPACE", str(out))
        patch.setattr(Section, "__getattribute__", look)
        patch.setattr(srl.config, "load_config", then_clear(srl.config.load_config))
        patch.setattr(model_settings, "local_settings", then_clear(model_settings.local_settings))
        for kind, arguments in ways:
            seen.clear()
            assert main([*map(str, arguments)]) == 0, arguments
            seen_by[kind] |= seen
    return seen_by


LOOKED_AT_IN_VAIN = {
    "rollout.temperature": "validations and evaluations replace it in the options of an episode",
    "rollout.top_p": "as well",
    "ref.path": "a model that may have to be fetched",
    "algorithm.use_kl_in_reward": "whether it has",
    "actor.use_kl_loss": "as well",
    "trainer.save_freq": "the dry run and the room on the disk; --algo rft saves after each round",
    "trainer.test_freq": "as well",
    "model.gradient_checkpointing": "the keywords of load_model; nothing is trained",
    "model.lora_rank": "as well",
    "model.lora_alpha": "as well",
    "model.lora_target_modules": "as well",
}
"""Keys that a run looks at though nothing depends on them there, and why."""

NOT_LOOKED_AT = {
    ("rl", "algorithm.filter_groups."): "off",
    ("rl", "sft."): "a cold start; these runs start from a model",
    ("rl", "cluster."): "--backend verl",
    ("rl", "verl"): "--backend verl",
    ("rft", "sft.train_files"): "a cold start",
    ("rft", "algorithm.name"): "decides defaults as the configuration is loaded",
    ("", "trainer.plugin_path"): "looked at as the configuration is loaded",
    ("", "data.filter_overlong_prompts"): "no prompt is too long",
    ("", "data.world"): "the files are given",
    ("", "retriever.name"): "an index says it",
    ("", "rollout.max_calls"): "tags",
    ("", "rollout.call_format"): "tags",
    ("", "rollout.tools"): "tags",
    ("", "rollout.gpu_memory_utilization"): "vLLM",
    ("", "rollout.openai."): "a server generates",
    ("", "search.max_failed"): "no search failed",
    ("", "search.timeout_s"): "a server searches",
    ("", "search.retries"): "a server searches",
    ("", "search.retrievers.<name>."): "several retrievers",
}
"""Keys that a run depends on, though not these tiny ones: the kind of run (empty: any), key, and why."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_looks_at_and_what_the_table_says_it_reads_are_the_same(accessed, kind):
    says = {key for key in KEYS if kind in facts(key).read_by.split()}
    looks = accessed[kind] & set(KEYS)
    assert looks - says <= set(LOOKED_AT_IN_VAIN)
    elsewhere = [name for who, name in NOT_LOOKED_AT if who in ("", kind)]
    assert [key for key in says - looks if not key.startswith(tuple(elsewhere))] == []


@pytest.mark.parametrize(
    ("algo", "key"),
    [
        ("sft", "actor.optim.lr=1e-3"), ("sft", "rollout.n=3"), ("sft", "sft.filter=em = 1"),
        ("rft", "trainer.save_freq=3"), ("rft", "algorithm.filter_groups.enable=true"),
        ("grpo", "rft.questions=3"), ("grpo", "critic.optim.lr=1e-3"),
        ("grpo", "algorithm.filter_groups.metric=em"), ("grpo", "model.lora_alpha=9"),
        ("grpo", "cluster.nnodes=2"), ("grpo", "verl.trainer.nnodes=2"),
    ],
)  # fmt: skip
def test_a_typed_key_that_the_run_does_not_read_is_named_in_a_warning(algo, key):
    resolved = load_config(algo=algo, sets=[key, "rollout.n=2"])
    name = key.partition("=")[0]
    assert any(name in line for line in resolved.warnings)
    assert value_of(resolved.config, name) is not None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["actor.use_kl_loss=false", "actor.kl_loss_coef=.1"], "actor.kl_loss_coef"),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=.1"],
            "algorithm.kl_ctrl.target_kl",
        ),
        (["actor.policy_loss.loss_mode=cispo", "actor.clip_ratio_c=4"], "actor.clip_ratio_c"),
        (["search.index=i", "retriever.bm25.k1=1.5"], "retriever.bm25.k1"),
        (
            ["search.index=i", "retriever.name=hybrid", "retriever.hybrid.retrievers.bm25.k1=1.5",
             "retriever.hybrid.runtime.bm25.n_threads=2"],
            "retriever.name retriever.hybrid.retrievers.bm25.k1",
        ),
        (["actor.use_kl_loss=false", "ref.path=m"], "ref.path"),
        (["actor.clip_ratio=.1", "actor.clip_ratio_low=.2", "actor.clip_ratio_high=.3"], "actor.clip_ratio"),
        (["rollout.search=false", "search.topk=2"], "search.topk"),
        (["rollout.search=false", "search.max_failed=.2"], ""),
        (["actor.optim.lr_warmup_steps=3", "actor.optim.lr_warmup_steps_ratio=.1"],
         "actor.optim.lr_warmup_steps_ratio"),
        (["actor={optim: {lr: 1e-3}}", "critic={optim: {lr: 1e-3}}"], "critic.optim.lr"),
        (["actor.clip_ratio=.1", "actor.clip_ratio_high=.3", "search.url=http://h/", "search.retries=1"], ""),
        (
            ["algorithm.rollout_correction={rollout_is: 'off', rollout_is_threshold: 3}"],
            "algorithm.rollout_correction.rollout_is_threshold",
        ),
        (["sft.steps=0", "sft.batch_size=3", "sft.optim.lr=1e-3"], "sft.batch_size sft.optim.lr"),
        (["search.url=http://h/", "data.corpus=c.jsonl"], "data.corpus"),
        (["search.index=i", "data.corpus=c.jsonl"], ""),  # compared
        (["retriever.e5.model=x", "retriever.bm25.k1=1.5"], "retriever.e5.model"),
        (["reward.format.structure_score=.3"], "reward.format.structure_score"),
        (["reward.weights={format: 1.0}", "reward.format.structure_score=.3"], ""),
    ],
)  # fmt: skip
def test_keys_that_another_key_makes_void_are_named_and_no_others(settings, key):
    config = load_config(algo="grpo", sets=settings).config
    typed = [setting.key for setting in typed_settings(None, {}, settings)]
    assert unread(config, typed, "rl", "local").keys() == {*key.split()}


@pytest.mark.parametrize(
    ("algo", "sets", "key"),
    [
        ("rft", ["sft.steps=0"], "sft.steps"),
        ("sft", ["sft.steps=0"], "sft.steps"),
        ("grpo", ["model.dtype=float16"], "model.dtype"),
        ("grpo", ["rollout.engine=openai", "rollout.openai.url=http://h/"], "rollout.engine"),
        ("ppo", ["search.retrievers={a: {url: 'http://h/', options: {k1: 1}}}"],
         "search.retrievers.a.options"),
    ],
)  # fmt: skip
def test_what_such_a_run_cannot_do_is_refused_with_its_key(tmp_path, monkeypatch, algo, sets, key):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        load_config(algo=algo, sets=sets)
    assert refused.value.key == key


def test_a_file_is_typed_where_the_user_wrote_it_but_not_for_other_algorithms(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "critic: {optim: {lr: 1e-3}}\nper_algorithm: {grpo: {critic: {grad_clip: 2.0}}}\n", encoding="utf-8"
    )
    (said,) = load_config(file=file, algo="grpo").warnings
    assert "critic.optim.lr" in said
    assert "critic.grad_clip" not in said
    assert load_config(file=file, algo="ppo").warnings == ()
    save_config(tmp_path, load_config(file=file, algo="ppo").config)
    saved = load_config(file=tmp_path / "config.yaml", algo="grpo").warnings
    assert not [line for line in saved if "critic.optim.lr" in line]


def test_a_resumed_run_says_which_change_it_does_not_read(tmp_path):
    save_config(tmp_path, load_config(algo="grpo").config)
    cases: list[tuple[Kind, Backend, int]] = [("rl", "local", 2), ("rl", "verl", 1), ("rft", "local", 3)]
    for kind, backend, count in cases:
        sets = ["critic.ppo_max_token_len=9", "cluster.watchdog_s=60", "trainer.save_freq=1"]
        _, lines = with_changes(load_saved(tmp_path), sets, kind, backend)
        assert sum(text.partition("=")[0] in line for text in sets for line in lines) == count
