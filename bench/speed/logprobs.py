"""How far the sampler's log-probs are from the trainer's, for the same tokens and weights."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.speed.harness import Child, Entry, Options, Rounds, round_off

EPISODES = 8


def sampled(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """Episodes of the engine: prompt, ids and log-probs of one turn each."""
    from bench.speed.rollout import Setting, loaded_engine

    from srl.rollout.engine import Sampling

    made = Setting(options, settings)
    engine = loaded_engine(made.config, made.policy)

    async def one(plan: Any) -> dict[str, Any]:
        out = await engine.generate(plan.name, plan.prompt, Sampling(sum(plan.turns), key=(plan.name,)))
        engine.finish(plan.name)
        return {"prompt": plan.prompt, "ids": list(out.token_ids), "logprobs": list(out.logprobs)}

    async def every() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(one, made.plans(0, EPISODES)))

    rounds.report({})
    rounds.serve(lambda request: {"episodes": asyncio.run(every())})


def trainer(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """The trainer's log-probs of given episodes, and their distance from the sampler's."""
    from bench.speed.rollout import Setting

    from srl.train.load_components import load_learner
    from srl.trajectory import Question, Segment, Trajectory
    from srl.update.batch import collate

    made = Setting(options, settings)
    learner = load_learner(made.config, made.policy)

    def distance(request: dict[str, Any]) -> dict[str, float]:
        rows = [
            Trajectory(
                Question(str(index), "", ("x",)),
                [Segment("prompt", tuple(one["prompt"]), "", 0),
                 Segment("policy", tuple(one["ids"]), "", 0, tuple(one["logprobs"]))],
            )
            for index, one in enumerate(request["episodes"])
        ]  # fmt: skip
        batch = collate(rows)
        found = learner.stats(learner.actor, batch, batch.response_mask).logprobs
        apart = (found - batch.sampler_logprobs).abs()[batch.response_mask != 0]
        return {"mean": float(apart.mean()), "largest": float(apart.max()), "tokens": len(apart)}

    rounds.report({})
    rounds.serve(distance)


CONTENDERS = {"sampled": sampled, "trainer": trainer}


def run(options: Options) -> dict[str, Any]:
    """Each sampler with the trainer at its precision; vLLM in bfloat16 also beside a float32 trainer."""
    pairs = [("torch engine", "float32", "float32"), ("torch engine", "bfloat16", "bfloat16")]
    if options.vllm_python and not options.smoke:
        pairs += [
            ("vLLM", "float32", "float32"),
            ("vLLM", "bfloat16", "bfloat16"),
            ("vLLM", "bfloat16", "float32"),
        ]
    found = {}
    for name, sampler, trained in pairs:
        settings = {"shape": "real", "dtype": sampler}
        samples = Entry(name, "sampled", 2, settings)
        if name == "vLLM":
            samples = Entry(name, "sampled", 2, {**settings, "engine": "vllm"}, options.vllm_python)
        episodes = once(samples, options, {})
        entry = Entry("trainer", "trainer", 2, {"shape": "real", "dtype": trained})
        apart = once(entry, options, {"episodes": episodes["episodes"]})
        found[f"{name}, {sampler}; trainer, {trained}"] = {
            key: round_off(apart[key]) for key in ("mean", "largest", "tokens")
        }
    return found


def once(entry: Entry, options: Options, request: dict[str, Any]) -> dict[str, Any]:
    child = Child("logprobs", entry, options)
    try:
        return child.run(request)
    finally:
        child.close()
