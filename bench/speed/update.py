"""The policy's update alone, on the real shape: as `srl train` does it, against eager float32 with padding.

Eight episodes of two to four turns, one optimiser step. The first update of a process, which compiles where
the update is compiled, is reported apart. The share is the operations a second of an update's matrix products
by the speed of such products alone, measured in the same run.
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
    interleaved,
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


def operations(model: Any, trajectories: list[Any]) -> float:
    """Floating-point operations of the matrix products of a forward and backward pass, none recomputed.

    6 for each weight of the trunk and token, 6 for each of the head and trained token, and attention's.
    """
    config = model.config.get_text_config()
    head = config.vocab_size * config.hidden_size
    trunk = sum(item.numel() for item in model.parameters()) - head
    total = 0.0
    for item in trajectories:
        length = len(item.token_ids)
        attention = 6 * config.num_hidden_layers * config.hidden_size * length**2
        total += 6 * trunk * length + 6 * head * item.policy_tokens + attention
    return total


def measured(made: Any, update: Callable[[], object], rounds: Rounds) -> None:
    """Warm up, then serve; the operations let the parent compute the share."""
    done = trajectories_of(made, made.updates)
    began = time.perf_counter()
    update()
    rounds.report({"first_s": time.perf_counter() - began, "operations": operations(made.policy.model, done)})
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


def products(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """Operations a second of the products that the model consists of, (tokens, 576) by (576, 1536)."""
    import torch

    def speed(dtype: torch.dtype) -> float:
        left, right = torch.randn(2048, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
        left @ right
        count, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < 1.0:
            left @ right
            count += 1
        return 2 * left.numel() * right.shape[1] * count / seconds

    rounds.report({})
    rounds.serve(lambda request: {"float32": speed(torch.float32), "bfloat16": speed(torch.bfloat16)})


CONTENDERS = {"ours": ours, "eager": eager, "products": products}


EAGER = Entry("eager float32, padded", "eager", 2, {"dtype": "float32"})
PRODUCTS = Entry("matrix products", "products", 2)


def entries_of(options: Options) -> list[Entry]:
    """Ours at each precision, with the compiler too, and before."""
    compiled: dict[str, Any] = {"keys": {"actor.use_torch_compile": True}}
    found = []
    for dtype in ("float32", "bfloat16"):
        found.append(Entry(f"srl, {dtype}, not compiled", "ours", 2, {"dtype": dtype}))
        found += with_before(Entry(f"srl, {dtype}", "ours", 2, {"dtype": dtype, **compiled}), options)
    return found


def run(options: Options) -> dict[str, Any]:
    """Ours at both precisions in turns with eager float32 on two threads, and the machine's products."""
    entries = entries_of(options)
    runs, ready, ratios = in_pairs("update", EAGER, entries, options, options.rounds)
    speeds = medians(interleaved("update", [PRODUCTS], options, max(3, options.rounds))[0][PRODUCTS.name])
    rates = {name: round_off(speeds[name] / 1e9) for name in ("float32", "bfloat16")}
    found: dict[str, Any] = {"matrix products, GFLOP/s": rates}
    for entry in (entry for entry in [EAGER, *entries] if entry.name in runs):
        middle, first = medians(runs[entry.name]), ready[entry.name]["first_s"]
        rate = ready[entry.name]["operations"] / middle["seconds"]
        found[entry.name] = {
            **middle,
            "eager_by_this": round(1 / ratios[entry.name], 2),
            "first_s": round_off(first),
            "share_of_products": round_off(rate / speeds[entry.settings["dtype"]]),
        }
    return found
