"""The policy's update alone, on the real shape: as `srl train` does it, against eager float32 with padding.

Eight episodes of two to four turns, one optimiser step. The first update of a process, which compiles where
the update is compiled, is reported apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.speed.harness import (
    Entry,
    Options,
    Rounds,
    in_pairs,
    medians,
    round_off,
    said,
    with_before,
)

EPISODES = 8


def trajectories_of(made: Any, count: int, seed: int = 0) -> list[Any]:
    """Finished episodes with the lengths of `rollout`'s plans; the tokens are those of passages."""
    from srl.trajectory import Question, Segment, Trajectory

    found, start = [], 0
    for index, plan in enumerate(made.plans(seed, count)):
        segments = [Segment("prompt", tuple(plan.prompt), "", 0)]
        for turn, length in enumerate(plan.turns):
            ids = tuple(made.texts[start : start + length])
            start = (start + length) % (len(made.texts) - 100)
            segments.append(Segment("policy", ids, "", turn, (-2.0,) * len(ids)))
            if turn < len(plan.observations):
                segments.append(Segment("observation", tuple(plan.observations[turn]), "", turn))
        found.append(Trajectory(Question(f"q{index // 4}", "", ("x",)), segments, sample=index % 4))
    return found


def measured(made: Any, update: Callable[[], object], rounds: Rounds) -> None:
    """Warm up, then serve."""
    done = trajectories_of(made, made.updates)
    began = time.perf_counter()
    update()
    rounds.report({"first_s": time.perf_counter() - began})
    tokens = sum(len(item.token_ids) for item in done)

    def once(request: dict[str, Any]) -> dict[str, float]:
        began = time.perf_counter()
        update()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens_per_s": tokens / seconds}

    rounds.serve(once)


def setting(options: Options, settings: dict[str, Any]) -> Any:
    from bench.speed.rollout import Setting

    made: Any = Setting(options, {"shape": "real", **settings})
    made.updates = 4 if options.smoke else EPISODES
    return made


def ours(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """`LocalTrainer`'s update with the defaults of the configuration."""
    from srl.train.experience import make_experience
    from srl.train.load_components import load_learner, load_optimisers
    from srl.train.local_backend import LocalTrainer
    from srl.trajectory import Score
    from srl.update.compiling import compile_updates
    from srl.workspace import Workspace

    made = setting(options, settings)
    learner = load_learner(made.config, made.policy)
    if made.config.actor.use_torch_compile:
        longest, cache = made.config.data.max_episode_tokens, Workspace(Path(options.cache)).compiled
        compile_updates(learner.trunks, longest, cache, said)
    optimisers = load_optimisers(made.config, learner)
    done = trajectories_of(made, made.updates)
    experience, _ = make_experience(learner, done, [Score(float(index % 2)) for index in range(len(done))])
    nothing: Any = None
    trainer = LocalTrainer(made.config, Path(options.cache), nothing, learner, optimisers)
    measured(made, lambda: trainer._update(1, experience), rounds)


def eager(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """What one writes first: padded rows, transformers' own forward in float32, torch's AdamW."""
    import torch

    from srl.update.batch import collate, micro_batches

    made = setting(options, settings)
    model: Any = made.policy.model
    batch = collate(trajectories_of(made, made.updates))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6)
    advantages = torch.tensor([1.0, -1.0]).repeat(len(batch) // 2)

    def update() -> None:
        for index in micro_batches(batch.lengths, made.config.actor.ppo_max_token_len):
            rows = batch.rows(index)
            wanted = rows.response_mask[:, 1:] != 0
            trunk = model.get_decoder()
            states = trunk(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False)
            logits = model.get_output_embeddings()(states.last_hidden_state[:, :-1][wanted]).float()
            chosen = rows.input_ids[:, 1:][wanted]
            logprobs = torch.log_softmax(logits, -1).gather(1, chosen[:, None]).squeeze(1)
            ratio = (logprobs - logprobs.detach()).exp()
            each = advantages[index][:, None].expand(wanted.shape)[wanted]
            (-(ratio * each).sum() / batch.response_mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    measured(made, update, rounds)


CONTENDERS = {"ours": ours, "eager": eager}


EAGER = Entry("eager float32, padded", "eager", 2, {"dtype": "float32"})


def entries_of(options: Options) -> list[Entry]:
    """Ours at each precision, with the compiler too, and before."""
    compiled: dict[str, Any] = {"keys": {"actor.use_torch_compile": True}}
    found = []
    for dtype in ("float32", "bfloat16"):
        found.append(Entry(f"srl, {dtype}, not compiled", "ours", 2, {"dtype": dtype}))
        found += with_before(Entry(f"srl, {dtype}", "ours", 2, {"dtype": dtype, **compiled}), options)
    return found


def run(options: Options) -> dict[str, Any]:
    """Ours at both precisions in turns with eager float32 on two threads."""
    entries = entries_of(options)
    runs, ready, ratios = in_pairs("update", EAGER, entries, options, options.rounds)
    return {
        name: {**medians(results), "eager_by_this": round(1 / ratios[name], 2),
               "first_s": round_off(ready[name]["first_s"])}
        for name, results in runs.items()
    }  # fmt: skip
