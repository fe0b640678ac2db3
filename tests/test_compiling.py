"""Compiled layers give what the layers give, in packed batches only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
from tests.rows import gradients, trajectory
from tests.tiny_models import tiny_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import eager as nop
from torch._functorch.aot_autograd import make_boxed_func

from srl.update import logits
from srl.update.batch import collate
from srl.update.compiling import compile_updates
from srl.update.logprobs import batched_stats, token_stats

SPECS = ("ppaaoaa" * 3, "paaa", "ppppafffa", "paaoa" * 5)


def batch_of(specs=SPECS):
    return collate([trajectory(spec, vocabulary=400) for spec in specs])


def learn(model, batch):
    stats = token_stats(model, batch, batch.response_mask, 0.7)
    (stats.logprobs * torch.linspace(0.5, 1.5, stats.logprobs.shape[1])).sum().backward()
    return stats.logprobs.detach(), gradients(model)


class Compiler:
    """Stands in for `torch.compile`: counts the calls of what it returns."""

    def __init__(self):
        self.calls = 0

    def __call__(self, function, dynamic):
        assert dynamic, "one graph must serve every number of tokens"

        def compiled(*args, **options):
            self.calls += 1
            return function(*args, **options)

        return compiled


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(torch, "compile", made)
    return made


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def compiled(model):
    compile_updates([logits.trunk(model)], 64, Path("unused"), pytest.fail)
    return model


def test_only_packed_batches_go_through_the_compiler(compiler):
    model, batch = compiled(tiny_model()), batch_of()
    model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    model.generate(batch.input_ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert compiler.calls == 0
    token_stats(model, batch, batch.response_mask)
    assert compiler.calls == 2, "one call a layer"
    batched_stats(model, batch, batch.response_mask, max_tokens=1000)
    assert compiler.calls == 4, "log-probs from before the update are of the same kernels as those in it"


def test_attention_stays_out_of_the_graph_when_another_model_is_packed_later(monkeypatch):
    """Else the compiler unrolls the loop over the rows, which takes it many minutes for a batch of 60."""
    graphs, real = [], torch.compile

    def noted(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=noted, bw_compiler=nop)
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: real(function, dynamic=dynamic, backend=backend)
    )
    torch._dynamo.reset()
    model = compiled(tiny_model())
    assert logits.packs(tiny_model(seed=1), 64), "such as the reference of a run"
    learn(model, batch_of())
    before = len(graphs)
    learn(model, batch_of(("paaaoa" * 4, "paa", "ppa", "paoa", "pppa", "paaa")))
    assert before == len(graphs) > 0, "one graph for every number of rows"


def test_a_model_that_cannot_be_packed_is_not_compiled_and_said(tmp_path, compiler):
    model, notes = tiny_model(), []
    model.config._attn_implementation = "eager"
    compile_updates([model.model], 64, tmp_path, notes.append)
    token_stats(model, batch_of(), batch_of().response_mask)
    assert (compiler.calls, len(notes)) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_is_eager_with_the_real_compiler(dtype):
    """For two numbers of tokens, with gradients, and with no more graphs for the second."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    batches = [batch_of(), batch_of(("paaaoa" * 4, "paa"))]
    expected = [learn(tiny_model(dtype=dtype), batch) for batch in batches]
    model = compiled(tiny_model(dtype=dtype))
    graphs = []
    for batch, (logprobs, wanted) in zip(batches, expected, strict=True):
        found, gradient = learn(model, batch)
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.3}
        torch.testing.assert_close(found, logprobs, **close)
        for name, right in wanted.items():
            apart = float((gradient[name] - right).norm() / right.norm().clamp(min=1.0))
            assert apart < (1e-4 if dtype == torch.float32 else 0.1), name
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
