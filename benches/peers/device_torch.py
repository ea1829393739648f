#!/usr/bin/env python3
"""Times the update steps of others on a CUDA device, on the sets of benches/device.rs: for the table of one run beside ours.

Contenders: torch.optim.AdamW with fused=True and with foreach=True, LARS written with torch._foreach_*, Adam in Apex's layout
(a table of chunks in the arguments of each launch: 36 tensors and 320 chunks of 65,536 elements at most), FlashAdamW of flashoptim
with state of 8 bits, on parameters in f32 and in bf16 with 8 bits more, and a copy.
Apex's layout is CUDA source below, compiled by nvcc and called through ctypes. Without nvcc it is left out, as flashoptim is where
Python has none; the output says so.

Method: device events, a warm-up, medians of rounds; sets that would fit the cache go round several copies of their tensors.
Needs torch with a CUDA device (written for 2.6 and newer). Where one is missing, the script says so and ends with status 3.
"""
import argparse
import ctypes
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

SEED = 7
# Models first: where time runs out, it is the many small tensors that are left out, each step of which takes others long.
SETS = ["resnet50", "gpt2", "bert_large", "200x1.05M", "10x16.8M", "1000x1024", "10000x64"]
ALIKE = {"10x16.8M": (10, 1 << 24), "200x1.05M": (200, 1 << 20), "10000x64": (10_000, 64), "1000x1024": (1000, 1024)}
CACHES_BETWEEN = 3
MOST_ROTATED = 16
NOT_RUN = 3
FLASH = "flashoptim FlashAdamW"

APEX_SOURCE = r"""
#include <cuda_runtime.h>
// The layout of Apex's multi_tensor_apply for four lists: addresses, sizes and a table of chunks, all in the arguments of a launch.
constexpr int TENSORS = 36, BLOCKS = 320, CHUNK = 65536, ILP = 4, THREADS = 512;
struct Table {
    float* addresses[4][TENSORS];
    int sizes[TENSORS];
    unsigned char block_to_tensor[BLOCKS];
    int block_to_chunk[BLOCKS];
};
struct Scalars { float lr, beta1, beta2, eps, correction1, correction2, decay; };
__global__ void __launch_bounds__(THREADS) adam(Table table, Scalars s) {
    const int tensor = table.block_to_tensor[blockIdx.x], chunk = table.block_to_chunk[blockIdx.x];
    const long long first = (long long)chunk * CHUNK;
    const int n = table.sizes[tensor] - first < CHUNK ? int(table.sizes[tensor] - first) : CHUNK;
    float* g = table.addresses[0][tensor] + first;
    float* p = table.addresses[1][tensor] + first;
    float* m = table.addresses[2][tensor] + first;
    float* v = table.addresses[3][tensor] + first;
    for (int start = 0; start < n; start += THREADS * ILP) {
        float rg[ILP], rp[ILP], rm[ILP], rv[ILP];
#pragma unroll
        for (int i = 0; i < ILP; ++i) {
            const int at = start + threadIdx.x + i * THREADS;
            const bool in = at < n;
            rg[i] = in ? g[at] : 0; rp[i] = in ? p[at] : 0; rm[i] = in ? m[at] : 0; rv[i] = in ? v[at] : 0;
        }
#pragma unroll
        for (int i = 0; i < ILP; ++i) {
            rm[i] = s.beta1 * rm[i] + (1 - s.beta1) * rg[i];
            rv[i] = s.beta2 * rv[i] + (1 - s.beta2) * rg[i] * rg[i];
            const float update = (rm[i] / s.correction1) / (sqrtf(rv[i] / s.correction2) + s.eps) + s.decay * rp[i];
            rp[i] -= s.lr * update;
        }
#pragma unroll
        for (int i = 0; i < ILP; ++i) {
            const int at = start + threadIdx.x + i * THREADS;
            if (at < n) { p[at] = rp[i]; m[at] = rm[i]; v[at] = rv[i]; }
        }
    }
}
// One step over `count` tensors; `lists` holds the addresses of gradients, parameters and both moments, one list behind the other.
extern "C" int apex_adam(int count, const unsigned long long* lists, const int* sizes, int step, void* stream, int* launches) {
    Scalars s{1e-3f, 0.9f, 0.999f, 1e-8f, 1 - powf(0.9f, step), 1 - powf(0.999f, step), 0.01f};
    Table table;
    int tensors = 0, blocks = 0;
    *launches = 0;
    for (int t = 0; t < count; ++t) {
        table.sizes[tensors] = sizes[t];
        for (int list = 0; list < 4; ++list) table.addresses[list][tensors] = (float*)lists[(long long)list * count + t];
        ++tensors;
        const int chunks = (sizes[t] + CHUNK - 1) / CHUNK;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            table.block_to_tensor[blocks] = (unsigned char)(tensors - 1);
            table.block_to_chunk[blocks] = chunk;
            ++blocks;
            const bool last_chunk = chunk == chunks - 1;
            if ((tensors == TENSORS && last_chunk) || blocks == BLOCKS || (t == count - 1 && last_chunk)) {
                adam<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(table, s);
                ++*launches;
                blocks = 0;
                if (last_chunk) {
                    tensors = 0;
                } else {
                    // The tensor goes on in the next launch, as its first.
                    table.sizes[0] = table.sizes[tensors - 1];
                    for (int list = 0; list < 4; ++list) table.addresses[list][0] = table.addresses[list][tensors - 1];
                    tensors = 1;
                }
            }
        }
    }
    return (int)cudaGetLastError();
}
"""


def numels(name, shapes, scale):
    """Element counts of a set's tensors, divided by `scale` and rounded up."""
    up = lambda n: -(-n // scale)
    if name in ALIKE:
        count, numel = ALIKE[name]
        return [up(numel)] * up(count)
    entries = json.loads((pathlib.Path(shapes) / f"{name}.json").read_text())
    return [up(math.prod(entry["shape"])) for entry in entries]


def fresh(torch, sizes, dtype):
    """Parameters with gradients, values between -0.5 and 0.5."""
    params = []
    for numel in sizes:
        param = torch.rand(numel, device="cuda").sub_(0.5).to(getattr(torch, dtype)).requires_grad_()
        param.grad = torch.rand(numel, device="cuda").sub_(0.5).to(param.dtype)
        params.append(param)
    return params


def torch_adamw(torch, kind):
    def make(params):
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **{kind: True}).step
    return make


def foreach_lars(torch):
    """LARS momentum as one would write it with torch._foreach_*: no step waits for the host."""
    lr, momentum, decay, coefficient, eps = 0.1, 0.9, 1e-4, 1e-3, 1e-8

    def make(params):
        grads = [param.grad for param in params]
        values = [param.detach() for param in params]
        velocities = [torch.zeros_like(value) for value in values]

        def step():
            p = torch.stack(torch._foreach_norm(values))
            g = torch.stack(torch._foreach_norm(grads))
            rates = torch.where((p > 0) & (g > 0), lr * coefficient * p / (g + decay * p + eps), lr)
            updates = torch._foreach_add(grads, values, alpha=decay)
            torch._foreach_mul_(updates, list(rates.unbind()))
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, updates)
            torch._foreach_sub_(values, velocities)
        return step
    return make


def flash_adamw(kind):
    """State in codes of 8 bits with a scale of 16 for each 32; of bf16 parameters 8 bits more are kept."""
    def make(params):
        return kind(params, lr=1e-3, weight_decay=0.01).step
    return make


def build_apex(folder, capability):
    """The library with `apex_adam`, or a reason why there is none."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        return None, "nvcc is neither on the PATH nor in /usr/local/cuda/bin"
    source, library = pathlib.Path(folder, "apex.cu"), pathlib.Path(folder, "libapex.so")
    source.write_text(APEX_SOURCE)
    command = [nvcc, "-O3", f"-arch=sm_{capability[0]}{capability[1]}", "--shared", "-Xcompiler", "-fPIC",
               "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return None, "nvcc failed: " + (done.stderr.strip() or "without a word").splitlines()[-1]
        return ctypes.CDLL(str(library)), None
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def apex_adam(torch, library):
    def make(params):
        moments = [[torch.zeros_like(param.detach()) for param in params] for _ in range(2)]
        lists = [[param.grad for param in params], params, *moments]
        addresses = [tensor.data_ptr() for tensors in lists for tensor in tensors]
        addresses = (ctypes.c_uint64 * len(addresses))(*addresses)
        sizes = (ctypes.c_int * len(params))(*[param.numel() for param in params])
        count, launches = [0], ctypes.c_int()

        def step():
            count[0] += 1
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = library.apex_adam(len(params), addresses, sizes, count[0], stream, ctypes.byref(launches))
            if status:
                raise RuntimeError(f"the launch failed with code {status}")
        # The addresses are read by every step.
        step.keep, step.launches = (lists, moments), launches
        return step
    return make


def timed(torch, step, steps):
    """Device and wall nanoseconds of one of `steps` steps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begun = time.perf_counter_ns()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e6 / steps, (time.perf_counter_ns() - begun) / steps


def rotated(torch, len_bytes):
    """How many memories of this length take turns so that none is found in the cache."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    return min(max(1, -(-CACHES_BETWEEN * cache // max(len_bytes, 1))), MOST_ROTATED)


def in_turn(steps):
    """A step that is the next of `steps` at every call."""
    at = [0]

    def step():
        at[0] = (at[0] + 1) % len(steps)
        steps[at[0]]()
    return step


def copy_step(torch, len_bytes):
    half = max(1, len_bytes // 8)
    pairs = [(torch.rand(half, device="cuda"), torch.empty(half, device="cuda")) for _ in range(rotated(torch, len_bytes))]
    return in_turn([lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs])


def measure(torch, entrant, sizes, arguments):
    """Medians of one contender on one set, in turn with a copy of as many bytes."""
    _, make, bytes_per_element, dtype = entrant
    torch.manual_seed(SEED)
    elements = sum(sizes)
    len_bytes = int(bytes_per_element * elements)
    sets = [fresh(torch, sizes, dtype) for _ in range(rotated(torch, len_bytes))]
    before = sets[0][0].detach().clone()
    steps = [make(params) for params in sets]
    step, copy = in_turn(steps), copy_step(torch, len_bytes)
    for _ in range(2 * len(sets)):
        step()
    copy()
    warm = timed(torch, step, len(sets))
    count = arguments.steps or max(5, min(200, int(4e6 / max(max(warm), 1))))
    times, copies = [], []
    for _ in range(arguments.rounds):
        times.append(timed(torch, step, count))
        copies.append(timed(torch, copy, count))
    after = sets[0][0].detach()
    if not torch.isfinite(after).all() or torch.equal(after, before):
        raise RuntimeError("the first parameter is not finite, or as it was before the steps")
    device, copied = statistics.median(t[0] for t in times), statistics.median(t[0] for t in copies)
    line = {
        "tensors": len(sizes), "elements": elements, "rotated": len(sets), "steps": count, "bytes": len_bytes,
        "device_ns": device, "wall_ns": statistics.median(t[1] for t in times), "gb_per_s": len_bytes / device,
        "copy_gb_per_s": len_bytes / copied, "share_of_copy": copied / device,
    }
    launches = getattr(steps[0], "launches", None)
    if launches is not None:
        line["launches"] = launches.value
    return line


def contenders(torch, folder, report):
    """Name, maker, bytes per element and dtype of parameters; what cannot be had is noted in the report."""
    found = [("torch AdamW fused", torch_adamw(torch, "fused"), 28, "float32"),
             ("torch AdamW foreach", torch_adamw(torch, "foreach"), 28, "float32"),
             ("torch foreach LARS", foreach_lars(torch), 20, "float32")]
    library, reason = build_apex(folder, torch.cuda.get_device_capability())
    if library:
        found.insert(1, ("Apex layout AdamW", apex_adam(torch, library), 28, "float32"))
    else:
        report["left_out"].append(f"Apex layout AdamW: {reason}")
    try:
        from flashoptim import FlashAdamW
    except Exception as error:
        report["left_out"].append(f"{FLASH}: {type(error).__name__}: {error}".splitlines()[0])
    else:
        # Codes and scales of both moments are read and written: 4.25 bytes.
        found += [(f"{FLASH}, f32", flash_adamw(FlashAdamW), 16.25, "float32"),
                  (f"{FLASH}, bf16 and 8 bits", flash_adamw(FlashAdamW), 12.25, "bfloat16")]
    return found


def save(report, arguments):
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    table = [f"{report['device']}, torch {report['torch']} for CUDA {report['cuda']}, seed {SEED}, medians of {arguments.rounds} rounds", "",
             "| set | contender | device µs | wall µs | MB | GB/s | of the copy |", "|---|---|---|---|---|---|---|"]
    for line in report["lines"]:
        table.append(f"| {line['set']} | {line['contender']} | {line['device_ns'] / 1e3:.2f} | {line['wall_ns'] / 1e3:.2f} | "
                     f"{line['bytes'] / 1e6:.2f} | {line['gb_per_s']:.0f} | {100 * line['share_of_copy']:.1f} % |")
    table += [f"\nleft out: {what}" for what in report["left_out"]] + [f"\nfailed: {what}" for what in report["failed"]]
    text = "\n".join(table) + "\n"
    if arguments.table:
        pathlib.Path(arguments.table).write_text(text)
    return text


def run(torch, arguments):
    begun = time.monotonic()
    report = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda, "seed": SEED,
              "scale": arguments.scale, "lines": [], "left_out": [], "failed": []}
    with tempfile.TemporaryDirectory() as folder:
        entrants = contenders(torch, folder, report)
        for name in arguments.sets:
            sizes = numels(name, arguments.shapes, arguments.scale)
            for entrant in entrants:
                contender = entrant[0]
                if time.monotonic() - begun > arguments.seconds:
                    report["left_out"].append(f"{name}: {contender}, for want of time")
                    continue
                try:
                    line = measure(torch, entrant, sizes, arguments)
                    report["lines"].append({"set": name, "contender": contender, **line})
                except Exception as error:
                    report["failed"].append(f"{name}: {contender}: {str(error).splitlines()[0]}")
                torch.cuda.empty_cache()
                save(report, arguments)
    print(save(report, arguments), end="")
    return 1 if report["failed"] else 0


def known(names):
    for name in names.split(","):
        if name not in SETS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(SETS)}, found {name}")
    return names.split(",")


def main():
    here = pathlib.Path(__file__).resolve().parent
    beside = here / "shapes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the sets and contenders, and end")
    parser.add_argument("--sets", type=known, default=SETS)
    parser.add_argument("--steps", type=int, help="of a round; default: as many as fill 4 ms")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--scale", type=int, default=1, help="divides counts and element counts")
    parser.add_argument("--seconds", type=float, default=3600, help="no line is begun behind this")
    parser.add_argument("--shapes", default=beside if beside.is_dir() else here / "../../data/shapes", help="the folder of MODEL.json")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("--table", help="write the table here")
    arguments = parser.parse_args()
    if arguments.list:
        print("sets:       " + ", ".join(SETS))
        print("contenders: torch AdamW fused, Apex layout AdamW, torch AdamW foreach, torch foreach LARS, "
              f"{FLASH}, copy")
        return 0
    if arguments.scale < 1 or arguments.rounds < 1 or (arguments.steps or 1) < 1:
        parser.error("expected --scale, --rounds and --steps of at least 1")
    try:
        import torch
    except ImportError:
        print("not run: python3 has no torch; install it, or compare with another machine's numbers", file=sys.stderr)
        return NOT_RUN
    if not torch.cuda.is_available():
        print(f"not run: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return NOT_RUN
    return run(torch, arguments)


if __name__ == "__main__":
    sys.exit(main())
