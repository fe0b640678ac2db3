"""The local backend and verl's: from the same weights and completions the same rows, advantages, gradients.

Episodes run here, through the agent loop that verl calls. Networks run in processes of their own, since
verl's platform and our patches belong to a process: `verl_rank.py` holds the classes of a run under Ray.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tests.verl_rows import (
    fields_of,
    learner,
    local_episodes,
    moved,
    padded,
    place,
    response,
    run_workers,
    settings,
    verl_episodes,
    with_padding,
)

from srl.plugins import manager
from srl.train.compute_advantages import compute_advantages
from srl.train.load_components import load_algorithm
from srl.train.rl import loss_settings, make_experience
from srl.train.verl.batch import step_batch
from srl.update.actor import accumulate_actor
from srl.update.critic import accumulate_critic
from srl.update.kl import kl_controller

pytestmark = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(1800)]

PADDING = 2
FULL = {
    "actor.entropy_coeff": 0.1, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.2,
    "actor.clip_ratio_high": 0.3, "actor.optim.lr": 0.5, "critic.optim.lr": 0.5,
}  # fmt: skip
ACTOR = {
    "token-mean": {"actor.kl_loss_type": "k3+", "actor.policy_loss.loss_mode": "cispo"},
    "seq-mean-token-mean": {"actor.kl_loss_type": "k1", "actor.policy_loss.loss_mode": "gspo"},
    "seq-mean-token-sum": {
        "actor.kl_loss_type": "k2",
        "actor.entropy_coeff": 0.0,
        "actor.clip_ratio_c": None,
    },
    "constant": {"algorithm.rollout_correction.rollout_is": "token", "actor.clip_ratio_c": 1.5},
}
"""The actor's ways to make one loss of its tokens, each with another KL, dual clip or weights."""
CRITIC = {
    "token-mean": {},
    "seq-mean-token-mean": {"critic.cliprange_value": 5.0},
    "seq-mean-token-sum": {},
    "constant": {},
}


@pytest.fixture(scope="module", autouse=True)
def _verl():
    pytest.importorskip("verl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return place(tmp_path_factory.mktemp("parity") / "run")


@pytest.mark.parametrize("backend", ["vllm", "srl_torch"])
def test_token_ids_masks_and_rewards_are_those_of_the_local_backend(folder, monkeypatch, backend):
    chosen = settings(folder)
    ours, scores = local_episodes(chosen)
    rows = verl_episodes(chosen, monkeypatch, backend)
    assert rows.trajectories == ours
    assert [item.valid for item in ours] == [True, True, True, False] * 2
    assert {score.value for score in scores} == {0.0, 1.0}
    for row, item, score in zip(rows.fields, ours, scores, strict=True):
        assert (
            row["input_ids"].tolist()
            == [*row["prompts"].tolist(), *row["responses"].tolist()]
            == item.token_ids
        )
        mask = torch.tensor(item.response_mask) * item.valid
        assert [0] * len(row["prompts"]) + row["response_mask"].tolist() == mask.tolist()
        assert torch.equal(row["loss_mask"], row["response_mask"])
        assert float(row["rm_scores"].sum()) == score.value


def advantages(folder, monkeypatch, algo, sets=(), change=lambda scores: scores):
    """(ours, verl's, mask), a row each: advantages and returns from the same log-probs and values."""
    chosen = settings(folder, algo, sets)
    trajectories, scores = local_episodes(chosen)
    scores = change(scores)
    ours, metrics = make_experience(learner(chosen, folder), trajectories, scores)
    fields = with_padding(verl_episodes(chosen, monkeypatch).fields, PADDING)
    for row, score in zip(fields, scores, strict=False):
        row["extra_fields"]["srl_per_turn"] = score.per_turn
    known = {
        "rm_scores": [row["rm_scores"] for row in fields],
        "response_mask": [row["response_mask"] for row in fields],
        "old_log_probs": response(ours.old_logprobs, fields),
    }
    for name, tensor in (("ref_log_prob", ours.ref_logprobs), ("values", ours.values)):
        if tensor is not None:
            known[name] = response(tensor, fields)
    step = step_batch(
        {name: padded(tensors) for name, tensors in known.items()},
        [row["extra_fields"] for row in fields], [False] * len(trajectories) + [True] * PADDING,
    )  # fmt: skip
    control = chosen.algorithm.kl_ctrl
    result = compute_advantages(
        step, chosen, load_algorithm(chosen),
        kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon),
    )  # fmt: skip
    mask = padded([row["response_mask"] for row in fields])
    pairs = [(ours.advantages, result.advantages), (ours.returns, result.returns)]
    return (
        [(padded(response(mine, fields)), theirs) for mine, theirs in pairs],
        mask,
        metrics,
        result.metrics,
    )


@pytest.mark.parametrize("algo", [entry.name for entry in manager.installed("algorithm")])
def test_advantages_of_every_plugin_are_those_of_the_local_backend(folder, monkeypatch, algo):
    """With observations, feedback, failed rows, rows that fill the batch up, and KL in the reward."""
    sets = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05", "algorithm.gamma=0.97",
            "algorithm.lam=0.9"]  # fmt: skip
    pairs, mask, ours, theirs = advantages(folder, monkeypatch, algo, sets)
    for mine, found in pairs:
        torch.testing.assert_close(found * mask, mine, rtol=1e-5, atol=1e-6)
        assert float(mine[mask.bool()].abs().max()) > 1e-3
    for name in ("critic/kl", "critic/score/mean", "critic/rewards/mean", "critic/advantages/max"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5)


def test_rewards_of_each_turn_end_on_the_same_tokens(folder, monkeypatch):
    def each_turn(scores):
        trajectories, _ = local_episodes(settings(folder))
        return [
            replace(score, per_turn=tuple(0.1 * (turn + 1) for turn in range(item.turns)))
            for score, item in zip(scores, trajectories, strict=True)
        ]

    pairs, mask, *_ = advantages(folder, monkeypatch, "reinforce_plus_plus", change=each_turn)
    for mine, found in pairs:
        torch.testing.assert_close(found * mask, mine, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def experience(folder):
    """An experience of the local backend, its networks, and the same rows as verl's workers read them."""
    chosen = settings(folder, "ppo", **FULL)
    trajectories, scores = local_episodes(chosen)
    known = learner(chosen, folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fields = with_padding(verl_episodes(chosen, monkeypatch).fields, PADDING)
    save_critic(known.critic, folder / "critic")
    made, _ = make_experience(known, trajectories, scores)
    return known, made, fields


def save_critic(critic, directory):
    """The critic's weights as a directory that verl may start from."""
    shutil.copytree(directory.parent / "model", directory, dirs_exist_ok=True)
    weights = {f"model.{name}": value for name, value in critic.decoder.state_dict().items()}
    save_file({**weights, "score.weight": critic.head.weight.detach()}, directory / "model.safetensors")


def variants(folder):
    """name → (network, configuration, whether the optimiser steps); those that step come last."""
    found = {}
    for step in (False, True):
        for network, modes in (("actor", ACTOR), ("critic", CRITIC)):
            for mode, changes in list(modes.items())[: 1 if step else None]:
                given = {**FULL, **changes, f"{network}.loss_agg_mode": mode}
                found[f"{network} {mode} {step}"] = network, settings(folder, "ppo", **given), step
    return found


VARIANTS = [f"actor {mode} False" for mode in ACTOR] + [f"critic {mode} False" for mode in CRITIC]
STEPS = ["actor token-mean True", "critic token-mean True"]


def part_of(made, config):
    """What a case learns from: weights only where the configuration asks for them."""
    part = moved(made)
    if config.algorithm.rollout_correction.rollout_is != "token":
        return part
    generator = torch.Generator().manual_seed(7)
    weights = 2 * torch.rand(part.mask.shape, generator=generator)
    return replace(part, weights=weights)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def workers(request, folder, experience, tmp_path_factory):
    """What verl's workers answer to all cases: with one process, and with two that share the rows."""
    _, made, fields = experience
    cases = [
        {
            "name": name, "network": network, "config": config, "step": step,
            "fields": fields_of(part_of(made, config), fields, network),
        }
        for name, (network, config, step) in variants(folder).items()
    ]  # fmt: skip
    chosen = settings(folder, "ppo", **FULL)
    critic = {"critic": {"model": {"path": str(folder / "critic")}}}
    job = {
        "config": chosen.model_copy(update={"verl": critic}), "run": folder, "rows": fields,
        "cases": cases, "temperature": chosen.rollout.temperature,
    }  # fmt: skip
    return run_workers(job, tmp_path_factory.mktemp("workers"), request.param)


def test_log_probs_and_values_are_those_of_the_local_backend(workers, experience):
    _, made, fields = experience
    mask = padded([row["response_mask"] for row in fields])
    for network, ours in (("actor", made.old_logprobs), ("critic", made.values)):
        found = padded([row for answer in workers for row in answer["infer"][network]])
        expected = padded(response(ours, fields))
        torch.testing.assert_close(found * mask, expected * mask, rtol=1e-5, atol=1e-5)


def local(known, made, network, config):
    """The local backend's module, with the gradients of the mini-batch in it, and its metrics."""
    part = part_of(made, config)
    if network == "actor":
        known.actor.zero_grad(set_to_none=True)
        metrics = accumulate_actor(known.actor, part, loss=loss_settings(config), max_tokens=300)
        return known.actor, metrics
    known.critic.zero_grad(set_to_none=True)
    section = config.critic
    metrics = accumulate_critic(
        known.critic, part, clip=section.cliprange_value, normalise=section.loss_agg_mode, max_tokens=300,
        horizon=config.data.max_response_length,
    )  # fmt: skip
    return known.critic, metrics


def in_verls_names(name):
    """A parameter of the local critic as verl's token classification calls it."""
    return name.replace("decoder.", "model.", 1).replace("head.", "score.", 1)


def distance(found, expected):
    """Relative L2 over all parameters together."""
    assert set(found) == set(expected)
    off = sum(float((found[name] - value).square().sum()) for name, value in expected.items())
    return (off / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_before_the_step_are_those_of_the_local_backend(workers, experience, folder, name):
    known, made, _ = experience
    network, config, _ = variants(folder)[name]
    module, metrics = local(known, made, network, config)
    expected = {in_verls_names(each): weight.grad for each, weight in module.named_parameters()}
    for answer in workers:
        assert distance(answer["cases"][name]["gradients"], expected) < 1e-5
    loss = "actor/pg_loss" if network == "actor" else "critic/vf_loss"
    (theirs,) = workers[0]["cases"][name]["metrics"][loss]
    assert float(theirs) == pytest.approx(metrics[loss], rel=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_one_step_of_gradient_descent_is_that_of_the_local_backend(workers, experience, folder, name):
    """Clipped to a norm of 1, and long enough to be told from rounding."""
    known, made, _ = experience
    network, config, _ = variants(folder)[name]
    module, _ = local(known, made, network, config)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    section = getattr(config, network)
    step = {in_verls_names(n): -section.optim.lr * w.grad for n, w in module.named_parameters()}
    for answer in workers:
        before = {in_verls_names(n): w.detach() for n, w in module.named_parameters()}
        after = answer["cases"][name]["weights"]
        assert distance({n: after[n] - value for n, value in before.items()}, step) < 1e-4
    assert norm > 1
    (theirs,) = workers[0]["cases"][name]["metrics"]["grad_norm"]
    assert theirs == pytest.approx(float(norm), rel=1e-4)
