"""Plans of parameters that take turns."""

from __future__ import annotations

import threading
from typing import Dict, Hashable, Optional, Tuple

from fusestep import _fusestep

# The plans that are kept, and the parameters that all of them have, of which one takes a kilobyte.
MOST_PLANS = 64
MOST_PARAMETERS = 16_384


# A plan, and the settings that it has, if anybody has looked at them.
Kept = Tuple[_fusestep.Session, Optional[_fusestep.Snapshot]]


class Plans:
    """Plans that are not in use, by what they were made for.

    Lists of parameters may take turns before each step, as where a model is updated part by part.
    What is kept has no tensor, no state and no address of them, so it serves all parameters of
    these names, dtypes and shapes. What was in use longest ago goes first.
    """

    def __init__(self) -> None:
        # Of all plans of one owner, since a thread may ask one that another thread has given back.
        self.lock = threading.RLock()
        # By key, what was put away last at the end.
        self._kept: Dict[Hashable, Tuple[Optional[Kept], int]] = {}
        # The parameters of all of them.
        self._parameters = 0

    def take(self, key: Hashable) -> Optional[Kept]:
        """The plan that was made for this, which is kept no longer; ``None`` without one."""
        with self.lock:
            kept, parameters = self._kept.pop(key, (None, 0))
            self._parameters -= parameters
        return kept

    def give_back(self, key: Hashable, kept: Kept, parameters: int) -> None:
        """Keeps a plan of so many parameters until it is asked for, if there is room."""
        with self.lock:
            kept[0].release()
            before = len(self._kept)
            self._kept[key] = kept, parameters
            # Plans made for the same have as many parameters.
            self._parameters += parameters * (len(self._kept) - before)
            while len(self._kept) > MOST_PLANS or self._parameters > MOST_PARAMETERS:
                self.take(next(iter(self._kept)))
