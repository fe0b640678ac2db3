"""A rollout of 32 episodes with searches: the engine against loops over `transformers.generate`, and vLLM.

The lengths of all turns and the observations are fixed beforehand, so all write and read the same number of
tokens; searches take no time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.speed.harness import (
    Entry,
    Options,
    Rounds,
    interleaved,
    log,
    medians,
    ratio,
)

EPISODES, GROUP = {"real": 32, "tiny": 128}, {"real": 4, "tiny": 8}
TURNS = {"real": (2, 5), "tiny": (2, 5)}
TURN_TOKENS = {"real": (16, 65), "tiny": (8, 23)}
OBSERVATION_TOKENS = {"real": (120, 241), "tiny": (40, 81)}
LONGEST = {"real": 2048, "tiny": 512}
STOP = ("</no-such-tag>",)
"""A stop string that costs what ours cost and is never written, since the lengths are fixed."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One simulated episode: its prompt, the tokens of each turn, and the observations between them."""

    name: str
    prompt: list[int]
    turns: list[int]
    observations: list[list[int]]


def make_plans(
    shape: str, seed: int, prompts: Sequence[list[int]], texts: Sequence[int], count: int
) -> list[EpisodePlan]:
    """`count` episodes in groups that share a prompt; observations are cut from the token ids `texts`."""
    rng = np.random.default_rng(seed)
    plans = []
    for index in range(count):
        if index % GROUP[shape] == 0:
            prompt = prompts[int(rng.integers(len(prompts)))]
        turns = rng.integers(*TURN_TOKENS[shape], rng.integers(*TURNS[shape])).tolist()
        lengths = rng.integers(*OBSERVATION_TOKENS[shape], len(turns) - 1).tolist()
        starts = rng.integers(0, len(texts) - OBSERVATION_TOKENS[shape][1], len(lengths)).tolist()
        parts = [list(texts[start : start + size]) for start, size in zip(starts, lengths, strict=True)]
        plans.append(EpisodePlan(f"{seed}/{index}", prompt, turns, parts))
    return plans


def written(plans: Sequence[EpisodePlan]) -> int:
    return sum(sum(plan.turns) for plan in plans)


class Setting:
    """The policy of a shape and its plans, the same in every contender."""

    def __init__(self, options: Options, settings: dict[str, Any]) -> None:
        from bench.speed.material import settings_of

        from srl.data.corpus import read_corpus
        from srl.train.load_components import load_policy
        from srl.train.questions import load_questions

        self.shape = settings["shape"]
        self.count = 8 if options.smoke else EPISODES[self.shape]
        more = {"rollout.engine": settings["engine"]} if "engine" in settings else {}
        self.config = config = settings_of(
            self.shape, options,
            {"model.dtype": settings.get("dtype", "float32"), "rollout.max_num_seqs": self.count,
             "data.max_prompt_length": 256, "data.max_response_length": LONGEST[self.shape] - 256, **more,
             **settings.get("keys", {})},
        )  # fmt: skip
        self.policy = load_policy(config.model, lambda text: None)
        self.policy.codec.eos_ids = frozenset()  # lengths are fixed
        for name, value in {"eos_token_id": None, "stop_strings": None, "pad_token_id": 0}.items():
            setattr(self.policy.model.generation_config, name, value)
        config, codec = with_questions(config, options), self.policy.codec
        assert config.data.train_files is not None, "the files are given"
        assert config.data.corpus is not None, "the files are given"
        questions = load_questions(config.data.train_files, config, codec, lambda text: None)[:64]
        self.prompts = [codec.encode_prompt(question.prompt)[0] for question in questions]
        pages = [page.contents for page, _ in zip(read_corpus(config.data.corpus), range(200), strict=False)]
        self.texts = codec.encode_text("\n".join(pages))

    def plans(self, seed: int, count: int = 0) -> list[EpisodePlan]:
        return make_plans(self.shape, seed, self.prompts, self.texts, count or self.count)


def with_questions(config: Any, options: Options) -> Any:
    """The made-up world's questions and passages where the configuration has none, as `srl train` does."""
    from srl.train.make_missing import with_world
    from srl.workspace import Workspace

    return with_world(config, Workspace(Path(options.cache)), lambda text: None)


async def _episode(plan: EpisodePlan, engine: Any, temperature: float) -> list[int]:
    """The episode's ids; what the policy wrote is in them, in order."""
    from srl.rollout.engine import Sampling

    ids, wrote = list(plan.prompt), list[int]()
    for turn, length in enumerate(plan.turns):
        sampling = Sampling(length, temperature=temperature, key=(plan.name, turn), stop=STOP)
        completion = await engine.generate(plan.name, ids, sampling)
        assert len(completion.token_ids) == length, "all contenders write the same number of tokens"
        wrote += completion.token_ids
        ids += [*completion.token_ids, *(plan.observations[turn] if turn < len(plan.observations) else [])]
    engine.finish(plan.name)
    return wrote


def engine_rollout(engine: Any, plans: Sequence[EpisodePlan], temperature: float) -> list[list[int]]:
    async def main() -> list[list[int]]:
        return await asyncio.gather(*(_episode(plan, engine, temperature) for plan in plans))

    wrote = asyncio.run(main())
    engine.reset()
    return wrote


def generate_rollout(model: Any, plans: Sequence[EpisodePlan], temperature: float) -> list[list[int]]:
    """All episodes that have a turn left go through one call, padded on the left, for every turn."""
    contexts, wrote = [list(plan.prompt) for plan in plans], [list[int]() for _ in plans]
    for turn in range(max(len(plan.turns) for plan in plans)):
        live = [index for index, plan in enumerate(plans) if turn < len(plan.turns)]
        longest = max(plans[index].turns[turn] for index in live)
        turns = generated(model, [contexts[index] for index in live], longest, temperature)
        for index, new in zip(live, turns, strict=True):
            kept = new[: plans[index].turns[turn]]
            wrote[index] += kept
            seen = plans[index].observations[turn] if turn < len(plans[index].observations) else []
            contexts[index] += [*kept, *seen]
    return wrote


def generated(
    model: Any, contexts: Sequence[Sequence[int]], tokens: int, temperature: float
) -> list[list[int]]:
    """`tokens` new ids for each context, of one call of `transformers.generate`."""
    import torch

    width = max(map(len, contexts))
    ids = torch.zeros((len(contexts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(list(context))
        mask[row, width - len(context) :] = 1
    sampled = (
        {"do_sample": True, "top_k": 0, "temperature": temperature} if temperature else {"do_sample": False}
    )
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **sampled)
    return out[:, width:].tolist()


def timed(run: Any, plans: Sequence[EpisodePlan]) -> dict[str, float]:
    """Seconds and tokens a second."""
    began = time.perf_counter()
    run(plans, 1.0)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens_per_s": written(plans) / seconds}


def engine(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """The engine that training loads, or the one that the settings name."""
    from srl.train.load_components import load_engine

    setting = Setting(options, settings)
    answer(setting, partial(engine_rollout, load_engine(setting.config, setting.policy, log)), rounds)


def lockstep(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    setting = Setting(options, settings)
    setting.policy.model.eval()
    answer(setting, partial(generate_rollout, setting.policy.model), rounds, warm_up=4)


def answer(setting: Setting, run: Any, rounds: Rounds, warm_up: int = 0) -> None:
    """Warm up on `warm_up` episodes (0: all), then serve: each round has other plans, the same for all."""
    run(setting.plans(1000, warm_up), 1.0)
    rounds.report({})
    rounds.serve(lambda request: timed(run, setting.plans(request["round"])))


CONTENDERS = {"engine": engine, "lockstep": lockstep}
OURS, LOCKSTEP = "torch engine", "transformers.generate, lock-step"


def entries_of(shape: str, threads: int, options: Options) -> list[Entry]:
    """Ours, `generate` and vLLM, at each precision that the shape is measured at."""
    dtypes = ("float32", "bfloat16") if shape == "real" else ("float32",)
    entries = []
    for dtype in dtypes:
        settings = {"shape": shape, "dtype": dtype}
        entries.append(Entry(f"{OURS}, {dtype}", "engine", threads, settings))
        entries.append(Entry(f"{LOCKSTEP}, {dtype}", "lockstep", threads, settings))
    if shape == "real" and options.vllm_python:
        settings = {"shape": shape, "dtype": "bfloat16", "engine": "vllm"}
        entries.append(Entry("vLLM, bfloat16", "engine", threads, settings, options.vllm_python))
    return entries


def run(options: Options) -> dict[str, Any]:
    """Both shapes on two threads and on one: medians, and each one's time by the fastest of ours."""
    points: dict[str, Any] = {}
    for shape, more in (("real", 0), ("tiny", 2)):
        for threads in (2, 1):
            entries = entries_of(shape, threads, options)
            runs, _ = interleaved("rollout", entries, options, options.rounds + more)
            ours = [name for name in runs if name.startswith(OURS)]
            fastest = min(ours, key=lambda name: medians(runs[name])["seconds"])
            points[f"{shape}, {threads} threads"] = {
                name: {**medians(results), "times_ours": ratio(results, runs[fastest])}
                for name, results in runs.items()
            }
    return points
