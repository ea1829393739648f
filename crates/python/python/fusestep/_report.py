"""What a step says it did."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional


@dataclasses.dataclass(frozen=True)
class Report:
    """What the last step did: the fields that Rust, candle and `fusestep train --log` have, too."""

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
    step: int = 0
    """Updates so far; one that is skipped is not counted."""
    lr: float = 0.0
    """Learning rate of the update, of the first group that trains."""
    loss: Optional[float] = None
    """Mean of the losses told by ``DataParallel.set_loss``; ``None`` if none was told."""
    loss_scale: Optional[float] = None
    """Factor to multiply the next loss with; ``None`` unless the step scales it."""
    tensors_skipped: int = 0
    """Tensors that LARS or LAMB has left as they are, because a norm of theirs is not finite."""
    dropped_micro_steps: int = 0
    """Micro-steps whose gradients were dropped with a skipped update."""
    averaged: bool = False
    """Whether parameters were averaged over ranks."""
    calls: int = 0
    """Calls between ranks since the update before."""
    bytes_sent: int = 0
    """Bytes sent to other ranks since the update before."""
    seconds: Optional[Dict[str, float]] = None
    """Seconds of each part of the update; ``None`` without ``optimizer.time_steps()``."""
