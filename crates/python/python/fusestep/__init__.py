"""Everything between the end of ``backward`` and the next ``forward`` of a training step.

``fusestep.torch`` has PyTorch's optimizers, ``fusestep.numpy`` a step on arrays of NumPy and of any
library that speaks DLPack. Neither library is imported before its module is.
"""

from fusestep._fusestep import __version__
from fusestep._report import Report

__all__ = ["Report", "__version__"]
