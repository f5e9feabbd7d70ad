"""Prompts beside FlashAttention-3 over cells that nobody chose: in turns in one process, and the median of the rounds'
ratios, so that clocks which move do not decide. Of both sides the GPU's time counts: ours is many calls in one program,
the peer's many in one CUDA graph. For speed of trying, `run.py` keeps the tables.

    BENCH_PEERS=<folder of _vllm_fa3_C*.so> python benchmarks/prompts.py --max-seconds 80

With `--cache`, 8-bit pages beside the same calls over 16 bits.
"""

import argparse
import concurrent.futures
import math
import statistics
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from baselines import fa3

import pallas_attn
from pallas_attn.testing.cases import RaggedCase
from pallas_attn.tuning import timing

ROUNDS = 5
PROGRAM_SECONDS = 0.01
CALLS = 4
"""In a round of the program, behind which stands what makes the next round wait for it."""
HEADS = ((16, 2), (32, 4), (32, 8), (64, 8))
MOST_QUERIES, MOST_KEYS, MOST_SECONDS, USUAL_FLOPS = 16384, 2**20, 0.02, 5e14
NAMED = {
    "1x4096": ((0,), (4096,)),
    "512on16000": ((16000,), (512,)),
    "256on100000": ((100000,), (256,)),
    "16of100to600": ((0,) * 16, tuple(range(100, 601, 33))),
    "5chunks": ((500, 3000, 10000, 15000, 30000), (1024, 512, 300, 2048, 777)),
    "8on8192": ((0, 8192, 1000, 4096, 333, 6144, 2048, 7777), (512, 733, 1024, 1291, 1536, 1801, 2048, 900)),
    "1x16384": ((0,), (16384,)),
    "2048on30720": ((30720,), (2048,)),
    "64decodes2prompts": ((4095,) * 64 + (0, 0), (1,) * 64 + (2048, 2048)),
    "40decodes1prompt": ((4095,) * 40 + (0,), (1,) * 40 + (4096,)),
    "512on32256": ((32256,), (512,)),
}
DOCUMENTS, DOCUMENT_TOKENS = 64, 32768
CACHES = {"e4m3": (jnp.float8_e4m3fn, 0.25), "int8": (jnp.int8, 0.03)}
"""And what is stored, times which is a value."""


class Program(NamedTuple):
    """Calls in a row within one program."""

    lowered: Any
    calls: int


def made(
    name: str, contexts: Any, news: Any, heads: tuple[int, int] = (32, 8), page_size: int = 16
) -> RaggedCase:
    lens = tuple(int(a + b) for a, b in zip(contexts, news, strict=True))
    return RaggedCase(
        lens, *heads, 128, page_size, q_lens=tuple(map(int, news)), lengths=name, padding=0, spare_seqs=0,
        spare_pages=0,
    )  # fmt: skip


def drawn(seed: int) -> RaggedCase:
    """1 to 64 sequences with chunks of 1 to 4096 tokens on contexts of 0 to 100,000, lengths log-uniform."""
    rng = np.random.default_rng(seed)
    heads, page_size = HEADS[rng.integers(len(HEADS))], int(rng.choice((16, 32, 64)))
    contexts, news, seconds = [], [], 0.0
    for _ in range(int(np.exp(rng.uniform(0, math.log(64.99))))):
        new = int(np.exp(rng.uniform(0, math.log(4096.99))))
        context = int(np.exp(rng.uniform(0, math.log(100_001)))) - 1
        cost = 4 * heads[0] * 128 * new * (context + new / 2) / USUAL_FLOPS
        room = sum(news) + new <= MOST_QUERIES and sum(contexts) + sum(news) + context + new <= MOST_KEYS
        if room and seconds + cost <= MOST_SECONDS:
            contexts.append(context)
            news.append(new)
            seconds += cost
    return made(f"seed{seed}", contexts, news, heads, page_size)


def cells() -> Iterator["OverPages | Documents"]:
    """Those of short calls first."""
    yield OverPages(made("16of100to600", *NAMED["16of100to600"]))
    yield Documents()
    for name, sizes in NAMED.items():
        if name != "16of100to600":
            yield OverPages(made(name, *sizes))
    yield OverPages(made("1x8192", (0,), (8192,), (64, 8)))
    for seed in range(10):
        yield OverPages(drawn(seed))


def normal(seed: int, *shape: int) -> jax.Array:
    """By torch, which compiles nothing for a shape."""
    import torch

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    return jax.dlpack.from_dlpack(made)


def to_torch(array: jax.Array) -> Any:
    import torch

    return torch.from_dlpack(array)


def seconds_of(case: RaggedCase) -> float:
    pairs = sum(new * (length - new / 2) for new, length in zip(case.q_lens, case.seq_lens, strict=True))
    return 4 * case.num_heads * case.head_dim * pairs / USUAL_FLOPS


def looped(call: Callable[..., Any], seconds: float, sets: tuple, lengths: Any, *rest: Any) -> Program:
    """`call(rest)(set, lengths)` is (out, lse); all calls in one program, each round behind the one before."""
    plain = jax.default_backend() != "gpu"
    rounds = 1 if plain else max(1, round(PROGRAM_SECONDS / (max(seconds, 8e-6) * len(sets))))

    def loop(sets, lengths, *rest):
        return timing.looped(call(*rest), rounds, sets, lengths, plain=plain)

    return Program(jax.jit(loop).lower(sets, lengths, *rest), timing.num_calls(rounds, len(sets)))


def like(*arrays: tuple[tuple[int, ...], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays)


def fastest_of(calls: dict[str, Callable[[int], Any]]) -> Callable[[], float]:
    """Takes a sample of the seconds that the fastest of a peer's ways takes."""
    import graphs  # of torch

    return min((graphs.Captured(call, 1) for call in calls.values()), key=graphs.Captured.sample).sample


class Made(NamedTuple):
    program: Program
    compiled: Any

    def sampler(self, arrays: tuple) -> Callable[[], float]:
        return lambda: timing.device_samples(lambda: self.compiled(*arrays), 1)[0] / self.program.calls


class OverPages:
    beside, stored = "FA3", jnp.bfloat16

    def __init__(self, case: RaggedCase):
        self.case, self.name = case, str(case.id)
        self.pages = [-(-length // case.page_size) for length in case.seq_lens]
        self.pool = (sum(self.pages), case.page_size, case.num_kv_heads, case.head_dim)
        self.query = (case.num_tokens, case.num_heads, case.head_dim)

    def lowered(self, **options: Any) -> Program:
        table, lengths, starts = like(
            ((self.case.num_seqs, max(self.pages)), jnp.int32),
            ((self.case.num_seqs,), jnp.int32),
            ((self.case.num_seqs + 1,), jnp.int32),
        )
        rows = like((self.query, jnp.bfloat16), (self.pool, self.stored), (self.pool, self.stored))

        def call(query, keys, values, starts):
            return lambda table, lengths: pallas_attn.ragged_paged_attention(
                query, keys, values, table, lengths, starts, return_lse=True, **options
            )

        return looped(call, seconds_of(self.case), (table,) * CALLS, lengths, *rows, starts)

    def arrays(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        table = np.zeros((self.case.num_seqs, max(self.pages)), np.int32)
        order, at = rng.permutation(sum(self.pages)).astype(np.int32), 0
        for seq, count in enumerate(self.pages):
            table[seq, :count] = order[at : at + count]
            at += count
        rows = (normal(i, *shape) for i, shape in enumerate((self.query, self.pool, self.pool)))
        starts = jnp.asarray(np.cumsum([0, *self.case.q_lens]), jnp.int32)
        tables = tuple(jnp.array(table) for _ in range(CALLS))
        return tables, jnp.asarray(self.case.seq_lens, jnp.int32), *rows, starts

    def programs(self) -> list[Program]:
        """Ours, and what else is to be compiled."""
        return [self.lowered()]

    def peer(self, _made, tables, lengths, query, keys, values, _) -> Callable[[], float]:
        inputs = types.SimpleNamespace(
            query=to_torch(query),
            caches=(to_torch(keys), to_torch(values)),
            lengths=to_torch(lengths),
            tables=(to_torch(tables[0]),),
        )
        return fastest_of(fa3.build(self.case, inputs))

    def error(self, out: jax.Array, tables, lengths, query, keys, values, _) -> float:
        case, errors, rng = self.case, [], np.random.default_rng(1)
        rows_out, table, query, keys, values = map(to_torch, (out, tables[0], query, keys, values))
        for seq in {0, case.num_seqs // 2, case.num_seqs - 1}:
            length, new = case.seq_lens[seq], case.q_lens[seq]
            own = table[seq, : self.pages[seq]].long()
            seen_keys, seen_values = (x[own].flatten(0, 1)[:length] for x in (keys, values))
            tokens = np.unique([0, new - 1, *rng.integers(0, new, 6)])
            rows = int(sum(case.q_lens[:seq])) + tokens
            places = tokens + length - new
            errors.append(row_error(rows_out[rows], query[rows], seen_keys, seen_values, places))
        return float(np.max(errors))


class OverBytes(OverPages):
    """Of 8 bits, with a scale for each head."""

    beside = "16 bits"

    def __init__(self, case: RaggedCase, cache: str):
        super().__init__(case)
        (self.stored, self.scale), self.name = CACHES[cache], f"{case.id} {cache}"

    def lowered(self, **options: Any) -> Program:
        scale = np.full(self.case.num_kv_heads, self.scale, np.float32)
        return super().lowered(k_scale=scale, v_scale=scale, **options)

    def arrays(self) -> tuple[Any, ...]:
        tables, lengths, query, *pools, starts = super().arrays()
        return tables, lengths, query, *map(self.quantized, pools), starts

    def quantized(self, pool: jax.Array) -> jax.Array:
        rows = pool.astype(jnp.float32) / self.scale
        return (jnp.round(rows) if self.stored == jnp.int8 else rows).astype(self.stored)

    def programs(self) -> list[Program]:
        return [self.lowered(), OverPages(self.case).lowered()]

    def peer(self, made, *_) -> Callable[[], float]:
        return made[1].sampler(OverPages(self.case).arrays())

    def error(self, out: jax.Array, tables, lengths, query, keys, values, starts) -> float:
        keys, values = (pool.astype(jnp.float32) * self.scale for pool in (keys, values))
        return super().error(out, tables, lengths, query, keys, values, starts)


class Documents:
    """Of lognormal lengths, end to end in one row; the peer is told where they begin."""

    beside = "FA3"
    name = f"{DOCUMENTS} documents in {DOCUMENT_TOKENS}"

    def __init__(self):
        shares = np.random.default_rng(0).lognormal(0, 1, DOCUMENTS)
        ends = np.round(np.cumsum(shares) / shares.sum() * DOCUMENT_TOKENS)
        self.starts = np.concatenate([[0], ends]).astype(np.int32)
        self.shapes = [(1, DOCUMENT_TOKENS, heads, 128) for heads in (32, 8, 8)]

    def lowered(self, **options: Any) -> Program:
        query, key, value = like(*((shape, jnp.bfloat16) for shape in self.shapes))
        (bounds,) = like((self.starts.shape, jnp.int32))

        def call(query, value, bounds):
            return lambda key, _: pallas_attn.flash_attention(
                query, key, value, causal=True, cu_q_lens=bounds, return_lse=True, **options
            )

        pairs = float((np.diff(self.starts).astype(float) ** 2).sum() / 2)
        return looped(call, 4 * 32 * 128 * pairs / USUAL_FLOPS, (key,) * CALLS, None, query, value, bounds)

    def arrays(self) -> tuple[Any, ...]:
        query, key, value = (normal(i, *shape) for i, shape in enumerate(self.shapes))
        return tuple(jnp.array(key) for _ in range(CALLS)), None, query, value, jnp.asarray(self.starts)

    def programs(self) -> list[Program]:
        return [self.lowered()]

    def peer(self, _made, keys, _, query, value, bounds) -> Callable[[], float]:
        rows, starts = tuple(to_torch(x[0]) for x in (query, keys[0], value)), to_torch(bounds)
        longest = int(np.diff(self.starts).max())
        sizes = dict(query_starts=starts, key_starts=starts, longest=(longest, longest))
        return fastest_of({"": lambda _: fa3._attend(*rows, **sizes, scale=128**-0.5, window=(-1, -1))})

    def error(self, out: jax.Array, keys, _, query, value, bounds) -> float:
        errors, starts = [], self.starts
        out, query, key, value = (to_torch(x)[0] for x in (out, query, keys[0], value))
        for first, end in ((starts[0], starts[1]), (starts[-2], starts[-1])):
            tokens = np.unique(np.linspace(0, end - first - 1, 8).astype(int))
            rows = first + tokens
            errors.append(row_error(out[rows], query[rows], key[first:end], value[first:end], tokens))
        return float(np.max(errors))


def row_error(out: Any, query: Any, keys: Any, values: Any, places: np.ndarray) -> float:
    """The largest relative error of rows whose queries stand at `places` among the keys. In torch, on float64."""
    rows, heads, dim = query.shape
    grouped = query.double().reshape(rows, keys.shape[1], -1, dim)
    errors = []
    for row, place in enumerate(places):
        seen = slice(0, int(place) + 1)
        scores = (grouped[row] @ keys[seen].double().permute(1, 2, 0)) * dim**-0.5
        right = (scores.softmax(-1) @ values[seen].double().transpose(0, 1)).reshape(heads, -1)
        off = (out[row].double() - right).norm(dim=-1) / right.norm(dim=-1)
        errors.append(float(off.max()))
    return float(np.max(errors))  # NaN if one is


def clock() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()


class Sampled(NamedTuple):
    ours: list[float]
    peer: list[float]
    ratio: float
    error: float


def sampled(cell: OverPages | Documents, made: list[Made]) -> Sampled:
    """Seconds a call in each round, in turns with the peer's fastest way."""
    arrays = cell.arrays()
    first, _ = jax.block_until_ready(made[0].compiled(*arrays))
    error = cell.error(first, *arrays)
    del first
    seconds, peers = made[0].sampler(arrays), cell.peer(made, *arrays)
    ours, peer = [], []
    for _ in range(ROUNDS):
        ours.append(seconds())
        peer.append(peers())
    return Sampled(ours, peer, statistics.median(p / o for p, o in zip(peer, ours, strict=True)), error)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Prompts beside FlashAttention-3.")
    arguments.add_argument(
        "--max-seconds", type=float, default=float("inf"), metavar="S", help="begin no cell later"
    )
    arguments.add_argument("--cache", choices=CACHES, help="pages of 8 bits, beside those of 16")
    options = arguments.parse_args()
    begin, ratios = time.monotonic(), []
    print(jax.devices()[0].device_kind, fa3.available() or fa3.TITLE, flush=True)
    # Traced here, compiled by threads: while one is measured none is.
    chosen = cells()
    if options.cache:
        chosen = (OverBytes(cell.case, options.cache) for cell in chosen if isinstance(cell, OverPages))
    found = [(cell, cell.programs()) for cell in chosen]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ready = [
            (cell, [(one, pool.submit(one.lowered.compile)) for one in programs]) for cell, programs in found
        ]
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    for cell, programs in ready:
        if time.monotonic() - begin > options.max_seconds:
            print("out of time")
            break
        of = sampled(cell, [Made(program, compiled.result()) for program, compiled in programs])
        ratios.append(of.ratio)
        print(
            f"{cell.name:44s} ours {statistics.median(of.ours) * 1e6:8.1f} us  {cell.beside} "
            f"{statistics.median(of.peer) * 1e6:8.1f}  ratio {of.ratio:.3f}  error {of.error:.1e}  {clock()}  "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    print(
        f"geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}, of {len(ratios)} cells"
    )


if __name__ == "__main__":
    main()
