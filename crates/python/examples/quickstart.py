"""One loop, first with PyTorch's AdamW, then with ours: an import and one line differ.

    python quickstart.py
"""

import torch


def before(batches):
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for images, digits in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def after(batches):
    import fusestep.torch

    model = torch.nn.Linear(64, 10)
    optimizer = fusestep.torch.AdamW(model.parameters(), lr=1e-3)
    for images, digits in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main():
    # An image of each digit: six pixels of its own are lit.
    images = torch.zeros(10, 64)
    for digit in range(10):
        images[digit, 6 * digit : 6 * digit + 6] = 1.0
    batches = [(images, torch.arange(10))] * 300
    losses = []
    for train in (before, after):
        torch.manual_seed(0)
        losses.append(train(batches))
    print(f"before {losses[0]:.6f}, after {losses[1]:.6f}")


if __name__ == "__main__":
    main()
