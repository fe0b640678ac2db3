"""Small inputs of the shape of verl's and Search-R1's, for the tests of `srl train import`."""

from pathlib import Path

from srl.config import Config, load_config
from srl.train.importing.convert import Imported, import_file

HEAD = """\
export CUDA_VISIBLE_DEVICES=0,1
data_name=towns
export DATA_DIR='data/'${data_name}   # where the questions lie
# export BASE='models/other'
export BASE="models/small"
NAME=towns-run

# python3 -m verl.trainer.main_ppo not this one
PYTHONUNBUFFERED=1 python3 -m verl.trainer.PROGRAM \\
    data.train_files=$DATA_DIR/train.parquet \\
    data.val_files="$DATA_DIR/test.parquet" \\
    data.train_batch_size=512 \\
    data.max_prompt_length=4096 \\
    data.max_response_length=500 \\
    data.max_start_length=2048 \\
    data.max_obs_length=450 \\
    actor_rollout_ref.model.path=$BASE \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=64 \\
    actor_rollout_ref.actor.state_masking=true \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \\
    +trainer.val_before_train=false \\
    trainer.logger=['wandb'] \\
    trainer.total_training_steps=1005 \\
    trainer.default_local_dir=kept/$NAME \\
    max_turns=4 \\
    retriever.url="http://127.0.0.1:8000/retrieve" \\
"""
TAIL = "    2>&1 | tee $NAME.log\n"
GRPO = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.n_agent=5",
)


def search_r1(*settings: str, program: str = "main_ppo") -> str:
    """A training script as Search-R1 has them, with further settings."""
    return HEAD.replace("PROGRAM", program) + "".join(f"    {item} \\\n" for item in settings) + TAIL


def verl(*settings: str) -> str:
    """A list of overrides as verl takes them."""
    lines = [
        "data.train_files=train.parquet",
        "data.val_files=dev.parquet",
        "actor_rollout_ref.model.path=small",
    ]
    return "\n".join([*lines, "trainer.total_training_steps=20", *settings]) + "\n"


def imported(folder: Path, text: str, name: str = "run.sh") -> tuple[Config, Imported]:
    """The configuration that a file of this text becomes, as it loads, and what was made of it."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    made = import_file(file)
    out = folder / "imported.yaml"
    out.write_text(made.text, encoding="utf-8")
    return load_config(file=out).config, made
