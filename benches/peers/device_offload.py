#!/usr/bin/env python3
"""Proves `fusestep.offload.Offload` on a CUDA device, and times whole iterations beside others' offload.

Bits: a small model of bf16 trains with its optimizer on the host and a copy of it with master weights on the device;
after every step parameters have the same bits, with and without clipping, micro-steps and a loss scale.
Times: iterations of a transformer in bf16, forward, backward, step and the wait for new parameters, in turns: `Offload`
with `CPUAdam`; torchao's `CPUOffloadOptimizer` around PyTorch's fused AdamW; DeepSpeed's `DeepSpeedCPUAdam`, and
PyTorch's fused AdamW, between plain copies of all gradients and parameters; and no optimizer at all, which is the floor.
Memory is the peak of PyTorch's allocator on the device. What is not installed is left out by name.
Needs torch with a CUDA device, and `fusestep`; `--device cpu` tries the script without one. Where one is missing, it says
so and ends with status 3.
"""
import argparse
import copy
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cuda")

NOT_RUN = 3
STEPS = 4


class Failed(Exception):
    """A difference that must not be there."""


def small(torch, device):
    """A model of odd sizes in bf16."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(33, 130), torch.nn.GELU(), torch.nn.Linear(130, 65), torch.nn.GELU(), torch.nn.Linear(65, 7)]
    return torch.nn.Sequential(*layers).to(device, torch.bfloat16)


def transformer(torch, arguments):
    """Layers of a decoder without its embeddings: what an optimizer's time is measured on."""
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(
        arguments.width, 16, 4 * arguments.width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)
    return model.to(arguments.device, torch.bfloat16)


def bits(torch, fusestep, arguments, report):
    """Steps with the optimizer on the host beside steps with masters on the device, from the same gradients."""
    from fusestep.offload import CPUAdam, Offload

    for name, settings, micro_steps in (
        ("plain", {}, 1),
        ("micro-steps", {}, 3),
        ("clipped", {"max_norm": 0.5}, 1),
        ("loss scale", {"loss_scale": 1024.0}, 1),
    ):
        ours = small(torch, arguments.device)
        other = copy.deepcopy(ours)
        offload = Offload(ours, CPUAdam(ours.parameters(), lr=1e-2, weight_decay=0.1), **settings)
        scale = settings.get("loss_scale")
        beside = fusestep.torch.AdamW(
            other.parameters(), lr=1e-2, weight_decay=0.1, precision="master", clip_norm=settings.get("max_norm"), loss_scale=scale
        )
        try:
            for step in range(STEPS):
                for micro_step in range(micro_steps):
                    generator = torch.Generator().manual_seed(100 * step + micro_step)
                    given = torch.randn((5, 33), generator=generator).to(arguments.device, torch.bfloat16)
                    factor = scale or 1.0
                    if micro_step + 1 < micro_steps:
                        with offload.no_sync():
                            (ours(given).float().square().mean() * factor).backward()
                    else:
                        (ours(given).float().square().mean() * factor).backward()
                    (other(given).float().square().mean() * factor).backward()
                offload.step()
                offload.zero_grad()
                beside.step()
                beside.zero_grad()
                offload.wait()
                for (named, own), its in zip(ours.named_parameters(), other.parameters()):
                    if not torch.equal(own.detach(), its.detach()):
                        raise Failed(f"{name}, step {step}: `{named}` has other bits than with masters on the device")
            report["bits"].append(name)
        except Failed as error:
            report["failed"].append(str(error))


def copied(torch, model, kind):
    """A step on the host between plain copies of all gradients and parameters, as a program of a few lines does it."""
    params = list(model.parameters())
    pinned = params[0].device.type == "cuda"
    masters = [torch.nn.Parameter(param.detach().float().cpu()) for param in params]
    grads = [torch.empty(param.shape, dtype=param.dtype, pin_memory=pinned) for param in params]
    optimizer = kind(masters)

    def step():
        for param, grad in zip(params, grads):
            grad.copy_(param.grad, non_blocking=True)
            param.grad = None
        if pinned:
            torch.cuda.synchronize()
        for master, grad in zip(masters, grads):
            master.grad = grad.float()
        optimizer.step()
        for param, master in zip(params, masters):
            param.data.copy_(master.detach().to(param.dtype), non_blocking=True)

    return step


def contenders(torch):
    """What steps a model: name, and a function of the model that makes a step."""

    def ours(model):
        from fusestep.offload import CPUAdam, Offload

        offload = Offload(model, CPUAdam(model.parameters()))

        def step():
            offload.step()
            offload.zero_grad()

        step.keeps = offload
        return step

    def torchao(model):
        from torchao.optim import CPUOffloadOptimizer

        optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True)

        def step():
            optimizer.step()
            optimizer.zero_grad()

        return step

    def deepspeed(model):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return copied(torch, model, DeepSpeedCPUAdam)

    def fused(model):
        return copied(torch, model, lambda masters: torch.optim.AdamW(masters, fused=True))

    def nothing(model):
        def step():
            for param in model.parameters():
                param.grad = None

        return step

    return {
        "Offload": ours,
        "torchao CPUOffloadOptimizer": torchao,
        "DeepSpeedCPUAdam between copies": deepspeed,
        "torch fused between copies": fused,
        "no optimizer": nothing,
    }


def times(torch, arguments, report, until):
    """Whole iterations, in turns."""
    is_card = arguments.device != "cpu"
    wait = torch.cuda.synchronize if is_card else lambda: None
    given = torch.randn((arguments.batch, arguments.context, arguments.width), device=arguments.device).bfloat16()
    running = {}
    for name, make in contenders(torch).items():
        if time.monotonic() > until:
            report["left_out"].append(f"{name}: no time was left")
            continue
        try:
            if is_card:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if is_card else 0
            model = transformer(torch, arguments)

            def iteration(model=model, step=make(model)):
                model(given).float().square().mean().backward()
                step()

            for _ in range(2):
                iteration()
            wait()
            peak = torch.cuda.max_memory_allocated() - before if is_card else 0
            running[name] = (iteration, peak, [])
        except Exception as error:  # whatever another package raises where it is not whole
            report["left_out"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    for _ in range(arguments.rounds):
        if time.monotonic() > until:
            break
        for iteration, _, found in running.values():
            wait()
            start = time.perf_counter()
            iteration()
            # The next forward pass waits for parameters on their way, and so do the clocks.
            wait()
            found.append(1e3 * (time.perf_counter() - start))
    elements = sum(param.numel() for param in transformer(torch, arguments).parameters())
    for name, (_, peak, found) in running.items():
        if found:
            report["times"].append(
                {"what": name, "elements": elements, "ms": statistics.median(found), "least": min(found), "peak_bytes": peak}
            )


def table(report):
    """The report as a page."""
    lines = [f"offload on {report['device']}: torch {report['torch']}, fusestep {report['fusestep']}"]
    lines.append(f"bits as with masters on the device: {', '.join(report['bits']) or 'none'}")
    if report["times"]:
        elements = report["times"][0]["elements"]
        lines += ["", f"| {elements:,} elements in bf16 | ms an iteration | least | peak MiB |", "|---|---:|---:|---:|"]
        for row in report["times"]:
            lines.append(f"| {row['what']} | {row['ms']:.1f} | {row['least']:.1f} | {row['peak_bytes'] / 2**20:.0f} |")
    lines += [f"left out: {text}" for text in report["left_out"]]
    lines += [f"FAILED: {text}" for text in report["failed"]]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=120, help="nothing is begun behind this")
    parser.add_argument("--json", help="where the report goes")
    parser.add_argument("--table", help="where the table goes")
    arguments = parser.parse_args()
    try:
        import torch

        if arguments.device == "cuda" and not torch.cuda.is_available():
            print(f"not run: torch {torch.__version__} finds no CUDA device")
            return NOT_RUN
        import fusestep.offload
        import fusestep.torch
    except ImportError as error:
        print(f"not run: {error}")
        return NOT_RUN
    begun = time.monotonic()
    named = torch.cuda.get_device_name(0) if arguments.device == "cuda" else "the CPU as device"
    report = {"device": named, "torch": torch.__version__, "fusestep": fusestep.__version__,
              "bits": [], "times": [], "left_out": [], "failed": []}
    bits(torch, fusestep, arguments, report)
    times(torch, arguments, report, begun + arguments.seconds * 0.8)
    text = table(report)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.table:
        pathlib.Path(arguments.table).write_text(text)
    print(text, end="")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
