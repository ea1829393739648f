"""Runs with lanes, whose micro-batches follow from their number; `test_lanes.py` compares them."""

import torch

import fusestep.torch

# Micro-batches of each update but the last, and of the last, in lanes of one micro-batch.
LANES = 8
LAST = 5
UPDATES = 4


class Mlp(torch.nn.Module):
    """Layers of unequal sizes, and parameters without a gradient in some or all micro-batches."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(12, 37)
        self.second = torch.nn.Linear(37, 65)
        self.last = torch.nn.Linear(65, 3)
        self.rare = torch.nn.Parameter(torch.ones(3))
        self.unused = torch.nn.Parameter(torch.ones(5))

    def forward(self, x, is_rare):
        out = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out * self.rare if is_rare else out


def samples_of(case, number):
    """How many samples a micro-batch has."""
    return 1 + number % 3 if case.get("weighted") else 4


def loss_of(model, case, update, number):
    """The mean loss of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * update + number)
    count = samples_of(case, number)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(count, 12, generator=generator).to(dtype)
    wanted = torch.randn(count, 3, generator=generator).to(dtype)
    # Only one rank has this gradient, and none in the third update.
    is_rare = number == 6 - update != 4
    return torch.nn.functional.mse_loss(model(inputs, is_rare), wanted)


def counts(case):
    """How many micro-batches each update has."""
    of_lane = case.get("own", {}).get("accumulate", 1)
    return [LANES * of_lane] * (UPDATES - 1) + [LAST * of_lane]


def made(case, rank=0):
    # Other first values on each rank: those of rank 0 are taken.
    torch.manual_seed(rank)
    model = Mlp().to(getattr(torch, case.get("dtype", "float32")))
    rule = getattr(fusestep.torch, case.get("rule", "AdamW"))
    return model, rule(model.parameters(), lr=1e-2, **case.get("own", {}))


def bytes_of(model):
    """Every parameter's bytes."""
    named = {name: value.detach().flatten() for name, value in model.named_parameters()}
    return {name: bytes(value.view(torch.uint8).tolist()) for name, value in named.items()}


def joined(model, optimizer, case):
    ranks = {"lanes": LANES, **case.get("ranks", {})}
    return fusestep.torch.DataParallel(model, optimizer, timeout=60, **ranks)


def train(parallel, optimizer, case, updates):
    """The micro-batches that this rank gave in each update, and what the update had of all."""
    given, without = [], []
    for update, count in list(enumerate(counts(case)))[slice(*updates)]:
        given.append([])
        for number in parallel.micro_batches(count):
            given[-1].append(number)
            if case.get("weighted"):
                parallel.set_weight(1 if number is None else samples_of(case, number))
            if number is not None:
                loss_of(parallel, case, update, number).backward()
            optimizer.step()
        without.append(optimizer.report().without_gradient)
    return given, without


def run(case, rank):
    model, optimizer = made(case, rank)
    parallel = joined(model, optimizer, case)
    begin = parallel.resume(case["resume"]) if "resume" in case else 0
    saved, end = case.get("save_at", begin), case.get("end", UPDATES)
    given, without = train(parallel, optimizer, case, (begin, saved))
    if "save" in case:
        # Written behind the updates that follow, in which ranks differ in micro-steps.
        parallel.save(case["save"], saved, wait=False)
    more = train(parallel, optimizer, case, (saved, end))
    parallel.finish_saves()
    found = {"bytes": bytes_of(model), "norm": optimizer.report().grad_norm}
    found.update(given=given + more[0], without_gradient=without + more[1])
    parallel.close()
    return found


def lanes(out, options, rank, world):
    """Every case; one that is refused has an error."""
    found = {}
    for name, case in options["cases"].items():
        try:
            found[name] = run(case, rank)
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, out / f"rank{rank}.pt")


def error_of(call):
    """The kind and the text of what a call raises."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def lanes_refused(out, options, rank, world):
    """Calls that are refused, and an update behind them as if they had not been made."""
    model, optimizer = made({}, rank)
    parallel = joined(model, optimizer, {})
    errors = {
        "too many": error_of(lambda: parallel.set_micro_batches(LANES + 1)),
        "none": error_of(lambda: parallel.set_micro_batches(0)),
        "no number": error_of(lambda: parallel.micro_batches(2.0)),
        "flush": error_of(parallel.flush),
        "weight": error_of(lambda: parallel.set_weight(0.0)),
    }
    numbers = parallel.micro_batches()
    first = next(numbers)
    errors["no step"] = error_of(lambda: next(numbers))
    numbers = parallel.micro_batches()
    assert next(numbers) == first == parallel.micro_batch
    loss_of(parallel, {}, 0, first).backward()
    errors["late"] = error_of(lambda: parallel.set_micro_batches(LANES - 1))
    errors["late weight"] = error_of(lambda: parallel.set_weight(2.0))
    optimizer.step()
    for number in numbers:
        loss_of(parallel, {}, 0, number).backward()
        optimizer.step()
    behind = bytes_of(model)
    parallel.close()
    model, optimizer = made({}, rank)
    plain = fusestep.torch.DataParallel(model, optimizer, timeout=60)
    assert plain.micro_batch is None
    errors["no lanes"] = error_of(plain.micro_batches)
    errors["no lanes to limit"] = error_of(lambda: plain.set_micro_batches(2))
    errors["no lanes to weigh"] = error_of(lambda: plain.set_weight(2.0))
    plain.close()
    torch.save({"errors": errors, "bytes": behind}, out / f"rank{rank}.pt")
