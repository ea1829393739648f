"""CUDA tensors without a card: PyTorch's tensors of the CPU, in memory of the emulated driver.

PyTorch's own kernels for CUDA take a card. Inside of ``emulated()`` tensors that a program makes on
``cuda:0`` lie in memory that the driver has allocated, and say that they are there. So steps on them
go the whole way: PyTorch's C interface tells their addresses, the extension module enqueues on a
stream of the driver, and the emulator refuses addresses that it has not given out.
"""

import contextlib
import ctypes
import types
import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from fusestep.torch import _device
from fusestep.torch._sharded import is_sharded


class Driver:
    """The driver's library, as a framework calls it."""

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._contexts = {}
        # First addresses and lengths of what is allocated, by device.
        self.allocated = {}

    def _call(self, name, *arguments):
        status = getattr(self._library, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def enter(self, index):
        """Makes the primary context of a device the thread's."""
        if index not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
            self._contexts[index] = context
        self._call("cuCtxSetCurrent", self._contexts[index])

    def current(self):
        """The number of the device whose context the thread has; ``None`` without one."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        own = {held.value: index for index, held in self._contexts.items()}
        return own.get(context.value)

    def stream(self, index):
        """A new stream of a device."""
        self.enter(index)
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value

    def occupy(self, stream):
        """Has a stream be busy until `vacate`: what is enqueued there comes behind."""
        self._call("emulatorOccupy", ctypes.c_void_p(stream))

    def vacate(self, stream):
        self._call("emulatorVacate", ctypes.c_void_p(stream))

    def begin_capture(self, stream, mode=2):
        # Relaxed: code is loaded when its first launch is recorded. 0 is PyTorch's own mode, in
        # which whatever may wait for the device spoils the capture.
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), mode)

    @contextlib.contextmanager
    def _relaxed(self):
        """Lets memory be made and freed beside a capture, as PyTorch's allocator does."""
        mode = ctypes.c_int(2)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def end_capture(self, stream):
        graph = ctypes.c_void_p()
        status = self._library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        return (graph if status == 0 else None), status

    def run(self, graph, stream):
        self.launch(self.instance(graph), stream)

    def instance(self, graph):
        executable = ctypes.c_void_p()
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        return executable

    def launch(self, executable, stream):
        self._call("cuGraphLaunch", executable, ctypes.c_void_p(stream))
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def memory(self, index, len_bytes):
        """A buffer of device memory, freed with the last tensor in it."""
        before = self.current()
        self.enter(index)
        address = ctypes.c_uint64()
        with self._relaxed():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len_bytes))
        if before is not None:
            self.enter(before)
        buffer = (ctypes.c_char * len_bytes).from_address(address.value)
        self.allocated[address.value] = index, len_bytes
        weakref.finalize(buffer, self._free, address.value, index).atexit = False
        return buffer

    def lent(self, index, lending):
        """Bytes of a device that others have allocated and lend, as PyTorch takes them over."""
        address, (len_bytes,) = lending["data"][0], lending["shape"]
        buffer = (ctypes.c_char * len_bytes).from_address(address)
        self.allocated[address] = index, len_bytes
        weakref.finalize(buffer, self.allocated.pop, address, None).atexit = False
        return buffer

    def _free(self, address, index):
        before = self.current()
        self.enter(index)
        del self.allocated[address]
        with self._relaxed():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))
        if before is not None:
            self.enter(before)

    def device_of(self, tensor):
        """The number of the device in whose memory a tensor lies; ``None`` for the CPU's."""
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return None
        found = self.allocated.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found[0]


class OnDevice(torch.Tensor):
    """A tensor that says to be on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _index = 0

    @property
    def device(self):
        return torch.device("cuda", self._index)

    @property
    def is_cuda(self):
        return True

    def __deepcopy__(self, memo):
        made = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made


class OnOther(OnDevice):
    _index = 1


class OnThird(OnDevice):
    _index = 2


class OnFourth(OnDevice):
    _index = 3


KINDS = [OnDevice, OnOther, OnThird, OnFourth]

# Functions that bring numbers of a tensor to the host.
WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


def _index_of(device):
    """The number of a CUDA device that an argument names, ``"cpu"`` or ``None``."""
    if isinstance(device, (str, torch.device)):
        try:
            device = torch.device(device)
        except RuntimeError:
            return None
        if device.type == "cuda":
            return device.index or 0
        return "cpu" if device.type == "cpu" else None
    return None


class Emulated(TorchFunctionMode):
    """Has PyTorch's functions make tensors in device memory where they would make CUDA tensors."""

    refuses_waits = False

    def __init__(self, driver):
        super().__init__()
        self.driver = driver

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            # Hooks of it make tensors, too, so the engine is called in the mode.
            with self:
                roots, starts = (args[0],), (torch.ones(()),)
                return torch.autograd.Variable._execution_engine.run_backward(
                    roots, starts, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            index = _index_of(kwargs["device"])
            buffer = self.driver.lent(index, args[0].__cuda_array_interface__)
            buffer.owner = args[0]
            return torch.frombuffer(buffer, dtype=torch.uint8).as_subclass(KINDS[index])
        named = [_index_of(one) for one in (*args, kwargs.get("device"))]
        named = next((one for one in named if one is not None), None)
        if named not in (None, "cpu"):
            args = tuple("cpu" if isinstance(_index_of(one), int) else one for one in args)
            if "device" in kwargs:
                kwargs["device"] = "cpu"
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, OnDevice)]
        if self.refuses_waits and given and getattr(func, "__name__", "") in WAITS:
            raise AssertionError(f"{func.__name__} of a tensor on cuda:{given[0]._index}")
        out = func(*args, **kwargs)
        if named == "cpu" or getattr(func, "__name__", "") in ("cpu", "numpy"):
            return tree_map(self._to_host, out)
        index = given[0]._index if named is None and given else named
        if getattr(func, "__name__", "") == "__get__":
            # A property makes no tensor.
            index = None
        index = self._index_of_parts(args) if index is None else index
        return tree_map(lambda one: self.place(one, index), out)

    def _index_of_parts(self, args):
        """The device of the parts of DTensors among the arguments, if they are on one."""
        parts = (one._local_tensor for one in tree_flatten(args)[0] if is_sharded(one))
        return next((own._index for own in parts if isinstance(own, OnDevice)), None)

    def _to_host(self, tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        plain = tensor.as_subclass(torch.Tensor)
        return plain.clone() if self.driver.device_of(plain) is not None else plain

    def place(self, tensor, index):
        """A result where its device is: a view where its memory is, or a copy in new memory."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return tensor
        if is_sharded(tensor) and not isinstance(tensor._local_tensor, OnDevice):
            tensor._local_tensor = self.place(tensor._local_tensor, index)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, *KINDS):
            return tensor
        own = self.driver.device_of(tensor)
        if own is not None:
            return tensor if isinstance(tensor, OnDevice) else tensor.as_subclass(KINDS[own])
        # What autograd follows stays where it is; a copy would be no part of its graph.
        stays = index is None or tensor.grad_fn is not None
        return tensor if stays else self.new(tensor, index)

    def new(self, tensor, index):
        """A copy of a tensor in new memory of a device, in the same order of elements."""
        with torch.no_grad():
            plain = tensor.detach().as_subclass(torch.Tensor)
            storage = plain.untyped_storage().nbytes()
            if storage == 0:
                made = plain.clone()
            else:
                buffer = self.driver.memory(index, storage)
                whole = torch.frombuffer(buffer, dtype=torch.uint8)
                made = torch.empty(0, dtype=plain.dtype).set_(
                    whole.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
                )
                made.copy_(plain)
        made = made.as_subclass(KINDS[index])
        return made.requires_grad_() if tensor.requires_grad else made


class Device:
    """The emulated devices inside of :func:`emulated`."""

    def __init__(self, mode):
        self._mode = mode
        self.driver = mode.driver
        # The stream of each device that the program works on, and its number in PyTorch.
        self.streams = {}
        # Whether PyTorch records a graph.
        self.is_recording = False
        # Whether a number of a tensor there may come to the host.
        mode.refuses_waits = False

    def current_stream(self, index=None):
        index = getattr(index, "index", index) or 0
        handle, number = self.streams.get(index, (0, 0))
        return types.SimpleNamespace(cuda_stream=handle, stream_id=number)

    @contextlib.contextmanager
    def recording(self, index=0):
        """Records what is enqueued inside, as `torch.cuda.graph` does, on a stream of its own and in
        its mode; the object has `replay` afterwards."""
        made = types.SimpleNamespace(replay=None)
        before = self.streams.get(index)
        stream = self.driver.stream(index)
        self.streams[index], self.is_recording = (stream, 1), True
        self.driver.begin_capture(stream, 0)
        try:
            yield made
        finally:
            graph, status = self.driver.end_capture(stream)
            self.is_recording = False
            self.streams[index] = before or (0, 0)
        assert status == 0, status
        executable = self.driver.instance(graph)
        made.replay = lambda: self.driver.launch(executable, stream)

    def graph(self, work):
        """Records ``work``; returns what replays it."""
        with self.recording() as made:
            work()
        return made.replay

    @contextlib.contextmanager
    def without_waits(self):
        """Refuses whatever brings a number of the device to the host, which would wait for it."""
        self._mode.refuses_waits = True
        try:
            yield
        finally:
            self._mode.refuses_waits = False

    def copy(self, tensor, index=0):
        """A tensor of the CPU as one of the device; a parameter stays one."""
        if is_sharded(tensor):
            # The mesh is the CPU's, as PyTorch takes the parts for tensors there.
            part = self._mode.new(tensor._local_tensor.detach(), index)
            made = type(tensor.detach())(part, tensor._spec, requires_grad=False)
        else:
            made = self._mode.new(tensor.detach(), index)
        return torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made


DRIVER = None


@contextlib.contextmanager
def emulated(file=torch._C.__file__):
    """CUDA devices on the emulated driver, looked at through PyTorch's interface in ``file``."""
    global DRIVER
    DRIVER = DRIVER or Driver()
    mode = Emulated(DRIVER)
    device = Device(mode)
    before = torch.cuda.current_stream, torch.cuda.is_current_stream_capturing
    kept = {name: getattr(_device.CudaLibrary, name) for name in ("kind", "kind_index", "file")}
    torch.cuda.current_stream = device.current_stream
    torch.cuda.is_current_stream_capturing = lambda: device.is_recording
    # What stands in for gradients that are gone is a tensor of the parameter's device.
    make = torch.Tensor._make_wrapper_subclass
    torch.Tensor._make_wrapper_subclass = staticmethod(
        lambda cls, shape, **kwargs: make(cls, shape, **{**kwargs, "device": "cpu"})
    )
    # To PyTorch they are tensors of the CPU.
    _device.CudaLibrary.kind, _device.CudaLibrary.kind_index = "cpu", None
    _device.CudaLibrary.file = file
    try:
        with mode:
            yield device
    finally:
        torch.cuda.current_stream, torch.cuda.is_current_stream_capturing = before
        torch.Tensor._make_wrapper_subclass = make
        for name, value in kept.items():
            setattr(_device.CudaLibrary, name, value)
