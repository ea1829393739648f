"""PyTorch's optimizers on CPU and CUDA tensors, in one pass over memory.

Change ``torch.optim.AdamW`` to ``fusestep.torch.AdamW`` and nothing else: parameter groups,
closures, hooks, schedulers, pickling and state dicts are PyTorch's own, because the classes derive
from PyTorch's. A step updates tensors in place where PyTorch keeps them, all of them in one
hand-over to the threads, without the interpreter's lock, and with the same bits on any number of
threads (``torch.set_num_threads``) and on CUDA devices.
"""

from fusestep._report import Report
from fusestep.torch._backward import FusedBackward, fuse_backward
from fusestep.torch._own import Lamb, Lars, Lion, ScheduleFreeAdamW
from fusestep.torch._pytorch import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, RMSprop
from fusestep.torch._ranks import DataParallel
from fusestep.torch._signatures import sign

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "DataParallel",
    "FusedBackward",
    "Lamb",
    "Lars",
    "Lion",
    "NAdam",
    "RMSprop",
    "Report",
    "ScheduleFreeAdamW",
    "fuse_backward",
]

# Pickles and messages name the classes where users find them.
for _name in __all__:
    if _name != "Report":
        globals()[_name].__module__ = __name__
        sign(globals()[_name])
del _name, sign
