"""verl's own validation of the composed configuration, with an error that names our key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srl.config import Config
from srl.errors import UserError
from srl.train.verl.job import Job
from srl.train.verl.translate import compose

if TYPE_CHECKING:
    from omegaconf import DictConfig


def validated(config: Config, job: Job) -> DictConfig:
    """The composed configuration that verl accepts. Raises UserError with our key and verl's words."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    composed = compose(config, job)
    try:
        validate_config(composed, need_reference_policy(composed), need_critic(composed))
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"verl refuses the configuration: {error}") from error
    return composed
