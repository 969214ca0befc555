"""One of several processes that calibrate together: `python shard.py RANK SIZE FOLDER` writes what it found to FOLDER/RANK.pt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from sashiko.diagnostics.errors import SashikoError
from sashiko.quant import QuantizedModule, quantize

PRESETS = ("int8", "int8-static", "int8-symmetric", "int8-minmax", "int8-percentile", "int8-average", "int8-entropy")
Found = tuple[Any, torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).eval()


def data() -> list[torch.Tensor]:
    """Seven batches of different sizes and magnitudes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 + i % 3, 8, generator=generator) * 3.0**i for i in range(7)]


def found(small: QuantizedModule) -> Found:
    """The record, as plain data, and the module's results."""
    numbers = [(r.low, r.high, r.scale, r.zero_point) for item in small.record.sites for r in item.ranges]
    return (numbers, small.record.batches, sorted(small.state_dict())), small(data()[0])


def nan_at(batches: list[torch.Tensor], place: int) -> list[torch.Tensor]:
    return [torch.full_like(b, float("nan")) if i == place else b for i, b in enumerate(batches)]


def raising(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from batches
    raise OSError("disk on fire")


def on_part(part: Callable[[], Iterable[Any]]) -> QuantizedModule:
    return quantize(model(), part(), preset="int8-symmetric", sharded=True)


def parts(rank: int, size: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """What this process gets, by scenario."""
    own = data()[rank::size]
    last = rank == size - 1
    return {
        "one is empty": lambda: [] if last else data(),
        "the first is empty": lambda: data() if last else [],
        "all are empty": list,
        "NaN in a first batch": lambda: nan_at(own, 0) if last else own,
        "NaN in a later batch": lambda: nan_at(own, 1) if last else own,
        "NaN everywhere": lambda: nan_at(own, 1),
        "the data of one raises": lambda: raising(own) if rank == 0 else own,
        "one gives a tensor": lambda: own[0] if last else own,
    }


def alike(rank: int, size: int) -> dict[str, Callable[[], QuantizedModule]]:
    """What every process sees in the sample of all, or is told, by scenario."""
    own, last = data()[rank::size], rank == size - 1
    other = model()
    torch.nn.init.ones_(other.get_parameter("2.bias"))
    return {
        "other weights": lambda: quantize(other if last else model(), own, preset="int8-static", sharded=True),
        "another preset": lambda: quantize(model(), own, preset="int8-static" if last else "int8-minmax", sharded=True),
        "an unknown preset": lambda: quantize(model(), own, preset="int7" if last else "int8-static", sharded=True),
        "NaN in the sample": lambda: quantize(model(), nan_at(own, 0) if last else own, preset="int8", sharded=True),
    }


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    results: dict[str, Found | str] = {
        preset: found(quantize(model(), data()[rank::size], preset=preset, sharded=True)) for preset in PRESETS
    }
    results["alone"] = found(quantize(model(), data()[rank::size], preset="int8-symmetric"))
    made = {name: partial(on_part, part) for name, part in parts(rank, size).items()}
    for name, make in (made | alike(rank, size)).items():
        try:
            results[name] = found(make())
        except SashikoError as error:
            results[name] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.barrier()  # nobody leaves while another one still talks to it
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # threads of gloo may outlive their group, and then abort a process that is done
