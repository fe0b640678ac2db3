"""The torch engine as verl's rollout: tokens as without verl, and new weights whole or not at all."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.models.load import load_model
from srl.models.weights import save_model
from srl.rollout.codec import Codec
from srl.rollout.delivery import NotDelivered
from srl.rollout.engine import Completion, Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.train.verl.without_gpu import ServerAdapter, TorchServer, as_array

KEY = [7, "train", 3, "question", 1, 0, 0]
PARAMS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "stop": ["</search>"], "srl_key": KEY}
PROMPT = [30, 40, 50]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(tiny_model(), byte_level_tokenizer(), folder)
    return str(folder)


@pytest.fixture
def server(directory):
    return TorchServer(directory, directory, max_num_seqs=2, max_model_len=64)


def direct(model) -> Completion:
    """The turn of PARAMS, asked of a TorchEngine that knows nothing of verl."""
    engine = TorchEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=2, max_model_len=64)
    return asyncio.run(engine.generate("direct", PROMPT, Sampling(12, 0.7, 0.9, ("</search>",), tuple(KEY))))


async def turn(server, params=PARAMS):
    return await server.generate("one", prompt_ids=PROMPT, sampling_params=params)


def is_that_of(output, model, step) -> bool:
    expected = direct(model)
    assert tuple(output.token_ids) == expected.token_ids
    assert output.log_probs == pytest.approx(expected.logprobs, abs=1e-6)
    return output.extra_fields == {"global_steps": step}


def changed(directory) -> dict[str, torch.Tensor]:
    """The state of the model in `directory` with every weight another."""
    state = load_model(directory, device="cpu").state_dict()
    generator = torch.Generator().manual_seed(1)
    for tensor in {tensor.data_ptr(): tensor for tensor in state.values()}.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator))
    return state


def arrays(state):
    return {name: as_array(tensor) for name, tensor in state.items()}


def test_server_generates_what_the_engine_does_and_from_new_weights_at_once(server, directory):
    """Five turns at once in two slots, another before the new weights, and one after the engine slept."""

    async def story():
        turns = [*await asyncio.gather(*(turn(server) for _ in range(5))), await turn(server)]
        await server.sleep()
        await server.wake_up(tags=["kv_cache"])
        turns.append(await turn(server))
        await server.update_weights(arrays(changed(directory)), 5)
        return turns, await turn(server)

    before, after = asyncio.run(story())
    old, new = load_model(directory, device="cpu"), load_model(directory, device="cpu")
    new.load_state_dict(changed(directory))
    assert all(is_that_of(output, old, None) for output in before)
    assert is_that_of(after, new, 5)
    assert after.token_ids != before[0].token_ids


class Handle:
    """The server as Ray hands it out, which may lose an update."""

    def __init__(self, server: TorchServer, loses: bool) -> None:
        self.server, self.loses = server, loses

    def __getattr__(self, name: str) -> SimpleNamespace:
        async def lost(*ignored: object) -> None: ...

        is_lost = self.loses and name == "update_weights"
        return SimpleNamespace(remote=lost if is_lost else getattr(self.server, name))


@pytest.mark.parametrize("loses", [False, True])
def test_server_finds_out_that_it_holds_other_weights(server, directory, monkeypatch, loses):
    monkeypatch.setattr(ServerAdapter, "server", Handle(server, loses))
    with pytest.raises(NotDelivered) if loses else nullcontext():
        asyncio.run(ServerAdapter(replica_rank=0).update_weights(iter(changed(directory).items()), 1))
