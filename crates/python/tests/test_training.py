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
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=self.place.dtype)
        hidden = self.layers(self.embedding(words) + self.place, mask=mask, is_causal=True)
        return hidden @ self.embedding.weight.t()


def train(library, steps, fuse=False, dtype=torch.float32, **settings):
    model = Transformer().to(dtype)
    assert sum(p.numel() for p in model.parameters()) > 1_500_000
    optimizer = library.AdamW(model.parameters(), lr=3e-4, **settings)
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


def apart(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others))


def test_losses_of_a_transformer_are_those_of_pytorchs_adamw():
    wide = {"dtype": torch.float64}
    ours, _ = train(fusestep.torch, 200, **wide)
    theirs, _ = train(torch.optim, 200, **wide)
    assert apart(ours, theirs) < 1e-12
    assert ours[-1] < ours[0] - 1


def test_losses_in_float32_part_from_pytorchs_no_further_than_its_own_fused_adamw():
    ours, values = train(fusestep.torch, 200)
    theirs, _ = train(torch.optim, 200)
    assert apart(ours[:30], theirs[:30]) < 1e-5
    # From there on this training makes roundings of the last place large, PyTorch's own as well.
    fused, _ = train(torch.optim, 200, fused=True)
    assert apart(ours, theirs) < 2 * apart(fused, theirs)
    in_backward, its_values = train(fusestep.torch, 200, fuse=True)
    assert in_backward == ours and same_bits(values, its_values)


def test_a_users_session(tmp_path):
    script = WORKSPACE / "crates/python/examples/digits.py"
    data = WORKSPACE / "crates/models/data/digits.csv.gz"

    def session(*arguments):
        command = [sys.executable, str(script), str(data), *arguments]
        out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert out.returncode == 0, out.stderr
        found = re.fullmatch(r"(\w+): (\d+) steps, loss ([\d.]+), test ([\d.]+)\n", out.stdout)
        return int(found[2]), float(found[3]), float(found[4])

    steps, loss, right = session("--save", "ours.pt")
    same_steps, same_loss, same_right = session("--optimizer", "torch")
    assert steps == same_steps == 450
    assert abs(loss - same_loss) < 1e-3 and abs(right - same_right) < 0.01 and right > 0.85
    # On in plain PyTorch, and back again.
    later_steps, later_loss, later_right = session(
        "--load", "ours.pt", "--optimizer", "torch", "--save", "theirs.pt"
    )
    assert later_steps == 900 and later_loss < loss and later_right > 0.85
    last_steps, last_loss, _ = session("--load", "theirs.pt")
    assert last_steps == 1350 and last_loss < later_loss


def test_the_quickstart_learns_before_and_after():
    script = WORKSPACE / "crates/python/examples/quickstart.py"
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    found = re.fullmatch(r"before ([\d.]+), after ([\d.]+)\n", out.stdout)
    before, after = float(found[1]), float(found[2])
    assert abs(before - after) < 1e-4 and after < 1.0
