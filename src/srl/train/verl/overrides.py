"""The section `verl` of our configuration: any key of verl's own, applied on top of the translated ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.config.keys import flat, plain
from srl.errors import UserError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

OUR_OWN = (
    "algorithm.adv_estimator",
    "critic.enable",
    "data.custom_cls.path",
    "data.custom_cls.name",
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.use_v1",
    "trainer.v1.trainer_mode",
)
"""Keys that make verl run our code; they cannot be changed."""
CORRECTION = "algorithm.rollout_correction"
"""verl's section and ours, with the same names. Our trainer replaces the method that reads verl's."""
LOSS_CORRECTION = "actor_rollout_ref.actor.policy_loss.rollout_correction"
"""The same section, that verl's trainer copies to the actor's loss; ours does not."""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
LOGPROBS_MODE = "actor_rollout_ref.rollout.logprobs_mode"
_ALGORITHM = ("gamma", "lam", "use_kl_in_reward", "kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef",
              "kl_ctrl.horizon", "kl_ctrl.target_kl")  # fmt: skip
_PASSES = ("ppo_epochs", "ppo_mini_batch_size")
_ROLLOUT = "actor_rollout_ref.rollout"
READ_HERE: Mapping[str, str] = {
    **{f"algorithm.{name}": f"algorithm.{name}" for name in _ALGORITHM},
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.grpo.norm_adv_by_std_in_grpo",
    **{f"data.{name}": f"data.{name}"
       for name in ("train_batch_size", "max_prompt_length", "max_response_length")},
    **{f"{_ROLLOUT}.{name}": f"rollout.{name}" for name in ("n", "temperature", "top_p")},
    **{f"{_ROLLOUT}.val_kwargs.{name}": "eval.temperature" for name in ("temperature", "do_sample")},
    **{f"actor_rollout_ref.actor.{name}": f"actor.{name}" for name in _PASSES},
    **{f"critic.{name}": f"critic.{name}" for name in _PASSES},
}  # fmt: skip
"""Keys that our code reads in verl's processes under our names: for advantages, episodes, the order of the
questions and the schedule of the learning rate. Set in the section `verl` they would hold for a part of the
run only."""
OPEN = ("ray_kwargs.ray_init",)
"""Mappings that verl passes on unread, to `ray.init`."""
ADD = "+"
"""Prefix of a key that verl does not have, as in Hydra."""


def given(config: Config) -> Iterator[tuple[str, Any]]:
    """`(verl's dotted key, value)` of the section `verl`."""
    for path, value in flat(config.verl):
        yield ".".join(path), plain(value)


def apply_overrides(composed: DictConfig, pristine: DictConfig, config: Config) -> None:
    """Set every key of the section `verl` in `composed`; `pristine` has verl's own defaults.

    Raises UserError for a key that verl does not have, and for one that our code sets or replaces.
    """
    from omegaconf import OmegaConf

    for key, value in given(config):
        _check_allowed(key.removeprefix(ADD), value)
        _check_read(composed, key.removeprefix(ADD), value)
        if not key.startswith(ADD):
            _check_known(composed if _has(composed, key) else pristine, key, value)
        OmegaConf.update(composed, key.removeprefix(ADD), value, merge=False, force_add=True)


def _check_allowed(key: str, value: Any) -> None:
    """Raises UserError for a key of verl's that our code sets, or that it would not read."""
    if key in OUR_OWN:
        raise UserError(f"verl.{key} is set by srl and cannot be changed; leave it out")
    if section := next((one for one in (CORRECTION, LOSS_CORRECTION) if _within(key, one)), None):
        name = key.rpartition(".")[2]
        if name in ("bypass_mode", "loss_type"):
            raise UserError(
                f"verl.{key}: srl has no bypass mode, it computes the old log-probs itself; leave it out"
            )
        ours = CORRECTION + key.removeprefix(section)
        raise UserError(f"verl.{key} is not read: set {ours} instead, without verl. before it")
    if key == LOGPROBS_MODE and value != "processed_logprobs":
        raise UserError(
            f"verl.{key} = {value}: srl needs the log-probs at the sampling temperature "
            "(processed_logprobs); leave it out"
        )
    if key == LOSS_MODE and value == "bypass_mode":
        raise UserError(f"verl.{key} = {value}: srl computes the old log-probs itself; leave it out")


def _check_read(composed: DictConfig, key: str, value: Any) -> None:
    """Raises UserError for another value of a key that our code reads under its own name."""
    from omegaconf import OmegaConf

    ours = READ_HERE.get(key)
    if ours and not (_has(composed, key) and OmegaConf.select(composed, key) == value):
        raise UserError(f"verl.{key} is not read everywhere: set {ours} instead")


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _check_known(composed: DictConfig, key: str, value: Any) -> None:
    from omegaconf import DictConfig, OmegaConf

    if any(key.startswith(f"{mapping}.") for mapping in OPEN):
        return
    parent, _, name = key.rpartition(".")
    there = OmegaConf.select(composed, key, throw_on_missing=False) if _has(composed, key) else None
    if isinstance(there, DictConfig) and len(there) and not isinstance(value, Mapping):
        inside = ", ".join(map(str, list(there)[:4]))
        raise UserError(f"verl.{key} is a section, not a value: set a key in it ({inside} …)")
    if not _has(composed, key) and not _is_open(composed, parent, name):
        hint = nearest(key, known_keys(composed))
        raise UserError(f"verl.{key}: verl has no key {key}{hint}; to add one: verl.{ADD}{key}")


def _has(composed: DictConfig, key: str) -> bool:
    """Whether `key` exists, also with a missing value or null; interpolations are not followed."""
    from omegaconf import DictConfig

    node: Any = composed
    for name in key.split("."):
        if not isinstance(node, DictConfig) or name not in list(node):
            return False
        node = node._get_node(name)
    return True


def _is_open(composed: DictConfig, parent: str, name: str) -> bool:
    """Whether `name` may be added to `parent`: an empty mapping, or a section whose class has the field."""
    from omegaconf import DictConfig, OmegaConf

    if not _has(composed, parent):
        above, _, last = parent.rpartition(".")
        return bool(above) and _is_open(composed, above, last)
    node = OmegaConf.select(composed, parent, throw_on_missing=False)
    if node is None:
        return True
    return isinstance(node, DictConfig) and (len(node) == 0 or name in _fields(node))


def _fields(node: DictConfig) -> tuple[str, ...]:
    """The fields of the class that verl builds from a section."""
    from dataclasses import fields, is_dataclass

    from hydra.utils import get_class

    target = node.get("_target_")
    made = get_class(target) if target else None
    return tuple(field.name for field in fields(made)) if made and is_dataclass(made) else ()


def known_keys(composed: DictConfig) -> list[str]:
    """Every dotted key of verl's configuration."""
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(composed, resolve=False)
    return [".".join(map(str, path)) for path, _ in flat(tree)]
