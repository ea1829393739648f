"""The extension module: a planned step over tensors that another library keeps."""

from collections.abc import Mapping, Sequence
from typing import Any, Dict, List, Optional, Tuple, final

__all__ = ["__version__", "check", "Session"]

__version__: str

def check(settings: Dict[str, Any]) -> None:
    """Raises ``ValueError`` unless the settings name a rule and are all in range."""

@final
class Session:
    """Where a library's tensors and the state beside them are found, and the plan of a step."""

    def __new__(
        cls,
        parameters: Sequence[Any],
        described: Sequence[Any],
        rules: Sequence[Dict[str, Any]],
        options: Dict[str, Any],
        keys: Mapping[str, str],
        library: Any,
    ) -> Session:
        """Plans a step."""

    def step(
        self,
        parameters: List[Any],
        rules: Sequence[Dict[str, Any]],
        owner: Any,
        gradients: Optional[List[Any]],
        threads: int,
    ) -> Optional[List[int]]:
        """Updates every parameter that has a gradient and says which, by position; ``None`` if
        tensors or settings are no longer what was planned for, and nothing was done then."""

    def plan(self) -> str:
        """The plan of a step, as text."""

    def report(self) -> Optional[Dict[str, Any]]:
        """What the last step did, by name; ``None`` before the first."""

    def update_norms(self) -> Optional[List[Tuple[str, float]]]:
        """How far each parameter moved in the last step, by name; ``None`` unless asked for."""

    def loss_scale(self) -> Optional[Tuple[float, int, int]]:
        """The loss scale and how many good and bad steps it counts; ``None`` without one."""
