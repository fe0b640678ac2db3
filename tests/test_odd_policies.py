"""Whatever a policy writes, its episode ends in order, the others are not touched, and the log has it."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from tests.scripts import QUESTION, TableSearch, rollout
from tests.store_builder import log_rows
from tests.tiny_models import EOS, byte_level_tokenizer, tiny_model
from tests.training import Said, config, train, write_setting

import srl.store
from srl.advantage import Algorithm
from srl.browse.transcript import transcript
from srl.config import load_config
from srl.errors import SrlError
from srl.plugins import manager
from srl.protocol import TEMPLATES
from srl.reward import RewardMix
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Sampling, ScriptedEngine
from srl.rollout.episode import EpisodeOptions
from srl.rollout.torch_engine import TorchEngine
from srl.store import LogWriter, Record, RunInfo, read_records
from srl.train.rl import Learner, make_experience
from srl.train.run import resume
from srl.trajectory import Question, Score, Trajectory
from srl.update.actor import ActorLoss, accumulate_actor
from srl.update.kl import FixedKL
from srl.workspace import Workspace

ID = "\ue000"
"""Where a script samples the end-of-text token itself; `EOS` in it is text."""
OPTIONS = EpisodeOptions(
    max_turns=3, max_turn_tokens=60, max_obs_length=80, max_response_length=600, min_answer_tokens=8
)
NORMAL = ("<think>I search.</think><search>lighthouse</search>", "<answer>Ossa Trell</answer>")


class SamplingEngine(ScriptedEngine):
    """Samples its script as a model would: a turn ends with a stop string, EOS or the token cap."""

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        said = (await super().generate(request_id, token_ids, Sampling(10**6))).token_ids
        mark, eos = tuple(self.codec.encode_text(ID)), self.codec.tokenizer.eos_token_id
        ids: list[int] = []
        while len(ids) < sampling.max_tokens:
            is_eos = not said or said[: len(mark)] == mark
            ids.append(eos if is_eos else said[0])
            said = said[len(mark) :] if is_eos else said[1:]
            if is_eos:
                return Completion(tuple(ids), (-0.5,) * len(ids), "eos")
            if any(stop in self.codec.decode(ids) for stop in sampling.stop):
                return Completion(tuple(ids), (-0.5,) * len(ids), "stop")
        return Completion(tuple(ids), (-0.5,) * len(ids), "length")


def episodes(*scripts: Sequence[str]) -> list[Trajectory]:
    """An episode for each script, all at once; after its last turn a policy says nothing more."""
    questions = [Question(str(n), QUESTION.text, QUESTION.golden_answers) for n in range(len(scripts))]
    codec = Codec(byte_level_tokenizer())

    def script(request: str, turn: int) -> str:
        turns = scripts[int(request.split("/")[2])]
        return turns[turn] if turn < len(turns) else ""

    return asyncio.run(
        rollout(
            questions, SamplingEngine(codec, script), TableSearch(), codec=codec,
            template=TEMPLATES["search-r1"], options=OPTIONS,
        )
    )  # fmt: skip


POLICIES = {
    "only tags": ["<search></search>", "<think></think><information></information>", "<answer></answer>"],
    "only opening tags": ["<search><answer><think>" * 99] * 9,
    "only closing tags": ["</search>", "</answer></search>", "</think>", "</answer>"],
    "never stops": ["and then " * 999] * 9,
    "nested searches": ["<search><search>a</search></search>", "</search>", "<answer>x</answer>"],
    "an answer in a search": ["<search>who <answer>Ossa Trell</answer></search>"],
    "a search in an answer": ["<answer><search>who</search></answer>", "<answer>Ossa Trell</answer>"],
    "end of text as text": [f"<search>a {EOS} b</search>", f"<answer>Ossa {EOS} Trell</answer>"],
    "end of text in a tag": [f"<search>a {ID} b</search>", f"<answer>Ossa Trell{ID}</answer>", f"<ans{ID}"],
    "end of text at once": [ID] * 9,
    "empty queries for ever": ["<search></search>"] * 9,
    "blank queries for ever": ["<search> \n\t </search>"] * 9,
    "only whitespace": [" \n \t" * 99] * 9,
    "control characters": ["<search>\x00\x1b[31m\u202e</search>", "<answer>\x07\x00</answer>"],
}
EXPECTED: dict[str, tuple[str, str | None, list[str]]] = {
    "only tags": ("answered", "", [""]),
    "only opening tags": ("truncated", None, []),
    "only closing tags": ("unanswered", None, []),
    "never stops": ("truncated", None, []),
    "nested searches": ("answered", "x", ["<search>a"]),
    "an answer in a search": ("answered", "Ossa Trell", []),
    "a search in an answer": ("answered", "Ossa Trell", ["who"]),
    "end of text as text": ("answered", f"Ossa {EOS} Trell", [f"a {EOS} b"]),
    "end of text in a tag": ("unanswered", None, []),
    "end of text at once": ("unanswered", None, []),
    "empty queries for ever": ("unanswered", None, [""] * 3),
    "blank queries for ever": ("unanswered", None, [""] * 3),
    "only whitespace": ("truncated", None, []),
    "control characters": ("answered", "\x07\x00", ["\x00\x1b[31m\u202e"]),
}
"""For each policy, how its episode ends, its answer, and the queries that were asked."""


@pytest.mark.parametrize("name", POLICIES)
def test_episode_of_an_odd_policy_ends_in_order_and_the_others_are_as_without_it(name: str) -> None:
    odd, normal = episodes(POLICIES[name], NORMAL)
    end, answer, queries = EXPECTED[name]
    assert (odd.end, odd.answer, [search.query for search in odd.searches]) == (end, answer, queries)
    assert odd.valid
    assert odd.segments[-1].is_policy, "no episode ends on what was not written by the policy"
    assert len(odd.token_ids) - len(odd.segments[0].token_ids) <= OPTIONS.max_response_length
    assert normal.segments == episodes((), NORMAL)[1].segments
    assert normal.answer == "Ossa Trell"


def test_text_of_the_end_of_text_token_is_not_the_token() -> None:
    """Written as text it neither ends the turn nor vanishes; sampled, it ends the turn and is not text."""
    spelled, sampled = episodes(POLICIES["end of text as text"], POLICIES["end of text in a tag"])
    eos = byte_level_tokenizer().eos_token_id
    assert eos not in spelled.token_ids
    written = [segment for segment in sampled.segments if segment.is_policy]
    assert [segment.token_ids[-1] for segment in written] == [eos] * 4
    assert written[0].text == "<search>a "


def test_odd_policies_are_scored_trained_on_and_in_the_log(tmp_path) -> None:
    """All of them in one batch: finite rewards, a finite update, and a transcript of each."""
    found = episodes(*POLICIES.values(), NORMAL)
    mix = RewardMix({"em": 1.0, "f1": 1.0, "format": 1.0}, {"em": {}, "f1": {}, "format": {}})
    scores: list[Score] = asyncio.run(mix.score(found))
    assert all(0 <= score.value <= 3 for score in scores)
    assert scores[-1].value > max(
        score.value
        for name, score in zip(POLICIES, scores, strict=False)
        if EXPECTED[name][1] != "Ossa Trell"
    )
    learner = Learner(
        load_config(None, None, "grpo", {"actor.use_kl_loss": False}).config,
        manager.load("algorithm", "grpo"), tiny_model(max_length=1200), None, None, FixedKL(0.0),
    )  # fmt: skip
    assert isinstance(learner.algorithm, Algorithm)
    experience, metrics = make_experience(learner, found, scores)
    metrics |= accumulate_actor(learner.actor, experience, loss=ActorLoss(), max_tokens=4096)
    assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    log = LogWriter(tmp_path / "log", RunInfo("run"))
    log.write(0, "train", [Record(*pair) for pair in zip(found, scores, strict=True)], metrics)
    log.finish()
    with srl.store.open(tmp_path) as connection:
        kept = {record.trajectory.question.id: record.trajectory for record in read_records(connection)}
        texts = [transcript(connection, item.id) for item in found]
    assert len(texts) == len(found)
    for item in found:
        assert kept[item.question.id].segments == item.segments


@pytest.fixture
def setting(tmp_path):
    write_setting(tmp_path)
    return tmp_path


def test_a_model_that_diverges_in_a_rollout_ends_the_run_in_one_line_and_the_log_has_it(
    setting, monkeypatch
) -> None:
    """Of step 2 the episodes that had ended are in the log; the resumed run samples the step again."""
    ended: list[str] = []
    before: list[int] = []
    generate, finish = TorchEngine.generate, TorchEngine.finish

    async def diverging(self, request_id, token_ids, sampling):
        if request_id.startswith("train/2/") and len(ended) >= 2:
            before.append(len(ended))
            self.model.get_input_embeddings().weight.data.fill_(float("nan"))
        return await generate(self, request_id, token_ids, sampling)

    def noted(self, request_id):
        ended.extend([request_id] if request_id.startswith("train/2/") else [])
        finish(self, request_id)

    monkeypatch.setattr(TorchEngine, "generate", diverging)
    monkeypatch.setattr(TorchEngine, "finish", noted)
    sets = {"rollout__max_num_seqs": 1, "data__val_files": None, "data__test_files": None}
    with pytest.raises(SrlError, match="the model's logits are not finite") as error:
        train(config(setting, "grpo", **sets), setting / "workspace")
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    (run,) = Workspace(setting / "workspace").all_runs()
    assert log_rows(run, "SELECT status FROM runs") == [("failed",)]
    ((why,),) = log_rows(run, "SELECT error FROM runs")
    counts = log_rows(run, "SELECT step, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL")
    assert why.startswith("the model's logits are not finite: its weights have diverged")
    assert counts == [(1, 8), (2, before[0])]
    assert 2 <= before[0] < 8
    resume(run, workspace=Workspace(setting / "workspace"), terminal=Said())
    assert log_rows(run, "SELECT status, error FROM runs") == [("finished", "")]
    counts = log_rows(run, "SELECT step, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL")
    assert counts == [(1, 8), (2, 8)]
