"""The extension module: a planned step over tensors that another library keeps."""

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, Optional, Tuple, Union, final

__all__ = [
    "__version__",
    "check",
    "check_settings",
    "engines",
    "momentum_product",
    "rules",
    "samples",
    "settings",
    "state_lists",
    "Codes",
    "Lists",
    "Ranks",
    "Session",
    "Snapshot",
]

__version__: str

engines: Tuple[str, ...]
"""The ways for processes to reach each other that this build has: ``mpi`` only if asked for."""

def check(settings: Dict[str, Any]) -> None:
    """Raises ``ValueError`` unless the settings name a rule and are all in range."""

def momentum_product(beta1: float, momentum_decay: float, step: int) -> float:
    """The product of NAdam's momenta up to a step."""

def rules() -> Dict[str, Dict[str, Any]]:
    """The settings of every rule by its name, with their defaults."""

def state_lists(settings: Dict[str, Any]) -> List[str]:
    """The tensors of state that a rule with these settings keeps beside a parameter."""

def settings() -> List[Dict[str, Any]]:
    """The rows of the table of settings.

    Each has ``name``; ``says``, a sentence; ``range``, values in words; ``default``, a text or
    ``None``; ``choices``, names of values with a sentence each; ``is_switch`` and ``is_list``;
    ``section``, the part of the table; ``needs``, a setting without which it has no effect, or
    ``None``; ``alone``, the setting with which it acts in a process that trains alone: its own name
    if it acts by itself, ``None`` if it never does."""

def check_settings(texts: Mapping[str, Sequence[str]]) -> None:
    """Raises ``ValueError`` for texts out of range, for settings without effect and for those that
    contradict each other."""

def samples(places: Sequence[Tuple[int, int]]) -> List[int]:
    """A number of some values of each tensor, by which a write is noticed that no version counts.
    ``places`` are addresses and bytes, which stay during the call."""

@final
class Codes:
    """State in codes of 8 bits from and to float32."""

    def __new__(cls, library: Any) -> Codes:
        """Looks at tensors of this library from now on."""

    def decode(self, role: str, name: str, codes: Any, units: Any, values: Any) -> None:
        """Writes what codes and their units read as into float32 values. ``role`` says what the
        codes mean, ``name`` is the tensor's in errors."""

    def encode(self, role: str, name: str, values: Any, codes: Any, units: Any) -> None:
        """Writes float32 values as codes, rounded to nearest, and their units."""

@final
class Lists:
    """Steps of Adam over lists of tensors, which are looked at anew at every call."""

    def __new__(cls, library: Any) -> Lists:
        """Looks at tensors of this library from now on."""

    def step(
        self,
        calls: Sequence[Tuple[Tuple[Tuple[float, ...], Tuple[bool, ...]], List[Any]]],
        workers: Union[int, Sequence[int]],
        grad_factor: float,
    ) -> None:
        """Applies one step to the entries of each call, which are settings and entries: name,
        number of the step, parameter, gradient, copy, state, and room for what was before.
        Everything is checked before anything is written."""

    def square_sum(
        self, gradients: List[Any], workers: Union[int, Sequence[int]]
    ) -> Tuple[float, int]:
        """The sum of squares over gradients, and how many elements are infinite or NaN."""

@final
class Snapshot:
    """Settings of parameter groups as they were."""

    def __new__(cls, groups: Sequence[Dict[str, Any]]) -> Snapshot:
        """Looks at the settings of all groups."""

    def holds(self, groups: Sequence[Dict[str, Any]]) -> bool:
        """Whether the groups still have them; never where one can change in place."""

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

    def fits(self, parameters: Sequence[List[Any]]) -> bool:
        """Whether these are the tensors of each group that were planned for."""

    def bind(self, parameters: Sequence[Any]) -> None:
        """Steps with these tensors from now on, which are as those that were planned for."""

    def release(self) -> None:
        """Gives back all tensors and what is known of them; there is no step until `bind`."""

    def looks(
        self,
        parameters: Sequence[List[Any]],
        rules: Sequence[Dict[str, Any]],
        owner: Any,
        gradients: Optional[List[Any]],
    ) -> bool:
        """Raises what a step would raise before it updates anything; ``False`` if tensors or
        settings are no longer as planned."""

    def step(
        self,
        parameters: Sequence[List[Any]],
        rules: Optional[Sequence[Dict[str, Any]]],
        owner: Any,
        gradients: Optional[List[Any]],
        threads: int,
        private: bool = False,
        written: Optional[Callable[[List[Any]], Any]] = None,
        asked: Any = None,
        whole: Optional[List[Tuple[float, int]]] = None,
    ) -> Optional[Sequence[int]]:
        """Updates every parameter that has a gradient and says which, by position; ``None`` if
        tensors or settings are no longer what was planned for, and nothing was done then. Without
        ``rules`` the settings are those of the last step. While
        the state is ``private`` nobody else can have seen it, and steps are counted here.
        ``written`` is called, from any thread, with lists of those that are updated. On a device
        ``asked`` says what else the step heeds; one that is recorded is not taken. ``whole`` has
        what :meth:`squares` returns of all gradients, of which these are a part."""

    def squares(
        self,
        parameters: Sequence[List[Any]],
        owner: Any,
        gradients: Optional[List[Any]],
        threads: int,
        asked: Any,
    ) -> Optional[List[Tuple[float, int]]]:
        """Sums of squares over the gradients of all planned parameters that :meth:`looks` has
        looked at, and their elements that are not finite; ``None`` if tensors have changed."""

    def is_recorded(self) -> bool:
        """Whether a step was recorded, whose replays go on from this session's memory."""

    def table_bytes(self) -> int:
        """Bytes that were copied to a device for tables of launches until now."""

    def has_updated(self) -> bool:
        """Whether the last step has updated parameters, even if it raised something."""

    def write_steps(self) -> None:
        """Writes what was counted here to the tensors that count steps."""

    def is_enqueued(self) -> bool:
        """Whether a step is enqueued on a device, whose outcome nobody has asked for."""

    def plan(self) -> str:
        """The plan of a step, as text."""

    def time_steps(self) -> None:
        """Measures the seconds of every step's parts from here on."""

    def report(self) -> Optional[Dict[str, Any]]:
        """What the last step did, by name; ``None`` before the first."""

    def update_norms(self) -> Optional[List[Tuple[str, float]]]:
        """How far each parameter moved in the last step, by name; ``None`` unless asked for."""

    def loss_scale(self) -> Optional[Tuple[float, int, int]]:
        """The loss scale and how many good and bad steps it counts; ``None`` without one."""

@final
class Ranks:
    """One rank of many, all of which make the same calls."""

    def __new__(
        cls,
        described: Sequence[Any],
        rules: Sequence[Dict[str, Any]],
        options: Dict[str, Any],
        threads: int,
        library: Optional[Any] = None,
    ) -> Ranks:
        """Joins the other processes with the parameters described, all of which train, on the
        device of ``library`` if it has one."""

    @property
    def rank(self) -> int:
        """This process among all."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    @property
    def is_in_backward(self) -> bool:
        """Whether parameters are updated while gradients come."""

    @property
    def averages(self) -> bool:
        """Whether ranks average parameters instead of gradients."""

    @property
    def has_lanes(self) -> bool:
        """Whether gradients are added along lanes of the global batch."""

    @property
    def adds_in_f32(self) -> bool:
        """Whether gradients of parameters of 16 bits are added up in float32, and taken in it."""

    @property
    def shares_parameters(self) -> bool:
        """Whether each rank has a part of the parameters alone, so that ``places`` has none."""

    def plan(self) -> str:
        """The plan of a step, as text."""

    def places(self) -> List[Tuple[Optional[int], Optional[int]]]:
        """For each parameter the address of its memory, where the rank has it whole, and of its
        gradient's, where that may be written by others."""

    def write(self, index: int, place: Tuple[int, int]) -> None:
        """Takes values of a whole parameter: their address on the host, and their bytes."""

    def gather(self, indices: Sequence[int], places: Sequence[Tuple[int, int]]) -> None:
        """Writes whole parameters to places of the host. All ranks ask for the same."""

    def begin(self) -> None:
        """Takes the parameters of rank 0 and compares what decides the bits."""

    def copy(self, index: int, place: Tuple[int, int]) -> None:
        """Copies a gradient into its view: its address, and how many bytes it has."""

    def given(self, index: int) -> None:
        """Says that the gradient of a parameter is whole in its view; does not wait."""

    def push(self, index: int, place: Tuple[int, int]) -> None:
        """Copies a gradient: its address on the host or on the ranks' device, and its bytes."""

    def lend(self, index: int, place: Tuple[int, int]) -> None:
        """Copies a gradient as ``push`` does, of a device without waiting: its tensor keeps memory
        and values until the step has ended."""

    def step(self, rules: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
        """Ends a micro-step: reduces and updates, if it is the last one of an update."""

    def take(self, rules: Sequence[Dict[str, Any]]) -> None:
        """Takes settings for updates that begin with the gradients to come; does not wait."""

    def micro_batch(self) -> Optional[int]:
        """The number, within the update's global batch, of this rank's next micro-batch; ``None``
        without lanes, and where the rank has none of them."""

    def set_micro_batches(self, count: int) -> None:
        """Says that the next update is of so many micro-batches only."""

    def set_weight(self, weight: float) -> None:
        """Weighs the micro-batch under way, before its first gradient."""

    def time_steps(self) -> None:
        """Measures the seconds of every step's parts from here on."""

    def set_loss(self, loss: float) -> None:
        """Tells the loss of the step under way."""

    def average(self) -> None:
        """Averages parameters over all ranks."""

    def flush(self, rules: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
        """Updates from fewer micro-steps than asked for."""

    def touch(self) -> None:
        """Before parameters are written through their views."""

    def loss_scale(self) -> float:
        """The factor to multiply the next loss with."""

    def resume(self, folder: str, any_settings: bool) -> Optional[int]:
        """Goes on from a folder's checkpoint; how many steps had been done, ``None`` without
        one. With ``any_settings`` of a run with other ones, too."""

    def save(self, folder: str, steps: int) -> None:
        """Begins a checkpoint, which is written behind what follows."""

    def finish_saves(self) -> None:
        """Waits for the checkpoint under way."""

    def abort(self, reason: str) -> None:
        """Ends the waits of all ranks for a reason that this one has not to come."""

    def close(self) -> None:
        """Leaves the other ranks, once a checkpoint under way is complete."""
