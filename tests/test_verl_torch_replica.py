"""The torch engine as verl's rollout: tokens as without verl, and new weights whole or not at all."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.errors import SrlError, UserError
from srl.models.load import load_model
from srl.models.weights import save_model
from srl.rollout.codec import Codec
from srl.rollout.delivery import NotDelivered
from srl.rollout.engine import Completion, Sampling
from srl.rollout.torch_engine import TorchEngine, load_state
from srl.train.verl.delivery import deliver
from srl.train.verl.job import RUN_VARIABLE
from srl.train.verl.without_gpu.torch_server import ServerOptions, TorchServer, as_array

KEY = [7, "train", 3, "question", 1, 0, 0]
PARAMS = {
    "temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "stop": ["</search>", "</answer>"], "srl_key": KEY,
    "include_stop_str_in_output": True, "logprobs": True, "seed": 4,
}  # fmt: skip
PROMPT = [30, 40, 50]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(tiny_model(), byte_level_tokenizer(), folder)
    return folder


@pytest.fixture
def server(directory):
    made = TorchServer(options(directory))
    made.launch()
    return made


def options(directory, **changes) -> ServerOptions:
    given = {"model": str(directory), "tokenizer": str(directory), "max_num_seqs": 4, "max_model_len": 64}
    return ServerOptions(**{**given, **changes})


def direct(model) -> Completion:
    """The turn of PARAMS, asked of a TorchEngine that knows nothing of verl."""
    engine = TorchEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=4, max_model_len=64)
    sampling = Sampling(12, 0.7, 0.9, ("</search>", "</answer>"), tuple(KEY))
    return asyncio.run(engine.generate("direct", PROMPT, sampling))


def turn(server: TorchServer, params=PARAMS) -> Completion:
    completion, _ = asyncio.run(server.turn("one", PROMPT, params))
    return completion


def changed(directory) -> dict[str, torch.Tensor]:
    """The state of the model in `directory` with every weight another."""
    state = load_model(directory, device="cpu").state_dict()
    generator = torch.Generator().manual_seed(1)
    for tensor in {tensor.data_ptr(): tensor for tensor in state.values()}.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator))
    return state


def test_server_generates_what_the_engine_does(server, directory):
    assert turn(server) == direct(load_model(directory, device="cpu"))


def test_turns_of_one_episode_are_requests_of_their_own(server):
    async def twice():
        first, _ = await server.turn("one", PROMPT, PARAMS)
        return first, *(await asyncio.gather(*(server.turn("one", PROMPT, PARAMS) for _ in range(3))))

    first, *others = asyncio.run(twice())
    assert [completion.token_ids for completion, _ in others] == [first.token_ids] * 3


def test_turn_without_a_key_of_ours_still_differs_from_the_next(server):
    params = {**PARAMS, "srl_key": None, "temperature": 1.0}
    one, _ = asyncio.run(server.turn("one", PROMPT, params))
    other, _ = asyncio.run(server.turn("other", PROMPT, params))
    assert one.token_ids != other.token_ids


def test_turn_without_a_cap_takes_what_room_there_is(server):
    params = {name: value for name, value in PARAMS.items() if name not in ("max_tokens", "stop")}
    completion = turn(server, params)
    assert completion.stop_reason == "eos" or len(completion.token_ids) == 64 - len(PROMPT)


def test_parameter_that_the_engine_does_not_have_is_refused(server):
    with pytest.raises(SrlError, match=r"top_k=20.*cluster\.rollout=vllm"):
        turn(server, {**PARAMS, "top_k": 20})
    with pytest.raises(SrlError, match="min_p"):
        turn(server, {**PARAMS, "min_p": 0.1})


def test_turn_longer_than_the_room_is_refused(server):
    with pytest.raises(UserError, match="max_model_len=64"):
        turn(server, {**PARAMS, "max_tokens": 62})


def test_new_weights_are_generated_from_at_once(server, directory):
    before, state = turn(server), changed(directory)

    async def update():
        await server.update_weights(state, 5)
        return await server.turn("one", PROMPT, PARAMS)

    after, step = asyncio.run(update())
    model = load_model(directory, device="cpu")
    model.load_state_dict(state)
    assert after == direct(model) != before
    assert step == 5


def test_weights_without_a_step_keep_the_last_one(server, directory):
    state = changed(directory)
    asyncio.run(server.update_weights(state, 5))
    asyncio.run(server.update_weights(state))
    assert server.global_steps == 5


@pytest.mark.slow  # failures on verl are told with Ray
@pytest.mark.parametrize("lost", ["nothing", "the update", "what was sent"])
def test_server_finds_out_that_it_holds_other_weights(server, directory, lost, monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, str(directory))

    async def send(weights) -> None:
        if lost == "nothing":
            await server.update_weights(dict(weights))
        elif lost == "what was sent":
            list(weights)

    update = deliver(changed(directory).items(), send, server.check_delivery)
    if lost == "nothing":
        asyncio.run(update)
        return
    with pytest.raises(NotDelivered, match="resume with"):
        asyncio.run(update)


def test_tied_weight_may_come_under_one_of_its_names(server, directory):
    state = changed(directory)
    del state["lm_head.weight"]
    load_state(server.model, state)
    assert torch.equal(server.model.lm_head.weight, state["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), r"no value for model\.norm\.weight"),
        (lambda state: state.update(other=torch.ones(1)), "unknown weights other"),
        (lambda state: state.update({"model.norm.weight": torch.ones(3)}), r"another shape model\.norm"),
        (
            lambda state: state.update({"lm_head.weight": state["lm_head.weight"] + 1}),
            r"tied weight (lm_head|model\.embed_tokens)\.weight",
        ),
    ],
    ids=["missing", "unknown", "shape", "untied"],
)
def test_weights_that_do_not_fit_change_nothing(server, directory, spoil, message):
    state = changed(directory)
    spoil(state)
    before = turn(server)
    with pytest.raises(SrlError, match=message):
        asyncio.run(server.update_weights(state, 9))
    assert turn(server) == before
    assert server.global_steps is None


def test_abort_ends_what_is_generated_and_holds_what_comes(server):
    async def story():
        open_turn = asyncio.ensure_future(server.turn("open", PROMPT, {**PARAMS, "stop": []}))
        while not (await server.describe())["open"]:
            await asyncio.sleep(0)
        told = await server.abort_all_requests()
        held = asyncio.ensure_future(server.turn("held", PROMPT, PARAMS))
        for _ in range(50):
            await asyncio.sleep(0)
        waited = not held.done()
        await server.resume_generation()
        return told, await open_turn, waited, await held

    told, aborted, waited, held = asyncio.run(story())
    assert told == {"aborted_count": 1, "request_ids": ["open"]}
    assert aborted == (None, None)
    assert waited
    assert held[0] is not None


def test_abort_may_turn_away_what_comes(server):
    async def story():
        await server.abort_all_requests(reject_request=True)
        rejected = await server.turn("late", PROMPT, PARAMS)
        await server.resume_generation()
        return rejected, await server.turn("later", PROMPT, PARAMS)

    rejected, served = asyncio.run(story())
    assert rejected == (None, None)
    assert served[0] is not None


def test_asker_that_goes_away_ends_its_turn(server):
    async def story():
        asker = asyncio.ensure_future(server.turn("gone", PROMPT, {**PARAMS, "max_tokens": 60, "stop": []}))
        while not (await server.describe())["open"]:
            await asyncio.sleep(0)
        asker.cancel()
        await asyncio.wait([asker])
        for _ in range(3):
            await asyncio.sleep(0)
        return (await server.describe())["open"], await server.turn("one", PROMPT, PARAMS)

    still_open, (completion, _) = asyncio.run(story())
    assert still_open == 0
    assert completion == turn(server)


def test_ended_turn_leaves_its_slot(directory):
    server = TorchServer(options(directory, max_num_seqs=1))
    server.launch()

    async def story():
        turns = [server.turn(f"turn {number}", PROMPT, PARAMS) for number in range(3)]
        return await asyncio.wait_for(asyncio.gather(*turns), timeout=60)

    assert len({completion.token_ids for completion, _ in asyncio.run(story())}) == 1


@pytest.mark.parametrize("what", ["update_weights", "sleep"])
def test_turn_does_not_outlive_its_weights(server, directory, what):
    arguments = [changed(directory)] if what == "update_weights" else []

    async def story():
        asker = asyncio.ensure_future(server.turn("open", PROMPT, {**PARAMS, "stop": []}))
        while not (await server.describe())["open"]:
            await asyncio.sleep(0)
        await getattr(server, what)(*arguments)
        return await asker

    assert asyncio.run(story()) == (None, None)


def test_sleeping_server_generates_the_same_after(server):
    before = turn(server)
    asyncio.run(server.sleep())
    asyncio.run(server.wake_up(tags=["kv_cache"]))
    assert turn(server) == before


def test_directory_without_a_model_is_told(tmp_path):
    with pytest.raises(UserError, match="no model directory"):
        TorchServer(options(tmp_path / "none")).launch()


@pytest.fixture
def cluster(monkeypatch):
    """A Ray of this test's own, with verl's rollouts as registered by `install`."""
    pytest.importorskip("verl")
    import ray

    from srl.train.verl.without_gpu import install

    monkeypatch.setenv("RANK", "0")  # as a trainer's worker has it
    install()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def sections(directory, **rollout):
    """verl's sections `rollout` and `model` for the model in `directory`."""
    from omegaconf import OmegaConf
    from verl.workers.config import RolloutConfig

    given = {
        "name": "srl_torch", "tensor_model_parallel_size": 1, "max_num_seqs": 4, "prompt_length": 40,
        "response_length": 24, "dtype": "float32", "engine_kwargs": {"srl_torch": {"threads": 1}},
    }  # fmt: skip
    model = {"path": str(directory), "tokenizer_path": str(directory)}
    return RolloutConfig(**{**given, **rollout}), OmegaConf.create(model)


@pytest.mark.slow
@pytest.mark.must_run
def test_replica_and_adapter_serve_a_trainer(cluster, directory):
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    rollout, model = sections(directory)

    @cluster.remote(num_cpus=1)
    class Worker:
        pass

    async def generate(server):
        return await server.generate.remote(request_id="one", prompt_ids=PROMPT, sampling_params=PARAMS)

    async def story():
        replica = get_rollout_replica_class("srl_torch")(0, rollout, model, gpus_per_node=1)
        replica.workers = [Worker.remote()]
        await replica.launch_servers()
        adapter = get_rollout_class("srl_torch")(rollout, object(), None)
        await replica.sleep()
        first = await generate(replica.server_handle)
        state = changed(directory)
        await adapter.update_weights(iter(state.items()), global_steps=2)
        second = await generate(replica.server_handle)
        rest = ((name, tensor) for name, tensor in state.items() if name != "model.norm.weight")
        with pytest.raises(SrlError, match=r"no value for model\.norm\.weight"):
            await adapter.update_weights(rest, global_steps=3)
        await replica.abort_all_requests(reject_request=True)
        aborted = await generate(replica.server_handle)
        await replica.resume_generation()
        report = await replica.server_handle.describe.remote()
        modules = await replica.server_handle.__ray_call__.remote(lambda _: list(sys.modules))
        return first, second, aborted, report, modules

    first, second, aborted, report, modules = asyncio.run(story())
    unchanged = load_model(directory, device="cpu")
    other = load_model(directory, device="cpu")
    other.load_state_dict(changed(directory))
    for output, model, step in ((first, unchanged, None), (second, other, 2)):
        expected = direct(model)
        assert tuple(output.token_ids) == expected.token_ids
        assert output.log_probs == pytest.approx(expected.logprobs, abs=1e-6)
        assert output.stop_reason == "completed"
        assert output.extra_fields == {"global_steps": step, "srl_stop": expected.stop_reason}
    assert first.token_ids != second.token_ids
    assert (aborted.token_ids, aborted.stop_reason) == ([], "aborted")
    assert (report["threads"], report["global_steps"], report["open"]) == (1, 2, 0)
    assert "verl" not in modules


@pytest.mark.slow
@pytest.mark.must_run
def test_replica_of_several_workers_names_our_setting(directory):
    pytest.importorskip("verl")
    from srl.train.verl.without_gpu.torch_replica import TorchReplica

    rollout, model = sections(directory, tensor_model_parallel_size=2)
    with pytest.raises(UserError, match=r"cluster\.tensor_model_parallel_size=1"):
        TorchReplica(0, rollout, model, gpus_per_node=2)


@pytest.mark.slow
@pytest.mark.must_run
def test_adapter_refuses_a_lora_that_is_not_merged(directory, monkeypatch):
    pytest.importorskip("verl")
    from srl.train.verl.without_gpu.torch_replica import ServerAdapter

    monkeypatch.setenv("RANK", "0")
    adapter = ServerAdapter(sections(directory)[0], object(), None)
    with pytest.raises(UserError, match=r"lora\.merge=true"):
        asyncio.run(adapter.update_weights(iter(()), peft_config=object()))


def test_weights_in_bfloat16_arrive_as_they_are():
    tensor = torch.randn(5, 3).bfloat16()
    assert torch.equal(torch.from_numpy(as_array(tensor)), tensor.float())
