"""Runs with one setting each, on whole numbers; `test_settings.py` says what they must give."""

import torch

import fusestep.torch

SHAPES = {"body.bias": (17,), "body.weight": (40, 25), "head.bias": (), "head.weight": (301,)}
STEPS = 5
LR = 0.5


class Net(torch.nn.Module):
    """Parameters alone: their gradients are given."""

    def __init__(self, dtype="float32", start=0, shorter=0):
        super().__init__()
        for name, shape in SHAPES.items():
            part, own = name.split(".")
            if not hasattr(self, part):
                self.add_module(part, torch.nn.Module())
            value = first(shape, start).to(getattr(torch, dtype))
            # The last ranks' slices may be shorter.
            value = value[: len(value) - shorter] if name == "head.weight" else value
            value = torch.nn.Parameter(value.clone())
            setattr(getattr(self, part), own, value)


def first(shape, start=0):
    """Values before the first step."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.float64) * 7 + start) % 31 - 15).view(shape)


def gradient(rank, step, name):
    """A gradient of few whole numbers, so that sums and means of them are exact."""
    shape, at = SHAPES[name], list(SHAPES).index(name)
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float64) * (3 + at) + 5 * step * step + 11 * rank
    return (numbers % 17 - 8).view(shape)


def loss(rank, step):
    """A loss that falls, of which ranks tell each other the mean."""
    return (1.0 + rank) * 4.0**-step


def values(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def made(case, rank):
    start, shorter = case.get("start", 0) * rank, case.get("shorter", 0) * rank
    model = Net(case.get("dtype", "float32"), start, shorter)
    rule = getattr(fusestep.torch, case.get("rule", "SGD"))
    settings = {"lr": LR, **case.get("of_rule", {}), **case.get("own", {})}
    return model, rule(list(model.named_parameters()), **settings)


def run(case, rank=0, world=1, joins=True):
    """Trains with the settings of a case, which are `own` to the optimizer and of `ranks`."""
    model, optimizer = made(case, rank)
    parallel = None
    if joins:
        ranks = case.get("ranks", {})
        parallel = fusestep.torch.DataParallel(model, optimizer, timeout=60, **ranks)
    begin, end = case.get("steps", (0, STEPS))
    if case.get("resume"):
        assert parallel.resume(case["resume"]) == begin
    found = {"values": [], "norms": [], "versions": [], "skipped": [], "early": False}
    for step in range(begin, end):
        if "rates" in case:
            optimizer.param_groups[0]["lr"] = case["rates"][step]
        optimizer.zero_grad()
        before = values(model)
        total = torch.zeros(())
        for name, value in model.named_parameters():
            own = gradient(0 if case.get("alike") else rank, step, name)
            own = own[: len(value)] if name == "head.weight" else own
            if case.get("not_finite") == (rank, step):
                own = own * float("inf")
            total = total + (value * own.to(value.dtype)).sum().float()
        total.backward()
        now = values(model)
        found["early"] |= any(not torch.equal(before[name], now[name]) for name in SHAPES)
        if parallel is not None and case.get("tells"):
            parallel.set_loss(loss(rank, step))
        optimizer.step()
        found["values"].append(values(model))
        found["norms"].append(optimizer.update_norms())
        found["versions"].append(model.head.weight._version)
        found["skipped"].append(report.skipped if (report := optimizer.report()) else None)
    if case.get("averages_at_the_end"):
        parallel.average()
        found["values"].append(values(model))
    if case.get("save"):
        parallel.save(case["save"], end)
    found["plan"] = optimizer.plan()
    report = optimizer.report()
    found["launches"] = report.launches if report else 0
    found["scale"] = optimizer.loss_scale()
    if parallel is not None:
        parallel.close()
    return found


def settings(out, options, rank, world):
    """Every case, each with a group of its own; one that is refused has an error."""
    found = {}
    for name, case in options["cases"].items():
        try:
            found[name] = run(case, rank, world)
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    found["changed"] = changed_rate(rank)
    torch.save(found, out / f"rank{rank}.pt")


def changed_rate(rank):
    """The error of a rate that is set between updates in backward and their step."""
    case = {"ranks": {"update_in_backward": True}}
    model, optimizer = made(case, rank)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=60, **case["ranks"])
    sum((value * 2).sum() for value in model.parameters()).backward()
    optimizer.param_groups[0]["lr"] = 0.25
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        parallel.close()
