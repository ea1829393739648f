"""PyTorch's optimizers on CPU and CUDA tensors, in one pass over memory.

Written by `crates/python/tests/stub.py`.
"""

from typing import Any, Literal, Optional, Sequence, Tuple, Union

import torch
from torch.optim.optimizer import ParamsT

from fusestep._report import Report as Report
from fusestep.torch import _own, _pytorch, _ranks
from fusestep.torch._backward import FusedBackward as FusedBackward
from fusestep.torch._backward import fuse_backward as fuse_backward

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

class SGD(_pytorch.SGD):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.001,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class Adagrad(_pytorch.Adagrad):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.01,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class Adam(_pytorch.Adam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.001,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class Adamax(_pytorch.Adamax):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class AdamW(_pytorch.AdamW):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.001,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class Lamb(_own.Lamb):
    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, torch.Tensor] = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.01,
        *,
        trust_ratio: bool = True,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class Lars(_own.Lars):
    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, torch.Tensor] = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        *,
        trust_ratio: bool = True,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class Lion(_own.Lion):
    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, torch.Tensor] = 0.0001,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class NAdam(_pytorch.NAdam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum_decay: float = 0.004,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class RMSprop(_pytorch.RMSprop):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class ScheduleFreeAdamW(_own.ScheduleFreeAdamW):
    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, torch.Tensor] = 0.0025,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        *,
        precision: Optional[
            Literal["pytorch", "stochastic", "wide", "remainder", "remainder8", "master"]
        ] = None,
        schedule: Optional[str] = None,
        master_weights: Optional[
            Union[bool, Literal["none", "f32", "remainder", "remainder8"]]
        ] = None,
        state_dtype: Optional[Union[torch.dtype, Literal["f32", "bf16", "int8"]]] = None,
        keep_f32: Optional[Union[str, Sequence[str]]] = None,
        rounding: Optional[Literal["nearest", "stochastic"]] = None,
        rounding_seed: Optional[int] = None,
        clip_norm: Optional[float] = None,
        loss_scale: Optional[Union[float, str]] = None,
        update_norms: Optional[bool] = None,
        accumulate: Optional[int] = None,
        accumulated: Optional[Literal["mean", "sum"]] = None,
        argument_bytes: Optional[int] = None,
        tables: Optional[Literal["auto", "arguments", "resident"]] = None,
        naive: Optional[bool] = None,
    ) -> None: ...

class DataParallel(_ranks.DataParallel):
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        engine: Optional[str] = None,
        timeout: float = 60.0,
        figures: Optional[str] = None,
        units: Sequence[type] = (),
        reduced: Optional[Literal["per_update", "per_micro_step"]] = None,
        lanes: Optional[int] = None,
        reduce_dtype: Optional[Union[torch.dtype, Literal["param", "f32", "bf16", "f16"]]] = None,
        zero: Optional[int] = None,
        shard_group: Optional[int] = None,
        owners: Optional[Literal["elements", "tensors"]] = None,
        broadcast_cap_mib: Optional[float] = None,
        bucket_cap_mib: Optional[float] = None,
        comm_streams: Optional[int] = None,
        separate: Optional[bool] = None,
        update_in_backward: Optional[bool] = None,
        local_sgd: Optional[int] = None,
        local_sgd_begin: Optional[int] = None,
        local_sgd_averaged: Optional[Literal["parameters", "parameters_and_state"]] = None,
        local_sgd_interval: Optional[Literal["fixed", "adaptive"]] = None,
        distributed: Optional[Union[str, Sequence[str]]] = None,
        initial: Optional[Literal["rank_0", "own_and_equal"]] = None,
        bucket_mib: Optional[float] = None,
    ) -> None: ...
