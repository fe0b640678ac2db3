"""One of verl's workers, for the tests: `python verl_rank.py JOB ANSWER`, with RANK and WORLD_SIZE set.

JOB holds our configuration, rows as verl's agent loop leaves them, and cases: a network, a
configuration of its loss and what the trainer would add to the rows; `without` names patches to leave out.
The classes, the configuration and
the calls are those of a run under Ray; only Ray is not there. The answer has the gradients before the
optimiser's step, or the weights after it. Not imported by a test, since verl brings a package `tests`
that hides ours.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

FIELDS = ("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask")


class Worker:
    """The actor and, on demand, the critic of one process."""

    def __init__(self, config: Any, run: Path) -> None:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        composed = compose(config, run)
        self.run = run
        self.actor = ActorRolloutRefWorker(config=composed.actor_rollout_ref, role="actor")
        self.actor.init_model()
        self.critic = make_critic(composed) if composed.critic.enable else None

    def engine(self, network: str) -> Any:
        return (self.actor.actor if network == "actor" else self.critic).engine

    def call(self, network: str, method: str, data: Any) -> Any:
        names = {"infer": ("compute_log_prob", "infer_batch"), "update": ("update_actor", "train_mini_batch")}
        owner, name = (
            (self.actor, names[method][0]) if network == "actor" else (self.critic, names[method][1])
        )
        return getattr(owner, name)(data)

    def use_loss(self, network: str, config: Any) -> None:
        """The loss of another configuration, on the weights that are there."""
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss, value_loss

        composed = compose(config, self.run)
        if network == "actor":
            chosen = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
            self.actor.actor.set_loss_fn(partial(ppo_loss, config=chosen))
        else:
            self.critic.set_loss_fn(partial(value_loss, config=omega_conf_to_dataclass(composed.critic)))


def compose(config: Any, run: Path) -> Any:
    """The run's configuration, but with gradient descent: Adam's first step is a sign and tells little."""
    from omegaconf import OmegaConf

    from srl.train.verl.config_check import validated
    from srl.train.verl.job import Job

    composed = validated(config, Job(run, cpu=True, gpus_per_node=int(os.environ["WORLD_SIZE"])))
    for optim in ("actor_rollout_ref.actor.optim", "critic.optim"):
        OmegaConf.update(composed, f"{optim}.optimizer", "SGD", force_add=True)
        OmegaConf.update(composed, f"{optim}.override_optimizer_config", None, merge=False, force_add=True)
    return composed


def make_critic(composed: Any) -> Any:
    """The critic's worker as verl's trainer makes it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    known = omega_conf_to_dataclass(composed.critic)
    for name in ("infer_max_token_len_per_gpu", "max_token_len_per_gpu"):
        setattr(known.engine, name, known.ppo_infer_max_token_len_per_gpu)
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model", model_config=known.model, engine_config=known.engine,
            optimizer_config=known.optim, checkpoint_config=known.checkpoint,
        )
    )  # fmt: skip
    made.reset()
    return made


def batch(rows: list[dict[str, torch.Tensor]], **settings: Any) -> Any:
    """This process's share of the rows, with what verl's trainer sends along."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size = len(rows) // world
    assert size * world == len(rows), "verl's rows divide by its workers"
    mine = rows[rank * size : (rank + 1) * size]
    nested = {
        name: torch.nested.as_nested_tensor([row[name] for row in mine], layout=torch.jagged)
        for name in mine[0]
    }
    data = TensorDict(nested, batch_size=size)
    tensordict_utils.assign_non_tensor(data, global_token_num=[len(row["input_ids"]) for row in mine])
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def infer(worker: Worker, network: str, job: dict[str, Any]) -> list[torch.Tensor]:
    """Log-probs or values of this process's rows, one a response token."""
    from verl.workers.utils.padding import response_from_nested

    data = batch(
        [{name: row[name] for name in FIELDS} for row in job["rows"]],
        temperature=job["temperature"], compute_loss=False, calculate_entropy=False,
    )  # fmt: skip
    output = worker.call(network, "infer", data)
    found = output["log_probs" if network == "actor" else "values"]
    return list(response_from_nested(found, data["response_mask"]).unbind())


def update(worker: Worker, case: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The gradients of one mini-batch of all rows, or with `step` the weights after its step."""
    network, rows = case["network"], []
    for row, extra in zip(job["rows"], case["fields"], strict=True):
        rows.append({name: row[name] for name in FIELDS} | extra)
    engine, answer = worker.engine(network), dict[str, Any]()
    worker.use_loss(network, case["config"])
    original = engine.optimizer_step

    def step() -> float:
        answer["gradients"] = gathered(engine.module, lambda weight: weight.grad)
        norm = original() if case["step"] else 0.0
        answer["weights"] = gathered(engine.module, lambda weight: weight) if case["step"] else {}
        return float(norm)

    engine.optimizer_step = step
    try:
        data = batch(
            rows, temperature=job["temperature"], calculate_entropy=network == "actor", epochs=1, seed=1,
            global_batch_size=len(rows), mini_batch_size=len(rows), dataloader_kwargs={"shuffle": False},
        )  # fmt: skip
        output = worker.call(network, "update", data)
    finally:
        engine.optimizer_step = original
    answer["metrics"] = dict(output["metrics"])
    return answer


@torch.no_grad()
def gathered(module: torch.nn.Module, pick: Any) -> dict[str, torch.Tensor]:
    """What `pick` takes from each parameter, whole; zeros where it takes nothing."""
    found = {}
    for name, weight in module.named_parameters():
        picked = pick(weight)
        picked = torch.zeros_like(weight) if picked is None else picked
        found[name] = picked.full_tensor().clone()
    return found


def main(job_file: str, answer_file: str) -> None:
    from srl.train.verl import patches
    from srl.train.verl import without_gpu as more

    job = torch.load(job_file, weights_only=False)
    more.install()
    for patch in (*patches.PATCHES, *more.PATCHES):
        if patch.name not in job["without"]:
            patch.apply()
    worker = Worker(job["config"], job["run"])
    networks = ["actor", "critic"] if worker.critic is not None else ["actor"]
    answer = {"infer": {name: infer(worker, name, job) for name in networks}, "cases": {}}
    for case in job["cases"]:
        answer["cases"][case["name"]] = update(worker, case, job)
    torch.save(answer, f"{answer_file}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
