"""The optimizer on the host for models on a device.

:class:`CPUAdam` takes the place of DeepSpeed's ``DeepSpeedCPUAdam``. :func:`step` is one step over
lists: masters, gradients, state and copies of 16 bits for the device. :class:`Offload` does the
whole for a model of PyTorch: gradients come to the host while backward goes on, and the new
parameters are back before the next forward pass.
"""

from fusestep.offload._cpu_adam import CPUAdam
from fusestep.offload._model import Offload
from fusestep.offload._step import NewState, Stepped, grad_norm, new_state, step

__all__ = ["CPUAdam", "NewState", "Offload", "Stepped", "grad_norm", "new_state", "step"]

# Pickles and messages name what is here where users find it.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
