"""What training asks of an engine: new weights after each update, and its memory during the update."""

import pytest
from tests.store_builder import log_rows
from tests.test_local_backend import metrics_of
from tests.training import config, only_run, setting, train

from srl.config import load_config
from srl.errors import EXIT_CHECK_FAILED, UserError, with_notes
from srl.models.load import load_model
from srl.models.weights import merged_weights
from srl.rollout.delivery import NotDelivered
from srl.rollout.engine import EngineFault
from srl.rollout.torch_engine import TorchEngine
from srl.safe import hidden
from srl.train import load_components
from srl.train.model_settings import settings_of
from srl.train.resume import resume_with

__all__ = ["setting"]


class OwnCopy(TorchEngine):
    """A torch engine with a copy of the model, as a server has one; `calls` are the trainer's."""

    same_weights = False

    def __init__(self, model, codec, **options):
        super().__init__(model, codec, **options)
        self.calls: list[str] = []

    def sync(self, weights):
        self.calls.append("sync")
        super().sync(weights)

    def sleep(self):
        self.calls.append("sleep")
        super().sleep()

    def wake(self):
        self.calls.append("wake")
        super().wake()

    def close(self):
        self.calls.append("close")
        super().close()


class FailsOnce(OwnCopy):
    """Fails the first turn of one sample of every question, however often it is asked."""

    async def generate(self, request_id, token_ids, sampling):
        if request_id.startswith("train/") and request_id.split("/")[-2] == "1":
            raise EngineFault("the engine is on fire")
        return await super().generate(request_id, token_ids, sampling)


class DropsTheSecondSync(OwnCopy):
    """Takes the weights of the second sync and goes on with those of the first."""

    def sync(self, weights):
        super().sync(
            weights if not self.calls else [(name, self.model.state_dict()[name]) for name, _ in weights]
        )


class LeavesOutTheAdapter(OwnCopy):
    """Takes the weights of the policy as it was, whatever was trained since."""

    def sync(self, weights):
        start = merged_weights(load_model(self.model.config.name_or_path, device="cpu"))
        super().sync(start if list(weights) else ())


@pytest.fixture
def made(monkeypatch):
    """Makes every run use an engine of the class that is appended; the engines made are appended after it."""
    classes: list = []

    def load(config, policy, note):
        model = load_model(config.model.path, dtype="float32", device="cpu")
        engine = classes[0](model, policy.codec, max_num_seqs=8, max_model_len=160)
        classes.append(engine)
        return engine

    monkeypatch.setattr("srl.train.local_backend.load_engine", load)
    return classes


@pytest.mark.parametrize("rank", [0, 4])
def test_engine_with_weights_of_its_own_gets_the_new_ones_after_each_update(setting, workspace, made, rank):
    made.append(OwnCopy)
    train(config(setting, "grpo", model__lora_rank=rank), workspace)
    assert made[1].calls == ["sync", "sleep", "sync", "wake", "sleep", "sync", "wake", "close"]
    for values in metrics_of(only_run(workspace)).values():
        assert values["rollout/logprob_diff/max"] < 1e-4, "the engine's weights are not the trainer's"
        assert values["actor/grad_norm"] > 0


@pytest.mark.parametrize("engine", [DropsTheSecondSync, LeavesOutTheAdapter])
def test_run_ends_where_the_engine_does_not_get_what_was_trained(setting, workspace, made, engine):
    made.append(engine)
    with pytest.raises(NotDelivered) as caught:
        train(config(setting, "grpo", model__lora_rank=4), workspace)
    run = only_run(workspace)
    assert resume_with(run) in with_notes(caught.value)
    assert "\n" not in with_notes(caught.value)
    assert caught.value.exit_code == EXIT_CHECK_FAILED
    assert made[1].calls == ["sync", "sleep", "sync", "close"], "nothing was sampled after the update"


def test_episodes_that_the_engine_fails_are_left_out_of_the_update_and_named_in_the_log(
    setting, workspace, made
):  # fmt: skip
    made.append(FailsOnce)
    train(config(setting, "grpo", ["rollout.n=3", "search.max_failed=0.5"]), workspace)
    run = only_run(workspace)
    for values in metrics_of(run).values():
        assert values["env/excluded_share"] == pytest.approx(1 / 3)
        assert values["actor/grad_norm"] >= 0
    query = "SELECT DISTINCT sample, valid, error FROM trajectories WHERE phase = 'train' ORDER BY ALL"
    found = log_rows(run, query)
    assert found == [(0, True, ""), (1, False, "the engine is on fire"), (2, True, "")]


def test_key_from_a_variable_of_any_name_is_hidden(monkeypatch):
    monkeypatch.setenv("TEACHER", "abc-hush-77")
    sets = ["rollout.engine=openai", "rollout.openai.url=http://127.0.0.1:9/v1"]
    asked = settings_of(None, None, None, {}, [*sets, "rollout.openai.key_variable=TEACHER"])
    with pytest.raises(UserError):
        load_components.load_generation(asked, lambda text: None)
    assert "hush" not in hidden("the key is abc-hush-77")


def test_a_key_given_for_the_name_of_its_variable_is_not_shown():
    with pytest.raises(UserError) as caught:
        load_config(sets=["rollout.openai.key_variable=sk-secret"])
    assert "secret" not in str(caught.value)
