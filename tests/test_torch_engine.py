"""The torch engine: where turns end, who waits for what, and what happens when something fails."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tiny_models import EOS, Bigram, byte_level_tokenizer, tiny_model

from srl.errors import SrlError, UserError
from srl.protocol import STOP_STRINGS
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Sampling
from srl.rollout.torch_engine import TorchEngine

CODEC = Codec(byte_level_tokenizer())


def new_engine(model, **options) -> TorchEngine:
    return TorchEngine(model, CODEC, **{"max_num_seqs": 4, "max_model_len": 200, **options})


def say(text: str, *, stop: Sequence[str] = STOP_STRINGS, max_tokens: int = 50) -> Completion:
    """One greedy turn of a model that says `text` after its first token."""
    ids = CODEC.tokenizer.encode(text, add_special_tokens=False)
    engine = new_engine(Bigram.saying(ids))
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, stop=tuple(stop))
    return asyncio.run(engine.generate("one", ids[:1], sampling))


def run(engine, *episodes):
    """Run coroutines together; their results, in order."""

    async def main():
        return await asyncio.gather(*(episode for episode in episodes))

    return asyncio.run(main())


async def episode(
    engine: TorchEngine,
    name: str,
    turns: int = 3,
    *,
    length: int = 6,
    temperature: float = 1.0,
    search: Callable[[int], object] | None = None,
) -> list[Completion]:
    """Turns of `length` tokens with something to read between them; `search` is awaited there."""
    rng = np.random.default_rng(sum(name.encode()))
    ids, completions = rng.integers(2, 389, 5).tolist(), []
    try:
        for turn in range(turns):
            sampling = Sampling(max_tokens=length, temperature=temperature, key=(name, turn))
            completions.append(await engine.generate(name, list(ids), sampling))
            ids += [*completions[-1].token_ids, *rng.integers(2, 389, 4).tolist()]
            if search is not None and turn < turns - 1:
                await search(turn)
    finally:
        engine.finish(name)
    return completions


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("text", "options", "reason", "turn"),
    [
        (" x<search>who</search>\n\nbuilt it", {}, "stop", "<search>who</search>\n\n"),
        ("q > x>.\nb</answer>k", {}, "stop", " > x>.\nb</answer>"),
        ("q</answer>k", {"stop": ["</search>"], "max_tokens": 4}, "length", "</answer>k"),
        ("q who是Ossa", {"stop": ["是"]}, "stop", " who是"),
        (f"q who{EOS}x", {}, "eos", f" who{EOS}"),
        ("q who built", {"max_tokens": 1}, "length", " who"),
    ],
    ids=["overhang", "bracket", "other stop string", "not ASCII", "EOS", "cap"],
)
def test_turn_ends_at_a_stop_string_of_its_own_at_eos_or_at_its_cap(text, options, reason, turn):
    completion = say(text, **options)
    assert (completion.stop_reason, CODEC.tokenizer.decode(completion.token_ids)) == (reason, turn)


def test_slow_search_holds_up_its_own_episode_only():
    engine = new_engine(tiny_model())

    async def main():
        others_are_done = asyncio.Event()
        slow = asyncio.create_task(episode(engine, "slow", search=lambda turn: others_are_done.wait()))
        await asyncio.gather(*(episode(engine, f"e{index}", search=ticks) for index in range(3)))
        others_are_done.set()
        return await slow

    assert len(asyncio.run(main())) == 3


def deterministic_rollout(
    order: Sequence[int], seed: int
) -> tuple[dict[str, list[Completion]], list[list[int]]]:
    """Episodes started in `order`, with searches that take random times; what came, and what was fed."""
    engine = new_engine(tiny_model(), max_num_seqs=5, deterministic=True)
    delay, fed = np.random.default_rng(seed), []
    advance = engine._advance
    engine._advance = lambda rows: fed.append(rows.tolist()) or advance(rows)
    names = [f"e{index}" for index in order]

    def search(turn):
        return ticks(int(delay.integers(0, 60)))

    results = run(
        engine,
        *(episode(engine, name, turns=1 + int(name[1:]) % 4, length=3 + int(name[1:]) % 5, search=search)
          for name in names),
    )  # fmt: skip
    return dict(zip(names, results, strict=True)), fed


def test_deterministic_rollouts_are_the_same_to_the_bit_however_long_searches_take():
    first, batches = deterministic_rollout(range(12), seed=0)
    for seed, order in (
        (1, range(12)),
        (2, reversed(range(12))),
        (3, [5, 0, 11, 3, 8, 1, 9, 2, 10, 4, 7, 6]),
    ):
        again, same_batches = deterministic_rollout(list(order), seed)
        assert same_batches == batches
        assert again == first


def test_logits_that_are_not_finite_are_an_error_and_not_the_caches_fault(caplog):
    model = tiny_model()
    engine = new_engine(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(SrlError, match="not finite"):
        run(engine, episode(engine, "a"))
    with pytest.raises(UserError):
        new_engine(model)
    assert "key-value cache" not in caplog.text


def test_turn_cancelled_at_its_last_token_may_be_asked_again():
    engine = new_engine(tiny_model(dtype=torch.float64))

    async def main():
        def gone(token_ids):
            if len(token_ids) == 3:
                task.cancel()

        turn = Sampling(max_tokens=3, temperature=0.0)
        task = asyncio.create_task(engine.generate("x", [9, 9, 9], replace(turn, on_tokens=gone)))
        await asyncio.wait([task])
        return task.cancelled(), await engine.generate("x", [9, 9, 9], turn)

    cancelled, again = asyncio.run(main())
    fresh = new_engine(engine.model)
    assert cancelled
    assert again == run(fresh, fresh.generate("x", [9, 9, 9], Sampling(max_tokens=3, temperature=0.0)))[0]


def test_ids_that_are_not_the_episodes_own_are_refused():
    engine = new_engine(tiny_model())

    async def main(change):
        first = await engine.generate("a", [5, 6], Sampling(max_tokens=3))
        ids = [5, 6, *first.token_ids, 7]
        ids[change] += 1
        try:
            await engine.generate("a", ids, Sampling(max_tokens=3))
        finally:
            engine.finish("a")

    for change in (0, 4):
        with pytest.raises(ValueError, match="do not begin with"):
            asyncio.run(main(change))
    asyncio.run(main(5))
