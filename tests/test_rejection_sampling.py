"""Fine-tuning on the policy's own episodes: what is taken from a log, and rounds of sampling."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import kills as bench
from tests.store_builder import log_records, log_rows
from tests.training import Said, config, only_run, setting, train

from srl import process
from srl.errors import UserError
from srl.reward import RewardMix
from srl.store import LogWriter, Record, RunInfo
from srl.train.logged_episodes import select_episodes
from srl.train.loop import Loop
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.trajectory import Question, Segment, Trajectory
from srl.update.batch import collate
from srl.workspace import Workspace

__all__ = ["setting"]

ANY = "true"


@pytest.fixture(scope="module")
def sampled(setting: Path) -> tuple[Path, list[Trajectory]]:
    """A run of REINFORCE, and the training episodes as they were sampled."""
    live: list[Trajectory] = []
    with pytest.MonkeyPatch.context() as patch:
        score = Loop.score

        def kept(runner: Loop, trajectories: list[Trajectory]):
            live.extend(item for item in trajectories if item.phase == "train")
            return score(runner, trajectories)

        patch.setattr(Loop, "score", kept)
        chosen = config(setting, "reinforce", rollout__n=4, data__train_batch_size=8)
        train(chosen, setting / "sampled", "reinforce")
    return only_run(setting / "sampled"), live


def test_a_batch_from_the_log_is_the_batch_that_was_sampled(sampled: tuple[Path, list[Trajectory]]) -> None:
    """Ids, masks, padding and the sampler's log-probs, which the log keeps in single precision."""
    run, live = sampled
    found = select_episodes(run, ANY, 0, per_question=99)
    assert found.sampled == found.passed == len(live) == 64
    by_id = {item.id: item for item in live}
    kept = [by_id[item.id] for item in found.episodes]
    assert kept == sorted(kept, key=lambda item: (item.step, item.question.id, item.sample))
    ours, theirs = collate(found.episodes), collate(kept)
    for name in ("input_ids", "attention_mask", "response_mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, rtol=1e-6, atol=0)
    assert [item.question for item in found.episodes] == [item.question for item in kept]


def test_a_filter_keeps_what_satisfies_it(sampled: tuple[Path, list[Trajectory]]) -> None:
    run, live = sampled
    right = [item for item in live if item.answer in item.question.golden_answers and item.searches]
    found = select_episodes(run, "em = 1 and searches >= 1", 0, per_question=99)
    assert found.passed == len(right) > 0
    assert {item.id for item in found.episodes} <= {item.id for item in right}
    assert select_episodes(run, ANY, 0, step=2, per_question=99).sampled == 32
    everything = select_episodes(run, "phase = 'val' OR true -- all of them", 0, per_question=99)
    assert {item.phase for item in everything.episodes} == {"train"}


@pytest.mark.parametrize(
    "condition", ["emm = 1", "true); DROP TABLE trajectories; SELECT (true", "id IN (FROM read_text('/x'))"]
)
def test_a_bad_filter_is_one_line(sampled: tuple[Path, list[Trajectory]], condition: str) -> None:
    with pytest.raises(UserError):
        select_episodes(sampled[0], condition, 0, per_question=99)


def episode(question: str, sample: int, ids: tuple[int, ...], end: str = "answered") -> Trajectory:
    segments = [Segment("prompt", (1, 2), "p", 0), Segment("policy", ids, "a", 1, (-0.5,) * len(ids))]
    asked = Question(question, question, ("a",), "towns", metadata={"hops": 2})
    return Trajectory(asked, segments, end=end, answer="a", sample=sample, step=1)  # type: ignore[arg-type]


def test_duplicates_are_dropped_and_questions_are_capped(tmp_path: Path) -> None:
    """By hand: question a has 3 distinct of 4, b the same tokens as a, and c one that was cut short."""
    episodes = [
        episode("a", 0, (5,)), episode("a", 1, (5,)), episode("a", 2, (6,)), episode("a", 3, (7,)),
        episode("b", 0, (5,)), episode("c", 0, (8,), end="failed"),
    ]  # fmt: skip
    with LogWriter(tmp_path / "log", RunInfo("run")) as log:
        log.write(1, "train", list(map(Record, episodes)), {})
    found = select_episodes(tmp_path, ANY, 0, per_question=2)
    assert (found.sampled, found.passed, found.distinct) == (5, 5, 4)
    names = [item.question.id for item in found.episodes]
    assert names == ["a", "a", "b"]
    assert (found.questions, found.policy_tokens) == (2, 3)
    assert list(found.lines())[1:] == ["by data source: towns 3"]
    assert select_episodes(tmp_path, ANY, 0, per_question=2) == found
    choices = {tuple(item.sample for item in select_episodes(tmp_path, ANY, seed, per_question=1).episodes)
               for seed in range(20)}  # fmt: skip
    assert choices == {(0, 0), (2, 0), (3, 0)}, "which one is kept is chosen at random"


def test_a_log_or_a_round_with_nothing_to_train_on_is_one_line(
    setting: Path, workspace: Path, tmp_path: Path, sampled: tuple[Path, list[Trajectory]]
) -> None:
    with LogWriter(tmp_path / "log", RunInfo("run")) as log:
        log.write(0, "eval", [Record(replace(episode("a", 0, (5,)), phase="eval", step=0))], {})
    for path, condition in ((tmp_path, ANY), (sampled[0], "em = 2"), (setting, ANY)):
        with pytest.raises(UserError):
            select_episodes(path, condition, 0)
    with pytest.raises(UserError) as error:
        train(config(setting, "ppo", **(ROUNDS | {"sft__filter": "em = 2"})), workspace, "rft")
    assert error.value.key == "sft.filter"


ROUNDS = {
    "rollout__n": 8, "rollout__deterministic": True, "data__train_batch_size": 4,
    "trainer__total_training_steps": 2, "sft__steps": 12, "sft__batch_size": 8, "sft__optim__lr": 3e-3,
    "sft__filter": "em = 1 and searches >= 1",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(setting: Path) -> tuple[Path, str]:
    """Two rounds that were never stopped, and what was said."""
    said = Said()
    train(config(setting, "ppo", **ROUNDS), setting / "rounds", "rft", said)
    return only_run(setting / "rounds"), said.text


def test_a_round_is_a_step_of_the_log(whole: tuple[Path, str]) -> None:
    run, said = whole
    counts = log_rows(run, "SELECT phase, step, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL")
    metrics = log_rows(run, "SELECT DISTINCT name FROM metrics WHERE phase = 'train'")
    assert counts == [("test", 0, 4), ("test", 2, 4), ("train", 1, 64), ("train", 2, 64),
                      ("val", 0, 6), ("val", 1, 6), ("val", 2, 6)]  # fmt: skip
    assert {"sft/episodes", "sft/policy_loss", "train/em", "perf/total_num_tokens"} <= {n for (n,) in metrics}
    assert list(checkpoints(run)) == [1, 2]
    assert "round 1: " in said
    assert "by data source: towns" in said


def test_a_round_that_was_cut_off_is_made_again(
    setting: Path, workspace: Path, whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode is scored by a call: 10 before round 1, 64 in it, 6 after it, 32 in round 2."""
    real, left = RewardMix.score, [10 + 64 + 6 + 32 + 5]

    def breaking(*arguments, **named):
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    with process.signals_handled(), monkeypatch.context() as patch:
        patch.setattr(RewardMix, "score", breaking)
        with pytest.raises(KeyboardInterrupt):
            train(config(setting, "ppo", **ROUNDS), workspace, "rft")
    run = only_run(workspace)
    assert resume(run, workspace=Workspace(workspace), terminal=Said()).steps == 2
    assert bench._metrics(run) == bench._metrics(whole[0])
    assert bench._files(run) == bench._files(whole[0])
    assert sampled_ids(run) == sampled_ids(whole[0])


def sampled_ids(run: Path) -> dict[str, list[int]]:
    return {item.trajectory.id: item.trajectory.token_ids for item in log_records(run)}
