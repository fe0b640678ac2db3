"""The same scripted episodes through the local backend and through verl's agent loop, and their rows."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.live_server import free_port
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import TOWNS, config, questions
from torch import Tensor

from srl.config import Config
from srl.data.parquet import write_questions
from srl.models.load import load_model
from srl.models.weights import save_model
from srl.protocol import template
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling, ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import Key
from srl.train.load_components import LoadedModel, episode_options, load_rewards
from srl.train.rl import Learner, load_learner
from srl.trajectory import Hit, Passage, Question, Score, Search, Trajectory
from srl.update.actor import Experience

SETTINGS: dict[str, Any] = {
    "data.max_prompt_length": 100, "data.max_response_length": 300, "rollout.max_turn_tokens": 100,
    "rollout.max_obs_length": 60, "rollout.temperature": 0.8, "rollout.n": 2, "search.max_failed": 1.0,
    "actor.optim.weight_decay": 0.0, "critic.optim.weight_decay": 0.0,
}  # fmt: skip
SAYS = (
    ("<think>so</think><search>velmar</search>", "<answer>red</answer>"),
    ("<think>I know that</think><answer>gold</answer>",),
    ("hm", "<search>quillon</search>", "<think>now I know</think><answer>blue</answer>"),
    ("<search>quillon</search>", "<search>the one that is broken</search>"),
)
"""What the samples of one question, and of the next, say: rewarded, wrong, with feedback, and failed."""


class Table:
    """Knows the towns; a query with `broken` in it is refused."""

    index_digest = ""

    async def search(self, query: str) -> Search:
        if "broken" in query:
            return Search(query, status="refused", error="nobody listens")
        flag = TOWNS.get(query.strip(), "none")
        return Search(query, (Hit(Passage("p", f'"{query}"\nits flag is {flag} .'), 1.0),))


def script(request_id: str, turn: int) -> str:
    """The line of the episode `phase/step/question/sample/attempt`; questions have slashes in their ids."""
    *_, number, sample, _ = request_id.split("/")
    said = SAYS[(2 * int(number) + int(sample)) % len(SAYS)]
    return said[turn] if turn < len(said) else ""


def place(folder: Path) -> Path:
    """A run's directory with a random model, its tokenizer and the questions."""
    save_model(tiny_model(max_length=1024), byte_level_tokenizer(), folder / "model")
    byte_level_tokenizer().save_pretrained(folder / "tokenizer")
    write_questions(folder / "train.parquet", asked())
    return folder


def asked() -> list[Question]:
    return questions("train", 4)


def settings(folder: Path, algo: str = "ppo", sets: Sequence[str] = (), **given: object) -> Config:
    return config(folder, algo, sets, **{**SETTINGS, **given})


def environment(chosen: Config) -> Environment:
    codec = Codec(byte_level_tokenizer())
    return Environment(codec, template("tiny"), episode_options(chosen), Table())


def local_episodes(chosen: Config) -> tuple[list[Trajectory], list[Score]]:
    """Every question twice, by the local backend's driver."""
    known = environment(chosen)

    async def run() -> tuple[list[Trajectory], list[Score]]:
        engine, key = ScriptedEngine(known.codec, script), Key(chosen.trainer.seed, step=1)
        found = await known.play_all(engine, asked(), key, n=2)
        return found, await load_rewards(chosen).score(found)

    return asyncio.run(run())


class Server:
    """Stands where verl's client of its servers does, and says the script."""

    def __init__(self, codec: Codec) -> None:
        self.engine = ScriptedEngine(codec, script)

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        sampling = Sampling(sampling_params["max_tokens"], stop=tuple(sampling_params["stop"]))
        said = await self.engine.generate(request_id, prompt_ids, sampling)
        return SimpleNamespace(
            token_ids=list(said.token_ids), log_probs=list(said.logprobs), stop_reason="completed",
            extra_fields={"global_steps": 1},
        )  # fmt: skip


class Writer:
    """Stands where the log's actor does; keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.add = self.fail = SimpleNamespace(remote=self._add)

    async def _add(self, *given: Any) -> None:
        self.records.append(given[-1])


@dataclass(slots=True)
class Rows:
    """The rows that verl's own post-processing would put where its workers read them."""

    fields: list[dict[str, Any]]
    trajectories: list[Trajectory]


def verl_episodes(chosen: Config, monkeypatch: Any, backend: str = "vllm") -> Rows:
    """The same episodes by our agent loop, and by what verl makes of its outputs."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    from srl.train.verl import agent_loop, dataset

    kept: list[dict[str, Any]] = []

    async def put(*, fields: Any, **_: Any) -> None:
        kept.extend(fields)

    writer = Writer()
    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put, raising=False)
    monkeypatch.setattr(agent_loop_tq, "list_of_dict_to_tensordict", list)
    monkeypatch.setattr(
        agent_loop,
        "_state",
        agent_loop.WorkerState(chosen, environment(chosen), load_rewards(chosen), writer),
    )
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.processor = worker.reward_loop_worker_handles = None
    worker.distillation_enabled = False
    rollout_config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=backend)))

    async def run() -> None:
        for position, question in enumerate(asked()):
            for sample in range(2):
                server = Server(environment(chosen).codec)
                ours = agent_loop.SearchLoop(SimpleNamespace(config=rollout_config), server, run="run")
                row = dataset.row(question, "train", position) | {"global_steps": 1, "session_id": sample}
                output = await ours.run({}, **row)
                await worker._agent_loop_postprocess(output, False, uid=str(position), **row)

    asyncio.run(run())
    return Rows(kept, [record.trajectory for record in writer.records])


def with_padding(fields: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows, and `count` of those with which verl makes a batch divisible."""
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

    filler, _ = construct_minimal_padding_template(dict(fields[0]), {}, 0)
    return [*fields, *[dict(filler) for _ in range(count)]]


def response(tensor: Tensor, fields: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Our (B, T) as one tensor a row over the tokens after the prompt; zeros for rows that we lack."""
    found = []
    for number, row in enumerate(fields):
        start, length = len(row["prompts"]), len(row["responses"])
        known = number < len(tensor)
        found.append(tensor[number, start : start + length] if known else torch.zeros(length))
    return found


def padded(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)


def learner(chosen: Config, folder: Path) -> Learner:
    """The local backend's networks, with a reference that is not the policy and a head that is not zero."""
    model = load_model(folder / "model", device="cpu")
    made = load_learner(chosen, LoadedModel(model, Codec(byte_level_tokenizer())))
    made.reference = tiny_model(max_length=1024, seed=3).eval() if made.config.needs_reference else None
    if made.critic is not None:
        torch.nn.init.normal_(made.critic.head.weight, generator=torch.Generator().manual_seed(0))
    return made


def moved(experience: Experience, seed: int = 0) -> Experience:
    """The experience of a policy that has moved since, so that ratios and values are clipped."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor | None, scale: float) -> Tensor | None:
        return None if tensor is None else tensor + scale * torch.randn(tensor.shape, generator=generator)

    return replace(
        experience, old_logprobs=noise(experience.old_logprobs, 0.4), values=noise(experience.values, 0.5),
        ref_logprobs=noise(experience.old_logprobs, 0.8),
    )  # fmt: skip


def fields_of(
    experience: Experience, fields: Sequence[dict[str, Any]], network: str
) -> list[dict[str, Tensor]]:
    """What verl's trainer adds to each row before it updates a network."""
    names = {
        "actor": {
            "old_log_probs": experience.old_logprobs, "ref_log_prob": experience.ref_logprobs,
            "advantages": experience.advantages, "rollout_is_weights": experience.weights,
        },
        "critic": {"values": experience.values, "returns": experience.returns},
    }[network]  # fmt: skip
    columns = {name: response(tensor, fields) for name, tensor in names.items() if tensor is not None}
    return [{name: rows[number] for name, rows in columns.items()} for number in range(len(fields))]


def run_workers(job: dict[str, Any], folder: Path, world: int) -> list[dict[str, Any]]:
    """verl's workers on `job`, as many processes as `world`; what each answered."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"without": (), **job}, folder / "job.pt")
    program = Path(__file__).with_name("verl_rank.py")
    port = str(free_port())
    processes = []
    for rank in range(world):
        names = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "LOCAL_RANK": "0", "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", program, folder / "job.pt", folder / "answer.pt"]
        processes.append(
            subprocess.Popen(
                command, env=os.environ | names, cwd=folder, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(text)
    return [torch.load(folder / f"answer.pt.{rank}", weights_only=False) for rank in range(world)]
