"""A full GRPO step: `srl train` against trl's `GRPOTrainer`, with the same model, questions, search and loss.

trl gets the search as a `rollout_func`: its own tool loop wants a chat template with tool calls, and does
the same as the function here, one `generate` a turn over whole histories. Groups, temperature, limits,
prompts, observations, reward, learning rate and one optimiser step a rollout are the same; neither has a KL
term, which is trl's default. trl computes no old log-probs then, its fastest way.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from bench.speed.harness import Entry, Options, Rounds, in_pairs, medians, round_off

if TYPE_CHECKING:
    from srl.config import Config

MICRO = {"real": 4, "tiny": 32}
"""trl's `per_device_train_batch_size`."""


def configured(options: Options, settings: Mapping[str, Any]) -> Any:
    from bench.speed.material import settings_of

    shape = settings["shape"]
    model = {"model.path": options.material["taught"]} if shape == "real" else {}
    return settings_of(shape, options, {**model, **settings.get("keys", {})})


def ours(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """`srl train --algo grpo` as it is; after each step it reports and waits."""
    from srl.train.report import Terminal
    from srl.train.run import start
    from srl.workspace import Workspace

    class Reporting(Terminal):
        def step(self, step: int, config: Config, values: Mapping[str, float]) -> None:
            seconds = {
                name: values.get(f"timing_s/{key}", 0.0)
                for name, key in (("seconds", "step"), ("generation", "gen"), ("log_probs", "adv"),
                                  ("update", "update_actor"))
            }  # fmt: skip
            rounds.report(seconds | {"reward": values["critic/score/mean"],
                                     "searches": values["env/number_of_valid_search"],
                                     "tokens": values["response_length/mean"]})  # fmt: skip
            rounds.wait()

    config = configured(options, settings).with_settings(
        {"trainer.threads": int(os.environ["OMP_NUM_THREADS"])}
    )
    workspace = Workspace(Path(options.cache) / "bench-workspace")
    start(config, preset="bench", algo="grpo", workspace=workspace, terminal=Reporting(quiet=True))


class SearchRollout:
    """trl's `rollout_func`: episodes as ours, one `generate` over all whole histories for each turn."""

    def __init__(self, config: Any, environment: Any) -> None:
        self.config, self.place = config, environment
        self.codec, self.options = environment.codec, environment.options
        self.loop = asyncio.Runner()
        self.seconds = self.searches = 0.0
        self.tokens: list[int] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        began = time.perf_counter()
        starts = [self.codec.encode_prompt(prompt)[0] for prompt in prompts]
        self.contexts = [list(start) for start in starts]
        self.masks: list[list[int]] = [[] for _ in starts]
        self.answers: list[str] = [""] * len(starts)
        self.searches = 0.0
        live = list(range(len(starts)))
        for turn in range(self.options.max_turns + 1):
            written = self.generated(trainer, [self.contexts[index] for index in live])
            live = self.loop.run(self.after_turn(live, written, turn < self.options.max_turns))
            if not live:
                break
        self.seconds = time.perf_counter() - began
        completions = [ids[len(start) :] for ids, start in zip(self.contexts, starts, strict=True)]
        self.tokens = [sum(mask) for mask in self.masks]
        self.searches /= len(starts)
        return {"prompt_ids": starts, "completion_ids": completions, "logprobs": None,
                "env_mask": self.masks, "answer": self.answers}  # fmt: skip

    def generated(self, trainer: Any, contexts: Sequence[list[int]]) -> list[list[int]]:
        """The new ids of each context, through the token that completes a stop string or EOS."""
        import torch
        from trl.models.utils import unwrap_model_for_generation

        pad, width = trainer.processing_class.pad_token_id, max(map(len, contexts))
        rows = [[pad] * (width - len(context)) + context for context in contexts]
        mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
        with (
            unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model,
            torch.no_grad(),
        ):
            out = model.generate(
                torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=True, top_k=0,
                pad_token_id=pad, temperature=self.options.temperature,
                max_new_tokens=self.options.max_turn_tokens, **self.ends(),
            )  # fmt: skip
        return [self._cut(row, pad) for row in out[:, width:].tolist()]

    def ends(self) -> dict[str, Any]:
        """What ends a turn: tags of one token each as further EOS, the cheapest; else stop strings."""
        tags = [self.codec.encode_text(stop) for stop in self.options.stop]
        if all(len(ids) == 1 for ids in tags):
            return {"eos_token_id": [*self.codec.eos_ids, *(ids[0] for ids in tags)]}
        return {"stop_strings": list(self.options.stop), "tokenizer": self.codec.tokenizer}

    def _cut(self, row: list[int], pad: int) -> list[int]:
        """Without the padding after the end; where EOS is the padding, one of them is the end."""
        end = next((place for place, token in enumerate(row) if token == pad), len(row))
        text = self.codec.decode(row[:end])
        stopped = any(stop in text for stop in self.options.stop)
        return row[: end if stopped or pad not in self.codec.eos_ids else end + 1]

    async def after_turn(self, live: list[int], written: list[list[int]], may_search: bool) -> list[int]:
        """Run the turn's searches together, append the observations; the episodes that go on."""
        from srl.protocol import parse_action

        queries: dict[int, str] = {}
        going = []
        for index, ids in zip(live, written, strict=True):
            self._add(index, ids, 1)
            action = parse_action(self.codec.decode(ids))
            if action is not None and action.kind == "answer":
                self.answers[index] = action.content
            elif may_search and action is not None:
                queries[index] = action.content
            elif may_search and self._add(index, self.codec.encode_text(self.place.template.feedback), 0):
                going.append(index)
        results = await asyncio.gather(*(self.place.search.search(query) for query in queries.values()))
        return sorted(
            going
            + [index for index, result in zip(queries, results, strict=True) if self._read(index, result)]
        )

    def _read(self, index: int, result: Any) -> bool:
        from srl.rollout.observation import fit_information

        self.searches += 1
        room = self.options.max_response_length - len(self.masks[index]) - self.options.min_answer_tokens
        fitted = fit_information(result.hits, min(self.options.max_obs_length, room), self.codec)
        return fitted is not None and self._add(index, fitted.token_ids, 0)

    def _add(self, index: int, ids: list[int], mask: int) -> bool:
        """Append what the policy wrote (mask 1) or read; False if a turn does not fit after it."""
        self.contexts[index] += ids
        self.masks[index] += [mask] * len(ids)
        room = self.options.max_response_length - len(self.masks[index])
        return room >= self.options.max_turn_tokens


def trl_step(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """trl's trainer in its own loop; a callback reports after each optimiser step and waits."""
    from transformers import TrainerCallback

    class Reporting(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *args: Any, **others: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *args: Any, **others: Any) -> None:
            seconds = time.perf_counter() - self.began
            rounds.report(
                {"seconds": seconds, "generation": roll.seconds, "update": seconds - roll.seconds,
                 "reward": fmean(rewards), "searches": roll.searches, "tokens": fmean(roll.tokens)}
            )  # fmt: skip
            rewards.clear()
            rounds.wait()
            self.began = time.perf_counter()

    config = configured(options, settings)
    roll, rewards, dataset = trl_parts(config, options)

    def reward(answer: list[str], golden: list[list[str]], **others: Any) -> list[float]:
        from srl.answers import exact_match

        rewards.extend(exact_match(text, golds) for text, golds in zip(answer, golden, strict=True))
        return rewards[-len(answer) :]

    trl_trainer(config, options, settings, roll, reward, dataset, Reporting()).train()


def trl_parts(config: Any, options: Options) -> tuple[SearchRollout, list[float], Any]:
    """The rollout function, a list for rewards, and the data set in the order in which `srl train` asks."""
    from datasets import Dataset

    from srl.train.load_components import load_environment, load_policy
    from srl.train.make_missing import with_world
    from srl.train.questions import load_questions, order_of
    from srl.train.search import load_search
    from srl.workspace import Workspace

    workspace = Workspace(Path(options.cache) / "bench-workspace")
    config = with_world(config, workspace, lambda text: None)
    codec = load_policy(config.model, lambda text: None).codec
    search = load_search(config, workspace, lambda text: None)
    place = load_environment(config, codec, search, lambda text: None)
    questions = load_questions(config.data.train_files, config, codec, lambda text: None)
    order = order_of(questions, config.data, config.trainer.seed)
    ordered = [question for step in range(1, 17) for question in order.batch(step)]
    rows = [
        {"prompt": [dict(turn) for turn in question.prompt], "golden": list(question.golden_answers)}
        for question in ordered
    ]
    return SearchRollout(config, place), [], Dataset.from_list(rows)


def trl_trainer(
    config: Any,
    options: Options,
    settings: Mapping[str, Any],
    roll: Any,
    reward: Any,
    dataset: Any,
    callback: Any,
) -> Any:
    """`GRPOTrainer` with our loss' settings and its own best ones for this machine."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    episodes = config.data.train_batch_size * config.rollout.n
    micro = min(MICRO[settings["shape"]], episodes)
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    model.generation_config.stop_strings = None
    optim = config.actor.optim
    arguments = GRPOConfig(
        output_dir=f"{options.cache}/trl", per_device_train_batch_size=micro, max_steps=1000,
        gradient_accumulation_steps=episodes // micro, num_generations=config.rollout.n,
        max_completion_length=config.data.max_response_length, temperature=config.rollout.temperature,
        learning_rate=optim.lr, weight_decay=optim.weight_decay, adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1], lr_scheduler_type="constant", bf16=settings.get("autocast", False),
        gradient_checkpointing=False, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        beta=0.0, dataloader_pin_memory=False, loss_type="dapo",
    )  # fmt: skip
    return GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=dataset, rollout_func=roll,
        processing_class=AutoTokenizer.from_pretrained(config.model.path), callbacks=[callback],
    )  # fmt: skip


CONTENDERS = {"ours": ours, "trl": trl_step}


TRL: dict[str, dict[str, Any]] = {
    "trl, float32": {},
    "trl, bfloat16 autocast": {"autocast": True},
}
"""trl's precisions. With weights in bfloat16 most of AdamW's steps of 1e-6 would be lost in rounding."""


def entries_of(shape: str, options: Options) -> list[Entry]:
    """Ours at the precision that is its fastest, and the others."""
    dtypes = ["bfloat16", "float32"] if shape == "real" else ["float32"]
    first, *more = [
        Entry(f"srl, {dtype}", "ours", 2, {"shape": shape, "keys": {"model.dtype": dtype}})
        for dtype in dtypes
    ]
    named = list(TRL.items())[: 2 if shape == "real" else 1]
    trl = [Entry(name, "trl", 2, {"shape": shape, **settings}) for name, settings in named]
    return [first, *trl, *more]


def run(options: Options) -> dict[str, Any]:
    """Both shapes on two threads, two contenders at a time; the first step of each process is its warm-up."""
    points: dict[str, Any] = {}
    for shape, more in (("real", 0), ("tiny", 2)):
        first, *others = entries_of(shape, options)
        runs, ready, ratios = in_pairs("step", first, others, options, options.rounds + more)
        points[shape] = {
            name: {**medians(results), "times_ours": ratios[name],
                   "first_step_s": round_off(ready[name]["seconds"]),
                   "rewards": rewards(ready[name], results)}
            for name, results in runs.items()
        }  # fmt: skip
    return points


def rewards(first: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean and standard error of the steps' mean rewards."""
    values = [float(step["reward"]) for step in (first, *results)]
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": round_off(fmean(values)), "standard_error": round_off(error), "median": median(values)}
