"""What a program may do between ``backward`` and ``step``, and what comes of it.

`docs/python-between.md` has the table of it, and `test_between.py` runs every cell.
"""

import copy

import numpy as np
import torch

import fusestep.torch

# What a cell says: PyTorch's numbers, or an error that names what was done.
SAME = "as PyTorch"
STEP = "refused by `step`"
ONCE = "refused at once"
HALF = "refused half-way"
DROPS = "drops the sums"
AHEAD = "sees updated parameters"

COLUMNS = (
    "one process",
    "`accumulate=`",
    "`fuse_backward`",
    "`DataParallel`, `zero=0` and `1`",
    "`zero=2`",
)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 9)
        self.second = torch.nn.Linear(9, 4)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.late = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.frozen + self.late


def loss_of(model, step, rank=0, world=1):
    generator = torch.Generator().manual_seed(step)
    x, wanted = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    return (model(x[mine]) - wanted[mine]).square().mean()


class Run:
    """A model, its optimizer, and a loss whose backward has been run."""

    def __init__(self, make):
        self.model = Net()
        early = [p for name, p in self.model.named_parameters() if name != "late"]
        self.optimizer = make(early)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.scaler.scale(torch.ones(()))
        self.again = lambda: loss_of(self.model, 70)
        self.params = early
        self.weight = self.model.first.weight
        self.step = self.optimizer.step
        self.seen = None


def all_grads(run):
    return [p.grad for p in run.params if p.grad is not None]


def drop(run):
    run.weight.grad = None


def replace(run):
    run.weight.grad = torch.full_like(run.weight, 0.25)


def write(run):
    run.weight.grad.mul_(3.0)


def write_data(run):
    run.weight.grad.data.mul_(3.0)


def replace_data(run):
    run.weight.grad.data = torch.full_like(run.weight, 0.25)


def write_detached(run):
    run.weight.grad.detach().data.mul_(3.0)


def read(run):
    gradient = run.weight.grad
    rows = [row.tolist() for row in gradient]
    assert rows and f"{gradient[0, 0]:.3f}" and repr(gradient)
    assert np.asarray(gradient).shape == gradient.detach().cpu().numpy().shape
    for copied in (copy.deepcopy(gradient), gradient.clone()):
        copied.data.zero_()


def write_array(run):
    run.weight.grad.numpy()[:] = 0.25


def write_row_of_array(run):
    next(iter(run.weight.grad.view(-1).split(9))).numpy()[:] = 0.25


def write_storage(run):
    run.weight.grad.untyped_storage().fill_(0)


def write_capsule(run):
    torch.from_dlpack(run.weight.grad).mul_(3.0)


def all_reduce(run):
    """Of one rank, which changes nothing."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.all_reduce(run.weight.grad)
    finally:
        torch.distributed.destroy_process_group()


def foreach(run):
    torch._foreach_mul_(all_grads(run), 3.0)


def scaler_step(run):
    run.step = lambda: run.scaler.step(run.optimizer)


@torch.no_grad()
def write_parameter(run):
    run.weight.mul_(0.5)


def write_parameter_data(run):
    run.weight.data.mul_(0.5)


def move_parameter(run):
    run.weight.data = run.weight.data * 0.5


def set_in_group(**settings):
    def act(run):
        run.optimizer.param_groups[0].update(settings)

    return act


def grad_twice(run):
    loss = run.again()
    once = torch.autograd.grad(loss, run.weight, retain_graph=True)[0]
    twice = torch.autograd.grad(2 * loss, run.weight)[0]
    run.seen = [once, twice]


def grad_of_grad(run):
    (first,) = torch.autograd.grad(run.again(), run.weight, create_graph=True)
    run.seen = [first.detach(), *torch.autograd.grad(first.square().sum(), run.weight)]


def with_retained_graph(run):
    loss = run.again()
    loss.backward(retain_graph=True)


def freeze(run):
    run.weight.requires_grad_(False)


def thaw(run):
    run.model.frozen.requires_grad_(True)
    run.model.frozen.grad = torch.full((4,), 0.5)


def add_group(run):
    run.optimizer.add_param_group({"params": [run.model.late], "lr": 0.1})
    run.params.append(run.model.late)


def append_parameter(run):
    run.optimizer.param_groups[0]["params"].append(run.model.late)
    run.params.append(run.model.late)


def remove_parameter(run):
    params = run.optimizer.param_groups[0]["params"]
    params.pop(next(at for at, param in enumerate(params) if param is run.weight))


def load(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def copy_model(run):
    copied = copy.deepcopy(run.model)
    run.seen = [p.detach() for p in copied.first.parameters()]


def replace_module_parameter(run):
    run.model.first.weight = torch.nn.Parameter(torch.zeros(9, 6))


# What is done, how, and what comes of it in the order of `COLUMNS`.
ROWS = [
    ("`optimizer.zero_grad()`", lambda r: r.optimizer.zero_grad(), SAME, SAME, STEP, STEP, STEP),
    (
        "`optimizer.zero_grad(set_to_none=False)`",
        lambda r: r.optimizer.zero_grad(set_to_none=False),
        *(SAME, SAME, ONCE, STEP, ONCE),
    ),
    ("`p.grad = None`", drop, SAME, SAME, STEP, STEP, STEP),
    ("`p.grad = other`", replace, SAME, SAME, STEP, STEP, STEP),
    ("`p.grad.mul_(3)`", write, SAME, SAME, ONCE, STEP, ONCE),
    ("reads of `p.grad` and its copies", read, SAME, SAME, ONCE, SAME, ONCE),
    ("`p.grad.data.mul_(3)`", write_data, SAME, SAME, ONCE, ONCE, ONCE),
    ("`p.grad.data = other`", replace_data, SAME, SAME, ONCE, ONCE, ONCE),
    ("`p.grad.detach().data.mul_(3)`", write_detached, SAME, SAME, ONCE, ONCE, ONCE),
    ("`p.grad.numpy()[:] = 0.25`", write_array, SAME, SAME, ONCE, ONCE, ONCE),
    ("the same through a view", write_row_of_array, SAME, SAME, ONCE, ONCE, ONCE),
    ("`p.grad.untyped_storage().fill_(0)`", write_storage, SAME, SAME, ONCE, ONCE, ONCE),
    ("`torch.from_dlpack(p.grad).mul_(3)`", write_capsule, SAME, SAME, ONCE, ONCE, ONCE),
    ("`torch.distributed.all_reduce(p.grad)`", all_reduce, SAME, SAME, ONCE, ONCE, ONCE),
    ("`torch._foreach_mul_(grads, 3)`", foreach, SAME, SAME, ONCE, STEP, ONCE),
    (
        "`clip_grad_norm_`",
        lambda r: torch.nn.utils.clip_grad_norm_(r.params, 0.01),
        *(SAME, SAME, ONCE, STEP, ONCE),
    ),
    (
        "`clip_grad_value_`",
        lambda r: torch.nn.utils.clip_grad_value_(r.params, 0.01),
        *(SAME, SAME, ONCE, STEP, ONCE),
    ),
    (
        "`scaler.unscale_(optimizer)`",
        lambda r: r.scaler.unscale_(r.optimizer),
        *(SAME, SAME, ONCE, ONCE, ONCE),
    ),
    ("`scaler.step(optimizer)`", scaler_step, SAME, SAME, STEP, STEP, STEP),
    ("`p.mul_(0.5)`", write_parameter, SAME, SAME, STEP, STEP, STEP),
    ("`p.data.mul_(0.5)`", write_parameter_data, SAME, SAME, STEP, SAME, SAME),
    ("`p.data = other`", move_parameter, SAME, SAME, STEP, STEP, STEP),
    ("`model.double()`", lambda r: r.model.double(), STEP, STEP, HALF, HALF, HALF),
    ('`group["lr"] = 0.5`', set_in_group(lr=0.5), SAME, SAME, STEP, SAME, SAME),
    ('`group["weight_decay"] = 0.5`', set_in_group(weight_decay=0.5), SAME, SAME, STEP, SAME, SAME),
    ('`group["betas"] = 0.5, 0.9`', set_in_group(betas=(0.5, 0.9)), SAME, SAME, STEP, SAME, SAME),
    ("`scheduler.step()`", lambda r: r.scheduler.step(), SAME, SAME, STEP, SAME, SAME),
    ("`torch.autograd.grad`, twice", grad_twice, SAME, SAME, AHEAD, SAME, SAME),
    ("`torch.autograd.grad(create_graph=True)`", grad_of_grad, SAME, SAME, AHEAD, SAME, SAME),
    ("a second `backward()`", lambda r: r.again().backward(), SAME, SAME, ONCE, ONCE, ONCE),
    ("`backward(retain_graph=True)` once more", with_retained_graph, SAME, SAME, ONCE, ONCE, ONCE),
    ("`p.requires_grad_(False)`", freeze, SAME, SAME, SAME, SAME, SAME),
    ("`p.requires_grad_(True)` and `p.grad = new`", thaw, SAME, SAME, SAME, STEP, STEP),
    ("`optimizer.add_param_group`", add_group, SAME, SAME, SAME, ONCE, ONCE),
    ('`group["params"].append(p)`', append_parameter, SAME, SAME, SAME, STEP, STEP),
    ('`group["params"].remove`', remove_parameter, SAME, SAME, STEP, STEP, STEP),
    (
        "`copy.deepcopy(optimizer)`",
        lambda r: copy.deepcopy(r.optimizer),
        *(SAME, SAME, ONCE, ONCE, ONCE),
    ),
    ("`optimizer.state_dict()`", lambda r: r.optimizer.state_dict(), SAME, SAME, ONCE, ONCE, ONCE),
    ("`optimizer.load_state_dict`", load, SAME, DROPS, ONCE, ONCE, ONCE),
    ("`copy.deepcopy(model)`", copy_model, SAME, SAME, AHEAD, SAME, SAME),
    ("`module.weight = Parameter(...)`", replace_module_parameter, SAME, SAME, SAME, SAME, SAME),
]
NAMES = [row[0] for row in ROWS]


def page():
    """The table, as the page has it."""
    lines = ["| Between `backward` and `step` | " + " | ".join(COLUMNS) + " |", "|---" * 6 + "|"]
    lines += [f"| {row[0]} | " + " | ".join(row[2:]) + " |" for row in ROWS]
    return "\n".join(lines)


def values(run):
    return [p.detach().clone() for p in run.params]


def kept(run):
    """All that a refusal leaves as it is: parameters, and the state where it is not the ranks'."""
    state, private = run.optimizer._kept_state()
    if private is not None:
        private.settle()
    state = [state.get(p, {}) for p in run.params]
    return values(run) + [v.clone() for own in state for v in own.values() if torch.is_tensor(v)]


def outcome(run, act):
    """What comes of an action and the step: a cell, and the error's text."""
    before = kept(run)
    try:
        act(run)
    except (RuntimeError, ValueError, TypeError) as error:
        return unchanged(run, before, ONCE, error)
    before = kept(run)
    try:
        run.step()
    except (RuntimeError, ValueError, TypeError) as error:
        return unchanged(run, before, STEP, error)
    return SAME, ""


def unchanged(run, before, cell, error):
    after = kept(run)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    if same and any(a.dtype != b.dtype for a, b in zip(before, after)):
        cell = HALF
    words = all(word in str(error) for word in ("expected", "found"))
    # NumPy's own words for an array that may be read.
    words = words or "read-only" in str(error)
    return (cell if same and words else "changed, or no error of ours"), str(error)


def close(ours, theirs):
    pairs = list(zip(ours, theirs))
    return len(ours) == len(theirs) and all(torch.allclose(a, b, atol=2e-6) for a, b in pairs)


def backward(run, step, world):
    """The mean of the gradients of all ranks' parts, in one process."""
    run.optimizer.zero_grad()
    for rank in range(world):
        (loss_of(run.model, step, rank, world) / world).backward()


def adamw(module, **options):
    return lambda params: module.AdamW(params, lr=0.05, **options)


def judge(act, world=1, micro_steps=1, instead=None):
    """PyTorch's optimizer, with what is to be found behind the step; `instead` the action is left
    out, or done behind it."""
    run = Run(adamw(torch.optim))
    for step in range(2):
        backward(run, step, world)
        run.step()
    if instead == DROPS:
        return run
    first = []
    if micro_steps == 2:
        backward(run, 50, world)
        first = [None if p.grad is None else p.grad.clone() for p in run.params]
    backward(run, 60, world)
    if instead == AHEAD:
        run.step()
        act(run)
        return run
    if micro_steps == 1:
        act(run)
        run.step()
        return run
    means = run.optimizer.register_step_pre_hook(lambda *_: mean_with(run, first))
    act(run)
    run.step()
    means.remove()
    return run


def mean_with(run, first):
    for param, one in zip(run.params, [*first, None]):
        two = param.grad
        if one is not None or two is not None:
            total = (0 if one is None else one) + (0 if two is None else two)
            param.grad = total / 2


def in_one_process(act, column):
    """A cell of a column that needs no other process."""
    micro = 2 if column == 1 else 1
    run = Run(adamw(fusestep.torch, **({"accumulate": 2} if micro == 2 else {})))
    if column == 2:
        fusestep.torch.fuse_backward(run.model, run.optimizer, bucket_mib=1e-5)
    for step in range(2):
        for _ in range(micro):
            backward(run, step, 1)
            run.step()
    if micro == 2:
        backward(run, 50, 1)
        run.step()
    backward(run, 60, 1)
    cell, text = outcome(run, act)
    return judged(run, act, cell, text, 1, micro)


def judged(run, act, cell, text, world, micro):
    """The cell, if what PyTorch's optimizer does is what was found."""
    if cell == SAME:
        for cell, instead in ((SAME, None), (DROPS, DROPS), (AHEAD, AHEAD)):
            theirs = judge(act, world, micro, instead)
            seen = close(run.seen or [], theirs.seen or [])
            if seen and close(values(run), values(theirs)):
                return cell, text
        cell = "other numbers"
    return cell, text
