"""The CUDA MLA kernel without JAX: replayed CUDA graphs, beside FlashMLA where its package `flash_mla` is installed.

    cmake -S xla_ffi -B build/bench && cmake --build build/bench --target launcher
    python benchmarks/mla_graph.py --library build/bench/libmla_launcher.so --out graph.csv [--cells b128-s4096]

This is how PyTorch's peers are timed, so the two are compared like with like: many calls in one graph, bursts with
pauses between them, implementations taking turns, page sets in rotation that together are 32 times the L2, shuffled
tables, schedules made beforehand. Each result is compared with a float32 reference first. Needs torch and an sm_90 GPU.
"""

import argparse
import contextlib
import csv
import ctypes
import re
import statistics
import time
from collections.abc import Callable

import baselines
import jax
import jax.numpy as jnp
import shapes
import torch
from cuda_graphs import ROUNDS, burst, captured
from mla_decode import DIM, LATENT, Inputs

from pallas_attn.ops.mla_decode.schedule import default_overhead, num_sm_parts

PAGE = 64
ROTATED_BYTES = 1600 << 20
CORES = 132
COLUMNS = ["device", "cell", "implementation", "us", "tflops", "gbs", "error", "spread", "sets"]


class ScheduleParams(ctypes.Structure):
    """csrc/mla/params.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("seq_lens", "schedule", "num_splits")] + [
        (name, ctypes.c_int) for name in ("batch", "num_sm_parts", "overhead_pages")
    ]


class DecodeParams(ctypes.Structure):
    """csrc/mla/params.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "latent_cache", "block_tables", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("schedule", "num_splits", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse2")),
        *((name, ctypes.c_int) for name in ("batch", "query_len", "num_kv_heads", "group", "num_pages")),
        *((name, ctypes.c_int) for name in ("max_blocks", "num_sm_parts")),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_bool),
        ("element", ctypes.c_int),
    ]


def load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    sizes = library.mla_schedule_params_bytes(), library.mla_decode_params_bytes()
    assert sizes == (ctypes.sizeof(ScheduleParams), ctypes.sizeof(DecodeParams)), "built from another version"
    return library


class Cell:
    """One shape's inputs: a pool of pages, and as many disjoint tables over it as keep the L2 from helping."""

    def __init__(self, batch: int, tokens: int, heads: int, q_len: int, *, varied: bool):
        self.name = f"b{batch}-s{'n' if varied else ''}{tokens}-h{heads}-q{q_len}"
        generator = torch.Generator().manual_seed(0)
        lengths = torch.full((batch,), float(tokens))
        if varied:
            lengths = torch.normal(lengths, tokens / 2, generator=generator).clamp(min=q_len)
        self.lengths = lengths.int().cuda()
        pages = -(-self.lengths.cpu() // PAGE)
        self.total_pages, self.width = int(pages.sum()), int(pages.max())
        set_bytes = self.total_pages * PAGE * DIM * 2
        self.num_sets = max(1, min(512, -(-ROTATED_BYTES // set_bytes)))
        shuffled = torch.randperm(self.total_pages * self.num_sets, generator=generator, dtype=torch.int32)
        self.tables = []
        for pool in shuffled.split(self.total_pages):
            table = torch.zeros(batch, self.width, dtype=torch.int32)
            for row, part in zip(table, pool.split(pages.tolist()), strict=True):
                row[: len(part)] = part
            self.tables.append(table.cuda())
        shape = (self.total_pages * self.num_sets, PAGE, 1, DIM)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.query = torch.randn(batch, q_len, heads, DIM, dtype=torch.bfloat16, device="cuda")

    def bytes_and_flops(self) -> tuple[int, int]:
        """FlashMLA's way of counting: query and output once, causal not subtracted."""
        rows, tokens = self.query[..., 0].numel(), int(self.lengths.sum())
        row_tokens = self.query[0, ..., 0].numel() * tokens
        return 2 * (tokens * DIM + rows * (DIM + LATENT)), 2 * row_tokens * (DIM + LATENT)

    def error(self, out: torch.Tensor) -> float:
        """Relative to float32 attention, over the first and the last request, with the first table."""
        difference = size = 0.0
        for request in (0, len(self.lengths) - 1):
            length = int(self.lengths[request])
            keys = (
                self.cache[self.tables[0][request, : -(-length // PAGE)].long()]
                .reshape(-1, DIM)[:length]
                .float()
            )
            scores = torch.einsum("ihd,td->iht", self.query[request].float(), keys) * DIM**-0.5
            q_len = scores.shape[0]
            seen = length - q_len + 1 + torch.arange(q_len, device="cuda")
            hidden = torch.arange(length, device="cuda")[None] >= seen[:, None]
            expected = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ keys[:, :LATENT]
            difference += float((out[request].float() - expected).square().sum())
            size += float(expected.square().sum())
        return (difference / size) ** 0.5


def ours(cell: Cell, library: ctypes.CDLL):
    """call(set) -> out."""
    batch, q_len, heads, _ = cell.query.shape
    rows = q_len * heads
    parts = num_sm_parts(rows, 1, CORES)
    empty = {"device": "cuda", "dtype": torch.int32}
    schedule, splits = torch.empty(parts, 8, **empty), torch.empty(batch + 1, **empty)
    arrays = (cell.lengths.data_ptr(), schedule.data_ptr(), splits.data_ptr())
    overhead = int(default_overhead(jnp.asarray(cell.lengths.tolist(), jnp.int32), parts, rows))
    params = ScheduleParams(*arrays, batch, parts, overhead)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert library.mla_schedule(ctypes.byref(params), stream) == 0
    out = cell.query.new_empty(batch, q_len, heads, LATENT)
    lse, partial_out, partial_lse = (
        torch.empty(shape, device="cuda")
        for shape in ((batch, heads, q_len), (batch + parts, rows, LATENT), (batch + parts, rows))
    )

    def call(index: int) -> torch.Tensor:
        arrays = (cell.query, cell.cache, cell.tables[index], cell.lengths, schedule, splits, out, lse)
        pointers = [array.data_ptr() for array in (*arrays, partial_out, partial_lse)]
        sizes = (batch, q_len, 1, heads, len(cell.cache), cell.width, parts)
        params = DecodeParams(*pointers, *sizes, DIM**-0.5, True, 0)
        status = library.mla_decode(
            ctypes.byref(params), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        )
        assert status == 0, f"CUDA error {status}"
        return out

    return call


def cells():
    """(name, batch, tokens, heads, q_len, whether lengths vary)."""
    for shape in shapes.mla_decode():
        yield shape["id"].removeprefix("mla-"), *(shape[k] for k in ("b", "s", "h", "sq")), "lens" in shape


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", required=True, help="libmla_launcher.so")
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--cells", default="", help="regular expression: only cells like b128-s4096-h16-q1")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new cell after this long")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # for the schedule's choices only: the GPU is torch's
    library = load(arguments.library)
    start = time.monotonic()
    with open(arguments.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, *shape, varied in cells():
            if not re.search(arguments.cells, name) or time.monotonic() - start > arguments.seconds:
                continue
            cell = Cell(*shape, varied=varied)
            calls: dict[str, Callable[[int], torch.Tensor]] = {"pallas_attn": ours(cell, library)}
            inputs = Inputs(cell.query, cell.cache, tuple(cell.tables), cell.lengths)
            with contextlib.suppress(ImportError):
                calls["flash_mla"] = baselines.prepare("flash_mla", inputs)
            errors = {key: cell.error(call(0)) for key, call in calls.items()}
            wrong = [key for key, error in errors.items() if not error < 1e-2]
            assert not wrong, f"{name}: wrong results of {wrong}: {errors}"
            graphs = {key: captured(call, cell.num_sets) for key, call in calls.items()}
            times = {key: [] for key in calls}
            for turn in range(ROUNDS):
                for key in list(calls)[:: -1 if turn % 2 else 1]:
                    times[key].append(burst(*graphs[key], times[key]))
            num_bytes, flops = cell.bytes_and_flops()
            for key, values in times.items():
                us = statistics.median(values)
                spread = (max(values) - min(values)) / us
                row = [f"{us:.2f}", f"{flops / us / 1e6:.0f}", f"{num_bytes / us / 1e3:.0f}"]
                device = torch.cuda.get_device_name()
                writer.writerow(
                    [device, name, key, *row, f"{errors[key]:.1e}", f"{spread:.3f}", cell.num_sets]
                )
            file.flush()
            print(
                name,
                "  ".join(f"{key} {statistics.median(v):.1f} us" for key, v in times.items()),
                flush=True,
            )
            del cell, inputs, calls, graphs


if __name__ == "__main__":
    main()
