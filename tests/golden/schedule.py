"""Writes schedule.safetensors: learning rates of torch.optim.lr_scheduler, step by step.

common.py says how, but this is of torch 2.15.0. A case's settings are its schedule as fusestep writes it and the base rate. Tensors,
all f64:

    <case>.chained    the rate of update 0 ..= STEPS as the scheduler's own steps have it
    <case>.closed     the same by the class's closed form, where it has one and stands alone
"""

import warnings

import numpy
import safetensors
import torch
from common import versions, write
from torch.optim import lr_scheduler as torch_schedulers

STEPS = 1000


def sequential(*parts):
    def make(optimizer):
        schedulers = [part(optimizer) for part, _ in parts]
        milestones, at = [], 0
        for _, steps in parts[:-1]:
            at += steps
            milestones.append(at)
        return torch_schedulers.SequentialLR(optimizer, schedulers, milestones)

    return make


def of(name, **settings):
    return lambda optimizer: getattr(torch_schedulers, name)(optimizer, **settings)


def warmup(steps):
    return of("LinearLR", start_factor=1 / (steps + 1), end_factor=1.0, total_iters=steps)


CASES = {
    "constant": ("constant:400:0.3,constant", 0.1, of("ConstantLR", factor=0.3, total_iters=400)),
    "linear": ("linear:400:0.25:1", 0.1, of("LinearLR", start_factor=0.25, end_factor=1.0, total_iters=400)),
    "fall": ("linear:700:1:0.125", 3e-4, of("LinearLR", start_factor=1.0, end_factor=0.125, total_iters=700)),
    "warmup": ("warmup:100", 0.3, warmup(100)),
    "cosine": ("cosine:1000", 1e-3, of("CosineAnnealingLR", T_max=STEPS)),
    "cosine_floor": ("cosine:1000:0.1", 1e-3, of("CosineAnnealingLR", T_max=STEPS, eta_min=1e-4)),
    "step": ("step:30:0.7", 0.5, of("StepLR", step_size=30, gamma=0.7)),
    "milestones": ("constant:300,constant:300:0.1,constant:200:0.01,constant::0.001", 0.1, of("MultiStepLR", milestones=[300, 600, 800], gamma=0.1)),
    "exponential": ("step:1:0.99", 0.1, of("ExponentialLR", gamma=0.99)),
    "polynomial": ("polynomial:900:1", 0.1, of("PolynomialLR", total_iters=900, power=1.0)),
    "lars": ("polynomial:1000:2", 9.0, of("PolynomialLR", total_iters=STEPS, power=2.0)),
    "warmup_cosine": ("warmup:100,cosine:900:0.1", 1e-3,
                      sequential((warmup(100), 100), (of("CosineAnnealingLR", T_max=900, eta_min=1e-4), 900))),
    "warmup_lars": ("warmup:150,polynomial:850:2", 10.0,
                    sequential((warmup(150), 150), (of("PolynomialLR", total_iters=850, power=2.0), 850))),
    "three": ("linear:50:0.1:1,constant:450,step:1:0.995", 0.02,
              sequential((of("LinearLR", start_factor=0.1, total_iters=50), 50), (of("ConstantLR", factor=1.0, total_iters=1), 450),
                         (of("ExponentialLR", gamma=0.995), 500))),
}


def main():
    warnings.simplefilter("ignore")
    tensors, cases = {}, {}
    for name, (text, base, make) in CASES.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
        scheduler = make(optimizer)
        chained, closed = [], []
        for _ in range(STEPS + 1):
            chained.append(float(optimizer.param_groups[0]["lr"]))
            if hasattr(scheduler, "_get_closed_form_lr"):
                closed.append(float(scheduler._get_closed_form_lr()[0]))
            optimizer.step()
            scheduler.step()
        tensors[f"{name}.chained"] = numpy.array(chained)
        if closed:
            tensors[f"{name}.closed"] = numpy.array(closed)
        cases[name] = {"schedule": text, "base": base}
    write(__file__, tensors, versions(torch, safetensors), cases)


main()
