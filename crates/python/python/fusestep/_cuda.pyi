"""The extension module for CUDA devices: what ``_fusestep`` has for host memory."""

from fusestep._fusestep import Ranks as Ranks
from fusestep._fusestep import Session as Session

__all__ = ["__version__", "Ranks", "Session"]

__version__: str
