"""A custom reward: this file is the plugin, and needs no package.

    cd examples
    srl plugins check custom_reward:FewSearches
    srl train --algo grpo --steps 2 --set reward.weights.custom_reward:FewSearches=0.2
    srl inspect sql "SELECT step, part, avg(value) FROM rewards GROUP BY ALL ORDER BY ALL"

Its options are keys of the configuration: --set reward.custom_reward:FewSearches.free=2
"""

from pydantic import BaseModel, Field

from srl.trajectory import Score, Trajectory


class Options(BaseModel):
    free: int = Field(default=1, ge=0)
    """Searches that cost nothing."""


class FewSearches:
    """1 for an answer, halved for each search beyond the free ones; 0 without an answer."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        return [self._score(trajectory) for trajectory in trajectories]

    def _score(self, trajectory: Trajectory) -> Score:
        beyond = max(0, trajectory.valid_searches - self.options.free)
        value = 0.5**beyond if trajectory.answer is not None else 0.0
        return Score(value, {"beyond": beyond})
