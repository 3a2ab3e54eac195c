"""What the machine can do at most: the rate of a matrix product, and of reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """flops: of a large matrix product in this dtype, a second. read: bytes of one long sum, a
    second. threads: torch's. device: its words."""

    flops: float
    read: float
    threads: int
    device: str


def measure(dtype: torch.dtype, device: torch.device) -> Machine:
    """The fastest of a few runs each, about two seconds in all on a CPU."""
    size = 2048 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    long = torch.zeros(1 << 26, device=device)
    product = _seconds(lambda: a @ b, device)
    read = _seconds(lambda: long.sum(), device)
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Machine(2 * size**3 / product, long.numel() * 4 / read, torch.get_num_threads(), words)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(8):
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
