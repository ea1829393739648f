"""Everything between the end of ``backward`` and the next ``forward`` of a training step.

``fusestep.torch`` has PyTorch's optimizers. PyTorch is not imported before that module is.
"""

from fusestep._fusestep import __version__

__all__ = ["__version__"]
