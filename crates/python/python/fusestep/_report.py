"""What a step says it did."""

from __future__ import annotations

import dataclasses
from typing import Optional


@dataclasses.dataclass(frozen=True)
class Report:
    """What the last step did."""

    launches: int
    """Launches of the plan."""
    elements: int
    """Elements updated; 0 if the step was skipped."""
    without_gradient: int
    """Parameters that had no gradient and stayed as they were."""
    copied_gradients: int
    """Gradients that had to be copied, because their elements did not lie in order."""
    grad_norm: Optional[float]
    """Norm of all gradients, the loss scale taken out; ``None`` unless the step clips or scales."""
    update_norm: Optional[float]
    """Norm of what the step changed; ``None`` without ``update_norms``."""
    non_finite: int
    """Gradient elements that are infinite or NaN; counted where the step clips or scales."""
    skipped: bool
    """Whether the step was skipped because of them: nothing was written."""
