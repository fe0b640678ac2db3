"""The local backend: loads and checks what a run in this process needs, for `srl.train.run`.

What a run then does is its loop: `srl.train.rl`, `srl.train.sft` or `srl.train.rejection_sampling`.
"""

from __future__ import annotations

from typing import Any

import torch

from srl.config import Config
from srl.config.cross_checks import check_truncation
from srl.errors import UserError
from srl.models.weights import model_digest
from srl.train.load_components import (
    engine_name,
    load_engine,
    load_environment,
    load_policy,
    load_rewards,
)
from srl.train.logged_episodes import check_filter
from srl.train.loop import Loop
from srl.train.make_missing import demonstration_file
from srl.train.model_check import check_model
from srl.train.questions import load_splits
from srl.train.rejection_sampling import RejectionSampling
from srl.train.report import Terminal
from srl.train.rl import (
    ReinforcementLearning,
    load_learner,
    load_optimisers,
    reference_digest,
    samples_as_trained,
)
from srl.train.run_directory import RFT, SFT
from srl.train.search import as_inputs, index_digests, load_search
from srl.train.sft import (
    FineTuning,
    demonstrated,
    digest_of_episodes,
    sft_optimiser,
)
from srl.train.threads import set_threads
from srl.train.watches import Watcher
from srl.workspace import Workspace


def check(config: Config) -> None:
    """Raises UserError for what this backend does not find here."""
    if config.rollout.engine == "vllm":
        from srl.rollout.vllm_engine import version_problem

        if problem := version_problem():
            raise UserError(f"rollout.engine = vllm: {problem}")


def prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> Loop:
    """Load and check everything, the rewards last. The seed is set first, for new weights such as an
    adapter's."""
    torch.manual_seed(config.trainer.seed)
    policy = load_policy(config.model, terminal.note)
    actor, longest = policy.model, config.data.max_episode_tokens
    threads = set_threads(actor, config)
    where = f"{threads} thread{'' if threads == 1 else 's'}"
    splits = load_splits(config, policy.codec, terminal.note, algo)
    search = load_search(config, workspace, terminal.note)
    environment = load_environment(config, policy.codec, search, terminal.note)
    reward = load_rewards(config)
    for line in reward.without_effect(splits.train):
        terminal.note(f"warning: {line}")
    check_truncation(config, engine_name(config))
    engine = load_engine(config, policy, terminal.note)
    check_model(actor, longest, terminal.note)
    inputs = as_inputs(index_digests(search), environment.protocol)
    if config.model.lora_rank > 0:
        inputs["base"] = model_digest(str(config.model.path))
    loaded: dict[str, Any] = {
        "config": config, "terminal": terminal, "splits": splits, "environment": environment,
        "reward": reward, "engine": engine, "actor": actor, "where": where, "inputs": inputs,
    }  # fmt: skip
    if algo == RFT:
        check_filter(config.sft.filter)
        # Each round is saved and validated: it may take hours.
        loaded["config"] = config.with_settings({"trainer.save_freq": 1, "trainer.test_freq": 1})
        loop: Loop = RejectionSampling(**loaded)
    elif algo == SFT:
        file = demonstration_file(config, workspace, terminal.note)
        episodes = demonstrated(file, environment, terminal.note, splits.train)
        inputs["episodes"] = digest_of_episodes(episodes)
        loop = FineTuning(**loaded, optimisers={"actor": sft_optimiser(config.sft, actor)}, episodes=episodes)
    else:
        learner = load_learner(config, policy, samples_as_trained(engine, actor))
        if config.needs_reference:
            is_base = config.model.lora_rank > 0 and config.ref.path is None
            inputs["reference"] = inputs["base"] if is_base else reference_digest(config, learner.reference)
        loop = ReinforcementLearning(
            **loaded, critic=learner.critic, learner=learner, watcher=Watcher(config),
            optimisers=load_optimisers(config, learner, len(splits.train)),
        )  # fmt: skip
    reward.load()
    return loop
