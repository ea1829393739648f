"""Learns handwritten digits with PyTorch; one line chooses the optimizer.

    python digits.py ../../models/data/digits.csv.gz --save model.pt
    python digits.py ../../models/data/digits.csv.gz --load model.pt --optimizer torch
"""

import argparse
import gzip

import torch

import fusestep.torch


def read(path):
    """Images of 8×8 grey values from 0 to 16, and the digit each shows."""
    with gzip.open(path, "rt") as file:
        rows = [[int(value) for value in line.split(",")] for line in file]
    table = torch.tensor(rows)
    return table[:, :-1].float() / 16, table[:, -1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--optimizer", choices=["fusestep", "torch"], default="fusestep")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--load")
    parser.add_argument("--save")
    given = parser.parse_args()
    torch.manual_seed(0)
    images, digits = read(given.data)
    train, test = slice(0, 1437), slice(1437, None)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    # The one line.
    library = fusestep.torch if given.optimizer == "fusestep" else torch.optim
    optimizer = library.AdamW(model.parameters(), lr=2e-3)
    if given.load:
        saved = torch.load(given.load, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(given.epochs):
        order = torch.randperm(1437)
        total = 0.0
        for batch in order.split(32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(images[train][batch]), digits[train][batch]
            )
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(batch)
    right = (model(images[test]).argmax(1) == digits[test]).float().mean()
    steps = int(optimizer.state_dict()["state"][0]["step"])
    print(f"{given.optimizer}: {steps} steps, loss {total / 1437:.4f}, test {float(right):.4f}")
    if given.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, given.save)


if __name__ == "__main__":
    main()
