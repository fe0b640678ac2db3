"""What every process of a run on verl must know besides its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN_VARIABLE = "SRL_VERL_RUN"
"""The environment variable that names the run's directory; without it the plugin does nothing."""

ABOUT = "about.json"
"""In the run's directory: what its checkpoints say of how the model was trained to talk."""
WORKERS_WITHOUT_GPU = 2
"""Workers of a machine without a GPU, where nothing says how many."""
TORCH = "srl_torch"
"""The name of our own rollout replica in verl's registry."""


@dataclass(frozen=True, slots=True)
class Job:
    """Where a run lives and what it runs on; `cpu` where there is no accelerator."""

    run: Path
    resume: bool = False
    cpu: bool = False
    gpus_per_node: int = 1

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's files alone: beside a model's, other programs may take it for another kind."""
        return self.run / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"
