"""The state of an optimizer, and whether anybody else can have seen it."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, DefaultDict, Dict, List, Optional, Sequence

from torch import Tensor

if TYPE_CHECKING:
    from fusestep.torch._planned import Planned

State = DefaultDict[Tensor, Dict[str, Any]]


class Store:
    """The state that steps have made, private until somebody asks for it.

    Whoever holds a tensor of it may move its memory, write to it or read what it counts. Until
    then it stays where it is, which steps over many small parameters need not verify, and what is
    counted is written when it is shown. Copies of an optimizer's ``__dict__``, which wrappers make,
    share the store.
    """

    def __init__(self, state: Dict[Tensor, Dict[str, Any]]) -> None:
        # A mapping of its own, since others may have the one given.
        self.state: State = defaultdict(dict, state)
        self.private = True
        # Another thread that asks during a step waits for its end.
        self._lock = threading.RLock()
        self._is_stepping = False
        # Who has stepped with it and counts.
        self._planned: Optional[Planned] = None

    def step(
        self,
        planned: Planned,
        lists: List[List[Tensor]],
        gradients: Optional[List[Optional[Tensor]]],
    ) -> Optional[Sequence[int]]:
        """Has ``planned`` step while nobody looks, told whether the state is private."""
        with self._lock:
            if self._planned is not planned:
                self.settle()
                self._planned = planned
            self._is_stepping = True
            try:
                return planned.ask(lists, gradients, self.private)
            finally:
                self._is_stepping = False

    def settle(self) -> None:
        """Writes what was counted to the tensors that count."""
        with self._lock:
            if self._is_stepping:
                raise RuntimeError(
                    "state: expected a look before or after a step, found one during it"
                )
            if self._planned is not None:
                self._planned.write_steps()
                self._planned = None

    def show(self) -> State:
        """The state, from now on anybody's."""
        with self._lock:
            self.settle()
            self.private = False
        return self.state
