"""Steps of Python's optimizers for `fusestep bench --peers`, which starts this file.

The first line of standard input is the request: names and shapes of parameters in f32, threads, the
type of state and AdamW's settings. The answer is one line: what was found, and what was not and why. Each further
line of input is the number of something found; the answer is the time of one step in nanoseconds,
the steps taken so far, and the first element of the first parameter. End of input ends.
"""
import json
import sys
import time

MIN_SAMPLE_NS = 4_000_000

request = json.loads(sys.stdin.readline())
settings = {
    "lr": request["lr"],
    "betas": (request["beta1"], request["beta2"]),
    "eps": request["eps"],
    "weight_decay": request["weight_decay"],
}
# What libraries print goes elsewhere than the answers.
answers, sys.stdout = sys.stdout, sys.stderr


def answer(value):
    print(json.dumps(value), file=answers, flush=True)


def reason(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Peer:
    def __init__(self, name, version, make):
        import torch

        self.name, self.version, self.calls, self.steps = name, version, 1, 0
        shapes = [entry["shape"] for entry in request["params"]]
        self.params = [torch.nn.Parameter(torch.full(shape, 0.1)) for shape in shapes]
        for param in self.params:
            param.grad = torch.full_like(param, 0.01)
        self.step = make(self.params).step
        # What is allocated by the first step is not part of any other.
        self.step()
        self.steps += 1

    def sample(self):
        while True:
            start = time.perf_counter_ns()
            for _ in range(self.calls):
                self.step()
            spent = time.perf_counter_ns() - start
            self.steps += self.calls
            if spent >= MIN_SAMPLE_NS or self.calls >= 1 << 20:
                value = next((p.flatten()[0].item() for p in self.params if p.numel()), None)
                return {"ns": spent / self.calls, "steps": self.steps, "value": value}
            self.calls *= 2


def torch_peer(name, **options):
    import torch

    torch.set_num_threads(request["threads"])
    return Peer(name, torch.__version__, lambda p: torch.optim.AdamW(p, **settings, **options))


def deepspeed_peer(name):
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    make = lambda p: DeepSpeedCPUAdam(p, adamw_mode=True, **settings)
    return Peer(name, deepspeed.__version__, make)


def bitsandbytes_peer(name, kind):
    import bitsandbytes
    import torch

    torch.set_num_threads(request["threads"])
    make = getattr(bitsandbytes.optim, kind)
    return Peer(name, bitsandbytes.__version__, lambda p: make(p, **settings))


def torchao_peer(name):
    import torch
    import torchao
    from torchao.optim import AdamW8bit

    torch.set_num_threads(request["threads"])
    return Peer(name, torchao.__version__, lambda p: AdamW8bit(p, **settings))


FUSED = ("PyTorch AdamW, fused", "pip install torch", lambda n: torch_peer(n, fused=True))
# By the type of state. PyTorch's, which is f32, is the yardstick of both.
CANDIDATES = {
    "f32": [
        FUSED,
        ("PyTorch AdamW, foreach", "pip install torch", lambda n: torch_peer(n, foreach=True)),
        ("PyTorch AdamW, default", "pip install torch", torch_peer),
        ("DeepSpeed CPUAdam", "pip install deepspeed", deepspeed_peer),
    ],
    "int8": [
        ("bitsandbytes AdamW8bit", "pip install bitsandbytes",
         lambda n: bitsandbytes_peer(n, "AdamW8bit")),
        ("bitsandbytes Adam8bit", "pip install bitsandbytes",
         lambda n: bitsandbytes_peer(n, "Adam8bit")),
        ("torchao AdamW8bit", "pip install torchao, and a C++ compiler", torchao_peer),
        (FUSED[0] + ", state in f32", *FUSED[1:]),
    ],
}

found, absent = [], []
for name, help_, make in CANDIDATES[request["state_dtype"]]:
    try:
        found.append(make(name))
    except Exception as error:
        absent.append({"name": name, "reason": reason(error), "help": help_})
answer({
    "found": [{"name": peer.name, "version": peer.version} for peer in found],
    "absent": absent,
})
for line in sys.stdin:
    answer(found[int(line)].sample())
