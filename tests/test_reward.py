"""The weighted sum of rewards: plain and async plugins, turns, failures, and plugins that misbehave."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.tiny_models import byte_level_tokenizer

from srl.config import load_config
from srl.errors import UserError
from srl.protocol import template
from srl.reward import RewardMix
from srl.rollout.codec import Codec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.train.loop import Loop
from srl.train.questions import Splits
from srl.trajectory import FailedEpisodes, Question, Score, Segment, Trajectory, failed_episodes


def trajectory(answer: str | None = "x", turns: int = 1, end: str = "answered") -> Trajectory:
    segments = [Segment("prompt", (0,), "Q", 0)]
    segments += [Segment("policy", (turn,), "…", turn, (-1.0,)) for turn in range(turns)]
    return Trajectory(Question("q1", "Q?", ("x",)), segments, end=end, answer=answer)  # type: ignore[arg-type]


class Plain:
    """A reward that gives every trajectory what `make` says, and remembers what it was shown."""

    def __init__(self, make: Callable[[Trajectory], Score]) -> None:
        self.make = make
        self.seen: list[Trajectory] = []

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        self.seen += trajectories
        return [self.make(trajectory) for trajectory in trajectories]


class Later(Plain):
    async def score(self, trajectories: list[Trajectory]) -> list[Score]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().score(trajectories)


class Raw:
    """A reward that returns whatever it was given."""

    def __init__(self, result: object) -> None:
        self.result = result

    def score(self, trajectories: list[Trajectory]) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def constant(value: float, **fields: object) -> Plain:
    return Plain(lambda _: Score(value, **fields))  # type: ignore[arg-type]


def score(trajectories: list[Trajectory], weights: dict[str, float], **plugins: object) -> list[Score]:
    return asyncio.run(RewardMix(weights, plugins=plugins).score(trajectories))  # type: ignore[arg-type]


def test_plain_and_async_plugins_mix_and_keep_the_order() -> None:
    batch = [trajectory("x"), trajectory("y"), trajectory("z")]
    named = {"x": 1.0, "y": 2.0, "z": 3.0}

    def rate(trajectory: Trajectory) -> Score:
        return Score(named[str(trajectory.answer)])

    results = score(batch, {"now": 1, "later": 10}, now=Plain(rate), later=Later(rate))
    assert [result.value for result in results] == [11, 22, 33]


class Gated(Plain):
    """A plain reward that works until `gate` opens."""

    def __init__(self) -> None:
        super().__init__(lambda trajectory: Score(float(trajectory.answer or 0)))
        self.started, self.gate = threading.Event(), threading.Event()
        self.batches: list[list[str | None]] = []
        self.threads: set[int] = set()
        self.working = self.most = 0

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        self.working += 1
        self.most = max(self.most, self.working)
        self.batches.append([item.answer for item in trajectories])
        self.threads.add(threading.get_ident())
        self.started.set()
        assert self.gate.wait(60), "the event loop stood still while a reward worked"
        self.working -= 1
        return super().score(trajectories)


def test_slow_plain_reward_stalls_no_other_episode() -> None:
    """The reward of one episode ends only when another coroutine has gone on."""
    slow = Gated()
    mix = RewardMix({"slow": 1}, plugins={"slow": slow})

    async def episodes() -> list[Score]:
        first = asyncio.create_task(mix.score([trajectory("1")]))
        while not slow.started.is_set():
            await asyncio.sleep(0)
        slow.gate.set()
        return await first

    assert [found.value for found in asyncio.run(episodes())] == [1]
    assert threading.get_ident() not in slow.threads


def test_episodes_that_end_while_a_reward_works_are_scored_together() -> None:
    slow = Gated()
    mix = RewardMix({"slow": 1}, plugins={"slow": slow})

    async def episodes() -> list[list[Score]]:
        first = asyncio.create_task(mix.score([trajectory("1")]))
        while not slow.started.is_set():
            await asyncio.sleep(0)
        others = [asyncio.create_task(mix.score([trajectory(answer)])) for answer in "234"]
        for _ in range(5):
            await asyncio.sleep(0)
        others[1].cancel()
        slow.gate.set()
        return [await first, await others[0], await others[2]]

    assert [found.value for (found,) in asyncio.run(episodes())] == [1, 2, 4]
    assert slow.batches == [["1"], ["2", "4"]]
    assert slow.most == 1


def test_a_rewards_own_parts_stand_under_its_name() -> None:
    [result] = score([trajectory()], {"one": 3}, one=constant(1, parts={"good": True}))
    assert result == Score(3, {"one": 1, "one/good": 1})


def down() -> Plain:
    """A reward that cannot score the answer x."""
    return Plain(lambda item: Score(0.0, error="down" if item.answer == "x" else ""))


def test_an_episode_of_training_without_a_score_fails_and_others_do_not() -> None:
    batch = [trajectory("x"), trajectory("y"), trajectory("x")]
    batch[2].phase = "val"
    scores = score(batch, {"good": 1, "judge": 1}, good=constant(1), judge=down())
    error = "reward 'judge' gave no score: down"
    assert [item.value for item in scores] == [0, 1, 0]
    assert [item.error for item in scores] == [error, "", error]
    assert [(item.valid, item.fault) for item in batch] == [(False, error), (True, ""), (True, "")]
    assert failed_episodes(batch) == FailedEpisodes(1, 3, error, "the reward")


def test_a_reward_of_weight_zero_that_gives_no_score_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    batch = [trajectory(), trajectory()]
    assert score(batch, {"one": 1, "seen": 0}, one=constant(1), seen=down()) == [Score(1, {"one": 1})] * 2
    assert all(item.valid for item in batch)
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "reward 'seen' gave no score: down; its weight is 0, so nothing depends on it"


def test_an_episode_is_scored_while_others_are_generated() -> None:
    """The second episode's turn is generated when the first has been scored, and not before."""
    reward = Plain(lambda item: Score(float(item.answer or 0)))
    codec = Codec(byte_level_tokenizer())

    class Waiting(ScriptedEngine):
        async def generate(self, request_id: str, *given: Any) -> Any:
            while request_id.endswith("q2/0") and not reward.seen:
                await asyncio.sleep(0)
            return await super().generate(request_id, *given)

    engine = Waiting(codec, lambda request_id, turn: f"<answer>{'q2/0' in request_id:d}</answer>")
    mix = RewardMix({"slow": 1}, plugins={"slow": reward})
    options = EpisodeOptions(max_turns=1)
    environment = Environment(codec, template("search-r1"), options, None)
    nothing: Any = None
    runner = Loop(
        config=load_config().config, terminal=nothing, splits=Splits([]), environment=environment, reward=mix,
        engine=engine, actor=nothing,
    )  # fmt: skip
    asked = [Question(name, "Q?", ("1",)) for name in ("q1", "q2")]
    trajectories = runner.roll_out(asked, "train", 1)
    assert [found.value for found in runner.score(trajectories)] == [0, 1]
    assert len(reward.seen) == 2, "each is scored once"
    runner.close()


def test_failed_search_is_not_a_wrong_answer() -> None:
    plugin = constant(1)
    batch = [trajectory(), trajectory(end="failed"), trajectory()]
    results = score(batch, {"one": 1}, one=plugin)
    assert [result.value for result in results] == [1, 0, 1]
    assert results[1].parts == {"one": 0}
    assert plugin.seen == [batch[0], batch[2]]


def test_rewards_by_turn_add_up_and_a_plain_reward_falls_on_the_last_turn() -> None:
    turns = constant(0.75, per_turn=(0.5, 0.25, 0.0))
    [result] = score([trajectory(turns=3)], {"turns": 2, "last": 3}, turns=turns, last=constant(1))
    assert result.value == 2 * 0.75 + 3
    assert result.per_turn == (1.0, 0.5, 3.0)


@pytest.mark.parametrize(
    ("plugin", "complaint"),
    [
        (Raw([]), "returned 0 scores for 1 trajectories"),
        (Raw(None), "expected a list of srl.trajectory.Score"),
        (constant(float("nan")), "q1.*finite"),
        (constant(1, parts={"p": float("nan")}), "q1.*finite"),
        (constant(1, per_turn=(1.0, 0.0)), "2 numbers in per_turn for 1 policy turns"),
        (constant(1, per_turn=(0.5,)), "per_turn sums to 0.5"),
    ],
)
def test_a_plugin_that_returns_nonsense_is_named(plugin: object, complaint: str) -> None:
    with pytest.raises(UserError, match=f"'bad'.*{complaint}"):
        score([trajectory()], {"good": 1, "bad": 1}, good=constant(1), bad=plugin)
