"""Whole runs: a transformer beside PyTorch's AdamW, and a user's session."""

import pathlib
import re
import subprocess
import sys

import torch
from support import bits, same_bits

import fusestep.torch

WORKSPACE = pathlib.Path(__file__).resolve().parents[3]
WORDS, WIDTH, LENGTH = 512, 192, 24


class Transformer(torch.nn.Module):
    """A small decoder whose last layer is its embedding: some two million parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.place = torch.nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, words):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.layers(self.embedding(words) + self.place, mask=mask, is_causal=True)
        return hidden @ self.embedding.weight.t()


def train(library, steps, fuse=False):
    model = Transformer()
    assert sum(p.numel() for p in model.parameters()) > 1_500_000
    optimizer = library.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=steps)
    if fuse:
        fusestep.torch.fuse_backward(model, optimizer)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        # Words that follow each other by a rule, begun at random.
        first = torch.randint(WORDS, (4, 1), generator=generator)
        words = (first + 7 * torch.arange(LENGTH + 1)) % WORDS
        optimizer.zero_grad()
        logits = model(words[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, bits(model.parameters())


def test_losses_of_a_transformer_are_those_of_pytorchs_adamw():
    ours, values = train(fusestep.torch, 200)
    theirs, _ = train(torch.optim, 200)
    assert max(abs(a - b) for a, b in zip(ours, theirs)) < 1e-5
    assert ours[-1] < ours[0] - 1
    fused, fused_values = train(fusestep.torch, 200, fuse=True)
    assert fused == ours and same_bits(values, fused_values)


def test_a_users_session(tmp_path):
    script = WORKSPACE / "crates/python/examples/digits.py"
    data = WORKSPACE / "data/digits.csv.gz"

    def session(*arguments):
        command = [sys.executable, str(script), str(data), *arguments]
        out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert out.returncode == 0, out.stderr
        found = re.fullmatch(r"(\w+): (\d+) steps, loss ([\d.]+), test ([\d.]+)\n", out.stdout)
        return int(found[2]), float(found[3]), float(found[4])

    steps, loss, right = session("--save", "ours.pt")
    assert steps == 450 and right > 0.9
    # On in plain PyTorch, and back again.
    later_steps, later_loss, later_right = session(
        "--load", "ours.pt", "--optimizer", "torch", "--save", "theirs.pt"
    )
    assert later_steps == 900 and later_loss < loss and later_right > 0.9
    last_steps, last_loss, _ = session("--load", "theirs.pt")
    assert last_steps == 1350 and last_loss < later_loss
