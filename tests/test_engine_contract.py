"""The engines of `srl.rollout` hold to the contract, and say what they can do."""

import asyncio
import copy

import pytest
from tests.engine_contract import MAX_MODEL_LEN, EngineContract, Subject
from tests.fake_openai import MODEL, FakeServer, torch_app
from tests.tiny_models import byte_level_tokenizer

from srl.errors import UserError
from srl.rollout.codec import Codec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.openai_engine import OpenAiEngine, OpenAiServer, find_model, returns_ids
from srl.rollout.torch_engine import TorchEngine


class TestTorchEngine(EngineContract):
    tolerance = 1e-5

    def start(self, model, codec, folder):
        engine = TorchEngine(model, codec, max_num_seqs=4, max_model_len=MAX_MODEL_LEN)

        def kill():
            model.forward = broken

        yield Subject(engine, copy.deepcopy(model), codec, kill)
        engine.close()


class TestOpenAiEngine(EngineContract):
    tolerance = 1e-5
    weights_can_change = False
    tells_tokens = False

    def start(self, model, codec, folder):
        fake = FakeServer(torch_app(model, codec, MAX_MODEL_LEN))
        with fake.running() as url:
            server = OpenAiServer(url, MODEL, retries=1, sleep=lambda seconds: asyncio.sleep(0))
            assert asyncio.run(find_model(server, MAX_MODEL_LEN)) == MODEL
            assert asyncio.run(returns_ids(server, codec))
            engine = OpenAiEngine(codec, server, token_ids=True, max_model_len=MAX_MODEL_LEN)
            yield Subject(engine, copy.deepcopy(model), codec, lambda: fake.kill_after(3))
            engine.close()


def broken(*args, **kwargs):
    raise RuntimeError("the GPU is on fire")


def test_weights_of_a_scripted_engine_cannot_change():
    engine = ScriptedEngine(Codec(byte_level_tokenizer()), lambda request, turn: "")
    with pytest.raises(UserError, match=r"set rollout\.engine=torch"):
        engine.sync([])
