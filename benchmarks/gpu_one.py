"""One GPU: zerobench's stages beside plain PyTorch, windows in turn in one process, GPT-2 124M.

    python benchmarks/gpu_one.py [--precisions fp16,bf16,fp32] [--batch-size 32] [--seq-length 128] [--rounds 15]

A stage must cost nothing where there is nothing to share. Every mode trains its own model, all of them are alive at
once, and each round takes a window of every mode, so a host that others slow down slows all of them. Modes: ``masters``
(parameters in the precision's dtype beside fp32 masters with torch's fused AdamW: the dtypes of our stages; in fp32
there are none, and it is the plain loop), ``autocast`` (fp32 parameters under autocast with torch's fused AdamW; fp16
with GradScaler), zero0 to zero3. Prints a JSON line a mode and precision: the median window in milliseconds a step, the
median over rounds of its ratio to the faster of the plain loops of that round, the ratios' quartiles, and milliseconds
until the host is through with a step that it starts on an idle device.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median, quantiles
from typing import Any

import torch
from gpu_step import NAMES, WARMUP_STEPS, Run, host_ms, ours
from torch import nn

from zerobench import models

WINDOW_STEPS = 10
LR = 1e-5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = ("masters", "autocast")
Mode = tuple[Run, Run, Run]  # forward and backward, step, close


def build(device: torch.device) -> nn.Module:
    with device:
        return models.build(models.resolve(NAMES["gpt2"], {}), seed=0)


def masters(model: nn.Module, batch: dict[str, Any], precision: str) -> Mode:
    """fp16 without its loss scale, which is a multiplication and a check less for this side."""
    dtype = DTYPES[precision]
    if dtype == torch.float32:
        return autocast(model, batch, precision)
    high = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(dtype)
    low = list(model.parameters())
    optimizer = torch.optim.AdamW(high, lr=LR, fused=True)

    def forward_backward() -> None:
        model(**batch).loss.backward()

    def step() -> None:
        for master in high:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([m.grad for m in high if m.grad is not None], [p.grad for p in low])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(low, high)
        for parameter in (*low, *high):
            parameter.grad = None

    return forward_backward, step, lambda: None


def autocast(model: nn.Module, batch: dict[str, Any], precision: str) -> Mode:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def forward_backward() -> None:
        with torch.autocast("cuda", DTYPES[precision], enabled=precision != "fp32"):
            loss = model(**batch).loss
        scaler.scale(loss).backward()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return forward_backward, step, lambda: None


def window_ms(forward_backward: Run, step: Run) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(WINDOW_STEPS):
        forward_backward()
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / WINDOW_STEPS * 1e3


def measure(precision: str, *, batch_size: int, seq_length: int, rounds: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ids = torch.randint(0, 32000, (batch_size, seq_length), device=device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    modes = {"masters": masters(build(device), batch, precision)}
    if precision != "fp32":
        modes["autocast"] = autocast(build(device), batch, precision)
    for stage in range(4):
        modes[f"zero{stage}"] = ours(build(device), batch, f'zero{stage}@precision="{precision}"')
    for forward_backward, step, _ in modes.values():
        for _ in range(WARMUP_STEPS):
            forward_backward()
            step()
    taken: list[dict[str, float]] = []
    for _ in range(rounds):
        order = random.sample(list(modes), len(modes))
        taken.append({name: window_ms(*modes[name][:2]) for name in order})
    for name, (forward_backward, step, close) in modes.items():
        ratios = [window[name] / min(window[plain] for plain in PLAIN if plain in window) for window in taken]
        quarter, middle, three_quarters = quantiles(ratios, n=4)
        found = {
            "mode": name,
            "precision": precision,
            "batch_size": batch_size,
            "seq_length": seq_length,
            "median_ms": round(median(window[name] for window in taken), 3),
            "to_plain": round(middle, 4),
            "to_plain_quartiles": [round(quarter, 4), round(three_quarters, 4)],
            "host_ms": round(host_ms(forward_backward, step), 2),
        }
        print(json.dumps(found), flush=True)
        close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", default="fp16,bf16,fp32")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    for precision in asked.precisions.split(","):
        measure(precision, batch_size=asked.batch_size, seq_length=asked.seq_length, rounds=asked.rounds)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
