"""Where a run stands; light to import, for the processes that only pass it on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Where a run stands, and the figures its summary needs."""

    step: int = 0
    seconds: float = 0.0
    test_em_start: float | None = None
    test_em_end: float | None = None
    val_em_best: float | None = None
    val_em_best_step: int | None = None
    kl: dict[str, float] = field(default_factory=dict)

    def note_validation(self, em: float, step: int) -> None:
        """Keep the best figure so far and the step it is of; an equal one changes nothing."""
        if self.val_em_best is None or em > self.val_em_best:
            self.val_em_best, self.val_em_best_step = em, step
