"""A configuration of verl's or Search-R1's becomes ours; scripts are read as a shell would, and never run."""

import json
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.import_inputs import GRPO, imported, search_r1, verl

from srl.cli import main
from srl.config import Config
from srl.config.keys import TABLE, flat, plain
from srl.config.yaml12 import parse
from srl.errors import UserError
from srl.train.importing.convert import DEFAULTS, import_file, names_of, read_value
from srl.train.importing.script import read_script

COMMAND = "python3 -m verl.trainer.main_ppo"


def words(text: str) -> list[str]:
    """The words of the training command in `text`."""
    return read_script(text)[0]


def at(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Search-R1's, GRPO": (
        search_r1(*GRPO, "actor_rollout_ref.actor.kl_loss_coef=0.002"),
        {"algorithm.name": "grpo", "rollout.n": 5, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.002,
         "algorithm.use_kl_in_reward": False, "data.train_files": ("data/towns/train.parquet",),
         "data.max_prompt_length": 2048, "data.max_response_length": 4096, "rollout.max_turn_tokens": 500,
         "rollout.max_obs_length": 450, "rollout.max_turns": 4, "rollout.top_p": 0.95,
         "actor.entropy_coeff": 0.001, "actor.clip_ratio_c": None, "trainer.val_before_train": False,
         "search.url": ("http://127.0.0.1:8000/retrieve",), "trainer.logger": ("wandb",), "sft.steps": 0,
         "actor.mask_observations": True, "eval.temperature": 0, "model.path": "models/small"},
    ),
    "Search-R1's, PPO": (
        search_r1("algorithm.kl_ctrl.kl_coef=0.01", "critic.optim.lr=2e-5", "trainer.critic_warmup=3",
                  "actor_rollout_ref.rollout.n=3"),
        {"algorithm.name": "ppo", "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k1",
         "algorithm.kl_ctrl.kl_coef": 0.01, "critic.optim.lr": 2e-5, "critic.ppo_mini_batch_size": 256,
         "trainer.critic_warmup": 2, "rollout.n": 1},
    ),
    "with its own options, whose defaults hold": (
        "LR=2e-6\nMODEL=models/small\nTURNS=3\n"
        'while [[ $# -gt 0 ]]; do\n  case "$1" in\n    --lr) LR="$2"; shift 2 ;;\n    --model)\n'
        '      MODEL="$2"\n'
        "      shift 2 ;;\n    *) echo \"unknown $1\" >&2; exit 1 ;;\n  esac\ndone\n"
        f"{COMMAND} max_turns=$TURNS actor_rollout_ref.actor.optim.lr=$LR \\\n"
        '  actor_rollout_ref.model.path="$MODEL" "$@" 2>&1 | tee run.log\n',
        {"rollout.max_turns": 3, "actor.optim.lr": 2e-6, "model.path": "models/small"},
    ),
    "with defaults, sums and a branch for its log": (
        'ROOT=${ROOT:-"${BASE:-work}"}\nN=${1:-4}\nPROMPT=$((1024 * 2 + 1))\n'
        'if [ -z "$LOG" ]; then\n  LOG=run.log\nfi\n'
        f"{COMMAND} \\\n  algorithm.adv_estimator=grpo \\\n  actor_rollout_ref.rollout.n=$N \\\n"
        "  data.train_files=$ROOT/train.parquet \\\n  reward.a='a < b' \\\n"
        "  data.max_prompt_length=$PROMPT trainer.default_local_dir=$(pwd)/$LOG \\\n"
        "  trainer.total_training_steps=9\n",
        {"algorithm.name": "grpo", "rollout.n": 4, "data.train_files": ("work/train.parquet",),
         "trainer.total_training_steps": 9,
         "data.max_prompt_length": 2049},
    ),
    "submitted to Ray, with the format's program": (
        'ray job submit --address="$RAY" --no-wait --runtime-env-json=\'{"env_vars": {"A": "1"}}\' -- \\\n'
        "  python3 -m verl.trainer.main_ppo_format reward_model.structure_format_score=0.3 \\\n"
        "  reward_model.final_format_score=0.05 +trainer.val_before_train=true max_turns=2\n",
        {"reward.weights": {"format": 1.0}, "rollout.max_turns": 2, "trainer.val_before_train": True},
    ),
    "verl's with tools": (
        "export VLLM_USE=1\nCONF=\"config\"; PROJECT=towns\nnohup python -u -m verl.trainer.main_ppo "
        "--config-path=\"$CONF\" actor_rollout_ref.rollout.name=sglang \\\n"
        "  data.train_files=\"${PROJECT}_x\" \\\n"
        "  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \\\n"
        "  actor_rollout_ref.rollout.multi_turn.tool_config_path=$CONF/tool.yaml \\\n"
        "  actor_rollout_ref.actor.policy_loss.loss_mode=gspo data.val_batch_size=null > log.txt 2>&1 &\n",
        {"cluster.rollout": "sglang", "data.train_files": ("towns_x",), "rollout.max_turns": 3,
         "rollout.protocol": "native", "rollout.call_format": "hermes", "rollout.max_calls": 1,
         "actor.policy_loss.loss_mode": "gspo", "rollout.max_turn_tokens": 512},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_becomes_the_same_run(tmp_path, text, expected):
    config, made = imported(tmp_path, text)
    assert {key: at(config, key) for key in expected} == expected
    head = [line.removeprefix("# ") for line in made.text.partition("\n\n")[0].splitlines()]
    assert head[1:] == list(made.report)


CASES = {
    "X \"a.b=$A  $B\" a.c='x \"q\"'": ["a.b=2  three", 'a.c=x "q"'],
    "X a.b=\"['$A', '${B}']\" a.c=['wandb']": ["a.b=['2', 'three']", "a.c=[wandb]"],
    "X a.b='$A' a.c=\"\\$A\" a.d=${A}_${B}-$A.$B/x": ["a.b=$A", "a.c=$A", "a.d=2_three-2.three/x"],
    "X ${NONE:-c.d=4} a.b=${A:-5} a.c=${EMPTY:-6}": ["c.d=4", "a.b=2", "a.c=6"],
    'X a.b="${NONE:-"$A/${B}"}"': ["a.b=2/three"],
    "M='a.b=1 c.d=2'\nX $M": ["a.b=1", "c.d=2"],
    "# it's no X\nX a.b=1 # c.d=2\nY e.f=3": ["a.b=1"],
    "echo \"# it's\"\nX a.b=c#d e.f=http://h:1/x?y=z": ["a.b=c#d", "e.f=http://h:1/x?y=z"],
    "X a.b=1 2>&1 > out.txt c.d=2 | tee x": ["a.b=1", "c.d=2"],
    "V=1\nV=2\nW=$V-3; X a.b=$W; Z c.d=2 && Z e.f=3": ["a.b=2-3"],
    "function F() {\n  date\n}\nV=1\nX a.b=$V": ["a.b=1"],
    "X a.b=1 \\\n  # more \\\n  c.d=2": ["a.b=1"],
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_words_are_those_of_a_shell(text):
    assert words("A=2\nB='three'\nEMPTY=\n" + text.replace("X", COMMAND)) == CASES[text]


@pytest.mark.parametrize(
    "text",
    [
        f"{COMMAND} data.train_files=$HERE/a",
        f"A=$(pwd)/x\n{COMMAND} data.train_files=$A",
        f"A=`date`\n{COMMAND} data.train_files=$A",
        f"{COMMAND} data.train_files=${{B%.*}}",
        f"A=1\nif [ -z $A ]; then\n A=2\nfi\n{COMMAND} data.train_files=$A",
        f"[ -n x ] && A=1\n{COMMAND} data.train_files=$A",
        f"for A in 1 2; do\n{COMMAND} data.train_files=$A\ndone",
        f"{COMMAND} data.train_files=$1",
    ],
)
def test_a_value_that_only_a_shell_can_tell_is_refused_where_it_matters(tmp_path, text):
    with pytest.raises(UserError) as refused:
        imported(tmp_path, text)
    assert refused.value.key == "data.train_files"
    harmless = text.replace("data.train_files=", "max_turns=1 trainer.default_local_dir=")
    _, made = imported(tmp_path, harmless)
    assert [line for line in made.report if "trainer.default_local_dir" in line]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abX=.'\"\\ #\n[]{}()$`<>|&;:-+@*0", max_size=60))
def test_no_text_breaks_the_reader(text):
    for whole in (f"{COMMAND} a.b=1 {text}", text):
        with suppress(ValueError):
            words(whole)


def test_nothing_in_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    for text in (
        f"X=$(touch {mark})\n{COMMAND} a.b=$X",
        f"{COMMAND} a.b=`touch {mark}` 'c.d=$(touch {mark})'",
        f"touch {mark}\n{COMMAND} a.b=1",
        f"{COMMAND} a.b=$((__import__('os').system('touch {mark}')))",
    ):
        with suppress(ValueError):
            words(text)
    assert not mark.exists()


BAD_FILES = {
    "missing.sh": None,
    "empty.sh": b" \n",
    "binary.sh": b"\x7fELF\xff\xfe\x00",
    "growing.sh": ("A=a\n" + "A=$A$A\n" * 40 + f"{COMMAND} data.train_files=$A").encode(),
    "open.sh": f"{COMMAND} a.b='x\n".encode() + b"y\n" * 2000,
    "two.sh": f"{COMMAND} max_turns=1\n\n{COMMAND} max_turns=2".encode(),
    "none.sh": b"echo hello\n",
    "word.sh": f"{COMMAND} max_turns=1 oops".encode(),
    "array.sh": f'A=(\n  max_turns=1\n)\n{COMMAND} "${{A[@]}}"'.encode(),
    "mapping.sh": f"{COMMAND} trainer.logger={{a:1}}".encode(),
    "broken.yaml": b"a: [1\n",
    "twice.yaml": b"data: {a: 1}\ndata: {b: 1}\n",
    "laughs.yaml": b"a0: &a0 {x: 1, y: 2}\n"
    + b"".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n".encode() for n in range(1, 40)),
    "skyrl.txt": b"trainer.algorithm.advantage_estimator=grpo\ngenerator.n_samples_per_prompt=5\n",
    "ours.yaml": b"format: 1\nmodel: {path: small}\n",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_none_of_theirs_is_refused_in_one_line_that_names_it(tmp_path, name):
    content = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        import_file(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)


VALUES: dict[str, Any] = {
    "1": 1, "-7": -7, "1e-6": 1e-6, ".5": 0.5, "2.": 2.0, "true": True, "False": False, "null": None,
    "words": "words", "a/b-c.d:80": "a/b-c.d:80", "'1'": "1", '"a, b"': "a, b", "[]": [], "{}": {},
    "[1,two,3.0]": [1, "two", 3.0], "[ 'a' , b ]": ["a", "b"], "[[1],[2,[3]]]": [[1], [2, [3]]],
    "${a.b}": "${a.b}", "x${a}y": "x${a}y", "['${a}',2]": ["${a}", 2],
    "[http://127.0.0.1:8000/x]": ["http://127.0.0.1:8000/x"],
}  # fmt: skip


def test_values_are_read_as_they_are_meant():
    assert {text: repr(read_value(text)) for text in VALUES} == {text: repr(VALUES[text]) for text in VALUES}


def test_yaml_is_read_with_its_references_and_bases(tmp_path):
    text = """
defaults: [ppo_trainer, my_base, _self_]
actor_rollout_ref:
  model: {path: small}
  actor: {ppo_mini_batch_size: 16, optim: {lr: 1e-6}}
  rollout: {prompt_length: "${data.max_prompt_length}", n: 4}
critic:
  {ppo_mini_batch_size: "${actor_rollout_ref.actor.ppo_mini_batch_size}", cliprange_value: "${.missing}"}
data: {train_files: ~/a.parquet, train_batch_size: 32, max_prompt_length: 100}
trainer: {total_training_steps: "${data.train_batch_size}", save_freq: "${trainer.total_training_steps}"}
"""
    config, made = imported(tmp_path, text, "verl.yaml")
    assert (config.rollout.n, config.critic.ppo_mini_batch_size, config.actor.optim.lr) == (4, 16, 1e-6)
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (32, 32)
    assert config.data.train_files == (str(Path.home() / "a.parquet"),)
    assert [line for line in made.report if "defaults" in line]
    assert [line for line in made.report if "${.missing}" in line and "critic.cliprange_value" in line]


# Meanings


TOOLS = "actor_rollout_ref.rollout.multi_turn.enable=true\nactor_rollout_ref.rollout.multi_turn"
MEANINGS = {
    "actor_rollout_ref.actor.kl_loss_type=mse": ("actor.kl_loss_type", "k2"),
    "actor_rollout_ref.actor.kl_loss_type=k3+": ("actor.kl_loss_type", "k3+"),
    "algorithm.adv_estimator=reinforce++": ("algorithm.name", "reinforce_plus_plus"),
    "algorithm.adv_estimator=gae": ("algorithm.name", "ppo"),
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm": ("actor.loss_agg_mode", "constant"),
    "actor_rollout_ref.actor.optim.warmup_style=cosine": ("actor.optim.lr_scheduler_type", "cosine"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps=-1": ("actor.optim.lr_warmup_steps", 0),
    "actor_rollout_ref.rollout.name=sglang_async": ("cluster.rollout", "sglang"),
    "actor_rollout_ref.actor.policy_loss.loss_mode=gspo": ("actor.policy_loss.loss_mode", "gspo"),
    "trainer.save_freq=-1": ("trainer.save_freq", 0),
    "data.val_max_samples=-1": ("eval.val_questions", None),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true": ("reward.overlong_buffer.enable", True),
    "actor_rollout_ref.rollout.multi_turn.max_user_turns=3": ("rollout.max_turns", 3),
    "actor_rollout_ref.rollout.multi_turn.max_user_turns=0": ("rollout.max_turns", 4),
    f"{TOOLS}.max_parallel_calls=3": ("rollout.max_calls", 3),
    f"{TOOLS}.format=qwen3_coder": ("rollout.call_format", "qwen-xml"),
    f"{TOOLS}.format=gpt-oss": ("rollout.call_format", "auto"),
    "actor_rollout_ref.rollout.multi_turn.format=hermes": ("rollout.protocol", "tags"),
    "+data.apply_chat_template_kwargs.enable_thinking=false": (
        "model.chat_template_kwargs",
        {"enable_thinking": False},
    ),
    "actor_rollout_ref.actor.optim.clip_grad=0.5": ("actor.grad_clip", 0.5),
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.6": ("eval.temperature", 0.0),
    "data.train_files=\"[a.parquet,'b c.parquet']\"": ("data.train_files", ("a.parquet", "b c.parquet")),
}


@pytest.mark.parametrize("setting", MEANINGS)
def test_name_of_verls_has_its_counterpart(tmp_path, setting):
    key, value = MEANINGS[setting]
    config, _ = imported(tmp_path, verl(setting))
    assert at(config, key) == value


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.actor.kl_loss_type=abs",
        "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        "actor_rollout_ref.rollout.name=trtllm",
        "actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
    ],
)
def test_value_that_srl_has_nothing_for_is_refused(tmp_path, setting):
    with pytest.raises(UserError) as refused:
        imported(tmp_path, verl(setting))
    assert setting.partition("=")[2] in str(refused.value)


@pytest.mark.parametrize(
    "setting",
    [
        "data.val_files=data/test.parquet",
        "trainer.total_training_steps=null",
        "actor_rollout_ref.rollout.top_k=50",
        "critic.model.path=models/other",
        "trainer.logger=[wandb,mlflow]",
        "nothing.at_all=1",
    ],
)
def test_what_is_not_taken_as_it_stands_is_said(tmp_path, setting):
    _, without = imported(tmp_path, verl())
    _, made = imported(tmp_path, verl(setting))
    named = (setting.partition("=")[0], setting.partition("=")[2].strip("[]").rpartition(",")[2], "epochs")
    assert [line for line in set(made.report) - set(without.report) if any(name in line for name in named)]


@pytest.mark.parametrize("is_search_r1", [True, False])
def test_each_name_of_theirs_leads_to_a_key_of_ours(is_search_r1):
    names = names_of(is_search_r1=is_search_r1)
    keys = {*names.values(), *DEFAULTS}
    assert {key for key in keys if not key.startswith("reward.format.")} <= TABLE.keys()
    assert len(names) > 80


def shipped(name: str) -> str:
    """The configuration that comes with verl, a line for each setting, its references as they stand."""
    package = pytest.importorskip("verl")
    file = Path(package.__file__).parent / "trainer" / "config" / f"_generated_{name}.yaml"
    tree = parse(file.read_text(encoding="utf-8"), name)
    pairs = [(".".join(path), plain(value)) for path, value in flat(tree) if path[-1] != "_target_"]
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in pairs if value != "???")


@pytest.mark.slow
@pytest.mark.must_run
def test_verls_own_configuration_is_all_defaults(tmp_path):
    """A file that says nothing means the same."""
    whole, made = imported(tmp_path, shipped("ppo_trainer"), "verl.yaml")
    assert not [line for line in made.report if line.startswith(("not read", "ignored"))]
    bare, _ = imported(tmp_path, "trainer.nnodes=1\n", "bare.txt")
    both = [dict(flat(plain(config.model_dump()))) for config in (whole, bare)]
    differ = {".".join(key) for key in both[0] if both[0][key] != both[1].get(key)}
    assert differ <= {
        "data.train_files", "data.val_files", "model.path", "trainer.logger",
        "trainer.seed", "critic.ppo_max_token_len", "cluster.n_gpus_per_node",
        "cluster.tensor_model_parallel_size",
        "actor.clip_ratio_low", "actor.clip_ratio_high",
    }  # fmt: skip


def test_command_writes_a_file_that_is_planned_and_says_the_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(search_r1(*GRPO, "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))
    assert main(["train", "import", "train.sh", "--out", "deep/ours.yaml"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", list(import_file("train.sh").report))
    assert main(["train", "import", "train.sh"]) == 0
    assert capsys.readouterr().out == Path("deep/ours.yaml").read_text()
    assert main(["train", "import", "train.sh", "--out", "deep/ours.yaml"]) == 2
    assert main(["train", "--config", "deep/ours.yaml", "--dry-run"]) == 0
