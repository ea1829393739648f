#!/usr/bin/env python3
"""Proves `fusestep.torch` on a CUDA device: the bits of the CPU, then times beside PyTorch's own steps.

Bits: every class in every dtype, precisions, clipping, loss scales, GradScaler, replays of a recorded step, micro-steps,
updates in backward, side streams, and several devices where there are several. Each compares parameters and state with
the same class on the CPU, from the same gradients; one differing bit fails.
Times: AdamW on GPT-2 small, ResNet-50, a LoRA of 192 tensors and 1,000 small ones, beside `torch.optim.AdamW` with
fused=True and foreach=True, each also behind `clip_grad_norm_`. Contenders take turns; medians of rounds of device events
and of the host's clock. Memory is the peak of PyTorch's allocator during a step and what the device has less of.
Needs torch with a CUDA device, and `fusestep` with its module for CUDA. Where one is missing, the script says so and ends
with status 3.
"""
import argparse
import copy
import json
import pathlib
import statistics
import sys
import time

NOT_RUN = 3
SEED = 7
SHAPES = [(3, 4), (7,), (), (0, 5), (31,), (32,), (33,), (130, 70), (1, 1, 65), (70_000,)]
RULES = ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "Lion", "Lars", "Lamb", "ScheduleFreeAdamW"]
DTYPES = ["float32", "float64", "bfloat16", "float16"]
PRECISIONS = ["pytorch", "stochastic", "wide", "remainder", "master"]
SETS = ["lora", "gpt2", "resnet50", "1000x1024"]


class Failed(Exception):
    """A difference that must not be there."""


def parameters(torch, dtype, device, shapes=SHAPES):
    """The same values on every device."""
    generator = torch.Generator().manual_seed(SEED)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype).to(device)) for value in values]


def give(torch, both, step, scale=1.0, all_of_them=False):
    """The same gradients to both lists; every fifth parameter has none, unless all have."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, (one, other) in enumerate(zip(*both)):
        value = (torch.randn(one.shape, generator=generator, dtype=torch.float64) * scale).to(one.dtype)
        gone = (step + index) % 5 == 4 and not all_of_them
        one.grad = None if gone else value
        other.grad = None if gone else value.to(other.device)


def same(torch, what, both, optimizers):
    """Fails unless parameters and state have the same bits."""
    for index, (one, other) in enumerate(zip(*both)):
        if not torch.equal(one.detach(), other.detach().cpu()):
            raise Failed(f"{what}: parameter {index} has other bits than on the CPU")
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, own in states[0].items():
        for name, value in own.items():
            found = states[1].get(index, {}).get(name)
            if torch.is_tensor(value) and not (torch.is_tensor(found) and torch.equal(value, found.cpu())):
                raise Failed(f"{what}: {name} of parameter {index} has other bits than on the CPU")


def compare(torch, kind, what, dtype, steps=4, place="cuda:0", scale=1.0, around=None, **settings):
    """Steps on the CPU and on the device, which have to end in the same bits."""
    both = parameters(torch, dtype, "cpu"), parameters(torch, dtype, place)
    optimizers = [kind(params, **settings) for params in both]
    for step in range(steps):
        give(torch, both, step, scale)
        for optimizer in optimizers:
            if around is None:
                optimizer.step()
            else:
                around(step, optimizer)
    same(torch, what, both, optimizers)
    return both, optimizers


def rules(torch, fusestep):
    for name in RULES:
        for dtype in DTYPES:
            settings = {"lr": 1e-2, **({"momentum": 0.9} if name == "SGD" else {})}
            compare(torch, getattr(fusestep, name), f"{name} in {dtype}", getattr(torch, dtype), **settings)


def precisions(torch, fusestep):
    for precision in PRECISIONS:
        compare(torch, fusestep.AdamW, f"precision {precision}", torch.bfloat16, lr=1e-2, precision=precision)
    compare(torch, fusestep.AdamW, "masters of float16", torch.float16, lr=1e-2, master_weights=True)


def norms(torch, fusestep):
    for name in ("AdamW", "SGD", "Lars", "Lamb"):
        kind = getattr(fusestep, name)
        _, (a, b) = compare(torch, kind, f"{name}, clipped", torch.float32, lr=1e-2, clip_norm=0.5)
        if a.report().grad_norm != b.report().grad_norm:
            raise Failed(f"{name}: norm {b.report().grad_norm}, on the CPU {a.report().grad_norm}")
    compare(torch, fusestep.AdamW, "loss scale", torch.float16, lr=1e-2, loss_scale=64.0, scale=64.0)


def skips(torch, fusestep):
    both = parameters(torch, torch.float32, "cpu"), parameters(torch, torch.float32, "cuda:0")
    optimizers = [fusestep.AdamW(params, lr=1e-2, loss_scale="dynamic:start=1024") for params in both]
    for step in range(5):
        give(torch, both, step, 16.0, all_of_them=True)
        if step == 2:
            for params in both:
                params[0].grad[1, 2] = float("inf")
        for optimizer in optimizers:
            optimizer.step()
        if [o.report().skipped for o in optimizers] != [step == 2] * 2:
            raise Failed(f"a dynamic loss scale: step {step} was {'not ' * (step == 2)}skipped")
    same(torch, "a dynamic loss scale", both, optimizers)


def scaler(torch, fusestep):
    both = parameters(torch, torch.float32, "cpu"), parameters(torch, torch.float32, "cuda:0")
    optimizers = [fusestep.AdamW(params, lr=1e-2) for params in both]
    scalers = [torch.amp.GradScaler(place, init_scale=8.0, growth_interval=2) for place in ("cpu", "cuda")]
    for step in range(5):
        give(torch, both, step, 8.0, all_of_them=True)
        for optimizer, own, params in zip(optimizers, scalers, both):
            own.scale(torch.ones((), device=params[0].device))
            if step == 2:
                params[0].grad[1, 2] = float("nan")
            # Behind the first step, which makes state, nothing waits for a number of the device.
            if step > 0 and params is both[1]:
                torch.cuda.set_sync_debug_mode("error")
            try:
                own.step(optimizer)
                own.update()
            finally:
                if params is both[1]:
                    torch.cuda.set_sync_debug_mode("default")
    same(torch, "GradScaler", both, optimizers)


def replays(torch, fusestep):
    """Steps that a graph records, whose replays are as many steps at rates that change."""
    for settings in ({}, {"clip_norm": 0.5}, {"loss_scale": "dynamic:start=8"}):
        what = f"replays with {settings}"
        both = parameters(torch, torch.float32, "cpu"), parameters(torch, torch.float32, "cuda:0")
        rate = torch.full((), 1e-2, dtype=torch.float64, device="cuda:0")
        own = {"lr": 1e-2, **settings}
        optimizers = [fusestep.AdamW(both[0], **own), fusestep.AdamW(both[1], **{**own, "lr": rate}, capturable=True)]
        for step in range(3):
            give(torch, both, step, all_of_them=True)
            for optimizer in optimizers if step < 2 else ():
                optimizer.step()
        kept, graph = [param.grad for param in both[1]], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizers[1].step()
        for step in range(2, 8):
            give(torch, both, step, all_of_them=True)
            for param, gradient in zip(both[1], kept):
                gradient.copy_(param.grad)
            if step == 4:
                both[0][0].grad[1, 2] = float("inf") if settings else 1.0
                kept[0][1, 2] = float("inf") if settings else 1.0
            rate.fill_(0.1 / step)
            optimizers[0].param_groups[0]["lr"] = 0.1 / step
            optimizers[0].step()
            graph.replay()
        same(torch, what, both, optimizers)
        if optimizers[1].report().step != optimizers[0].report().step:
            raise Failed(f"{what}: {optimizers[1].report().step} steps, on the CPU {optimizers[0].report().step}")


def micro_steps(torch, fusestep):
    for dtype in (torch.float32, torch.bfloat16):
        compare(torch, fusestep.AdamW, f"micro-steps in {dtype}", dtype, steps=6, lr=1e-2, accumulate=3)


def streams(torch, fusestep):
    side = [torch.cuda.Stream() for _ in range(2)]

    def around(step, optimizer):
        torch.cuda.synchronize()
        with torch.cuda.stream(side[step % 2] if step else torch.cuda.current_stream()):
            optimizer.step()
        torch.cuda.synchronize()

    compare(torch, fusestep.AdamW, "side streams", torch.float32, around=around, lr=1e-2, clip_norm=1.0)


def backward(torch, fusestep):
    """Updates in backward beside steps behind it, both on the device."""
    torch.manual_seed(SEED)
    one = torch.nn.Sequential(*[torch.nn.Linear(65, 65) for _ in range(6)]).to("cuda:0")
    models = one, copy.deepcopy(one)
    optimizers = [fusestep.AdamW(model.parameters(), lr=1e-2) for model in models]
    fusestep.fuse_backward(models[1], optimizers[1])
    for step in range(4):
        data = torch.randn(8, 65, device="cuda:0")
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models)):
        if not torch.equal(one, other):
            raise Failed("updates in backward: other bits than those of a step behind it")


def devices(torch, fusestep):
    """Parameters by turns on the CPU and all devices."""
    places = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    ours = parameters(torch, torch.float32, "cpu")
    others = [
        torch.nn.Parameter(param.detach().to(places[index % len(places)], copy=True)) for index, param in enumerate(ours)
    ]
    optimizers = [fusestep.AdamW(params, lr=1e-2, clip_norm=0.5) for params in (ours, others)]
    before = torch.cuda.current_device()
    for step in range(4):
        give(torch, (ours, others), step)
        for optimizer in optimizers:
            optimizer.step()
    if torch.cuda.current_device() != before:
        raise Failed(f"several devices: the thread's device was {before}, found {torch.cuda.current_device()}")
    same(torch, "several devices", (ours, others), optimizers)


BITS = [rules, precisions, norms, skips, scaler, replays, micro_steps, streams, backward, devices]


def bits(torch, fusestep, parts, report, deadline):
    """Runs every proof, and notes what failed."""
    for proof in parts:
        if time.monotonic() > deadline:
            report["left_out"].append(f"bits: {proof.__name__}, for want of time")
            continue
        begun = time.monotonic()
        try:
            proof(torch, fusestep)
            report["bits"].append({"proof": proof.__name__, "seconds": round(time.monotonic() - begun, 2)})
        except Failed as failure:
            report["failed"].append(str(failure))
        except Exception as error:
            report["failed"].append(f"{proof.__name__}: {type(error).__name__}: {error}")


def shapes_of(name, folder, scale):
    if name == "lora":
        # Two low-rank matrices at four places of 24 layers of width 1,024.
        return [shape for _ in range(96) for shape in ((16, 1024), (1024, 16))]
    if name == "1000x1024":
        return [(1024,)] * 1000
    listed = json.loads((folder / f"{name}.json").read_text())
    return [(*one["shape"][:-1], max(1, one["shape"][-1] // scale)) for one in listed]


def contenders(torch, fusestep, params):
    """Steps by name, each of its own copies of the parameters."""

    def fresh():
        own = [torch.nn.Parameter(param.detach().clone()) for param in params]
        for param in own:
            param.grad = torch.randn_like(param) * 1e-2
        return own

    def plain(make):
        own = fresh()
        return make(own).step

    def clipped(make):
        own = fresh()
        optimizer = make(own)

        def step():
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()

        return step

    adamw = torch.optim.AdamW
    return {
        "fusestep": lambda: plain(lambda own: fusestep.AdamW(own, lr=1e-3)),
        "torch fused": lambda: plain(lambda own: adamw(own, lr=1e-3, fused=True)),
        "torch foreach": lambda: plain(lambda own: adamw(own, lr=1e-3, foreach=True)),
        "fusestep, clip_norm": lambda: plain(lambda own: fusestep.AdamW(own, lr=1e-3, clip_norm=1.0)),
        "torch fused, clip_grad_norm_": lambda: clipped(lambda own: adamw(own, lr=1e-3, fused=True)),
        "torch foreach, clip_grad_norm_": lambda: clipped(lambda own: adamw(own, lr=1e-3, foreach=True)),
    }


def timed(torch, step, steps):
    """Device and wall microseconds of one of `steps` steps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / steps, (time.perf_counter() - begun) * 1e6 / steps


def memory_of(torch, make):
    """Bytes of state, of a step's peak above it, and what the device has less of; and the step."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    free, own = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    step = make()
    step()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, {
        "kept_bytes": kept - own,
        "step_bytes": torch.cuda.max_memory_allocated() - kept,
        "device_bytes": free - torch.cuda.mem_get_info()[0],
    }


def times(torch, fusestep, arguments, report, deadline):
    """Contenders in turns, on each set."""
    for name in arguments.sets:
        if time.monotonic() > deadline:
            report["left_out"].append(f"times of {name}, for want of time")
            continue
        shapes = shapes_of(name, arguments.shapes, arguments.scale)
        torch.manual_seed(SEED)
        params = [torch.randn(shape, device="cuda:0") for shape in shapes]
        steps, taken = {}, {}
        for contender, make in contenders(torch, fusestep, params).items():
            steps[contender], taken[contender] = memory_of(torch, make)
        counts = {}
        for contender, step in steps.items():
            _, wall = timed(torch, step, 3)
            counts[contender] = max(3, min(100, int(5e3 / max(wall, 1))))
        rounds = {contender: [] for contender in steps}
        for _ in range(arguments.rounds):
            for contender, step in steps.items():
                rounds[contender].append(timed(torch, step, counts[contender]))
        for contender, own in rounds.items():
            report["times"].append({
                "set": name, "contender": contender, "tensors": len(shapes), "elements": sum(p.numel() for p in params),
                "device_us": statistics.median(one[0] for one in own), "wall_us": statistics.median(one[1] for one in own),
                **taken[contender],
            })
        del steps, params
        torch.cuda.empty_cache()


def table(report):
    lines = [f"fusestep.torch on {report['device']}, torch {report['torch']}, seed {SEED}", "",
             "| bits of the CPU | s |", "|---|---:|"]
    lines += [f"| {one['proof']} | {one['seconds']} |" for one in report["bits"]]
    lines += ["", "| set | contender | device µs | wall µs | kept MB | step MB |", "|---|---|---:|---:|---:|---:|"]
    for one in report["times"]:
        lines.append(f"| {one['set']} | {one['contender']} | {one['device_us']:.1f} | {one['wall_us']:.1f} | "
                     f"{one['kept_bytes'] / 1e6:.1f} | {one['step_bytes'] / 1e6:.1f} |")
    lines += [f"\nleft out: {what}" for what in report["left_out"]] + [f"\nfailed: {what}" for what in report["failed"]]
    return "\n".join(lines) + "\n"


def main():
    here = pathlib.Path(__file__).resolve().parent
    beside = here / "shapes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=lambda text: text.split(","), default=SETS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--scale", type=int, default=1, help="divides the last extents of models")
    parser.add_argument("--seconds", type=float, default=240, help="nothing is begun behind this")
    parser.add_argument("--shapes", type=pathlib.Path, default=beside if beside.is_dir() else here.parents[1] / "data/shapes")
    parser.add_argument("--json", help="where the report goes")
    parser.add_argument("--table", help="where the table goes")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"not run: {error}")
        return NOT_RUN
    if not torch.cuda.is_available():
        print(f"not run: torch {torch.__version__} finds no CUDA device")
        return NOT_RUN
    try:
        import fusestep._cuda
        import fusestep.torch
    except ImportError as error:
        print(f"not run: {error}")
        return NOT_RUN
    begun = time.monotonic()
    report = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "fusestep": fusestep.__version__,
              "bits": [], "times": [], "left_out": [], "failed": []}
    bits(torch, fusestep.torch, BITS, report, begun + arguments.seconds / 2)
    times(torch, fusestep.torch, arguments, report, begun + arguments.seconds * 0.8)
    text = table(report)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.table:
        pathlib.Path(arguments.table).write_text(text)
    print(text, end="")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
