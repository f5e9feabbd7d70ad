"""Prompts beside FlashAttention-3 over cells that nobody chose: calls in turns in one process, and the median of the
rounds' ratios, so that clocks which move do not decide. For speed of trying, `run.py` keeps the tables.

    BENCH_PEERS=<folder of _vllm_fa3_C*.so> python benchmarks/prompts.py --max-seconds 110
"""

import argparse
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from baselines import fa3

import pallas_attn
from pallas_attn.testing.cases import RaggedCase

ROUNDS, BURST_SECONDS = 5, 0.006
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


class Pair(NamedTuple):
    """Calls of ours and of the peer, of which the fastest counts; `error` of our output's sampled rows."""

    name: str
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Any]]
    error: Callable[[Any], float]


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


def cells() -> Iterator[Callable[[], Pair]]:
    """The longest lists of keys last, for they take the longest to make."""
    yield documents
    for name, sizes in NAMED.items():
        yield lambda name=name, sizes=sizes: over_pages(made(name, *sizes))
    yield lambda: over_pages(made("1x8192", (0,), (8192,), (64, 8)))
    for seed in range(10):
        yield lambda seed=seed: over_pages(drawn(seed))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(seed))


def to_torch(array: jax.Array) -> Any:
    import torch

    return torch.from_dlpack(array)


def over_pages(case: RaggedCase) -> Pair:
    rng = np.random.default_rng(0)
    pages = [-(-length // case.page_size) for length in case.seq_lens]
    table = np.zeros((case.num_seqs, max(pages)), np.int32)
    order, at = rng.permutation(sum(pages)).astype(np.int32), 0
    for seq, count in enumerate(pages):
        table[seq, :count] = order[at : at + count]
        at += count
    pool = (sum(pages), case.page_size, case.num_kv_heads, case.head_dim)
    starts = np.cumsum([0, *case.q_lens]).astype(np.int32)
    query = normal(1, case.num_tokens, case.num_heads, case.head_dim)
    arrays = (
        query,
        normal(2, *pool),
        normal(3, *pool),
        jnp.asarray(table),
        jnp.asarray(case.seq_lens, jnp.int32),
    )
    ours = jax.jit(pallas_attn.ragged_paged_attention).lower(*arrays, jnp.asarray(starts)).compile()

    class Inputs:
        query = to_torch(arrays[0])
        caches = tuple(map(to_torch, arrays[1:3]))
        lengths = to_torch(arrays[4])
        tables = (to_torch(arrays[3]),)

    peers = fa3.build(case, Inputs)
    last = jnp.asarray(starts)

    def error(out: jax.Array) -> float:
        worst = 0.0
        for seq in {0, case.num_seqs // 2, case.num_seqs - 1}:
            length, new = case.seq_lens[seq], case.q_lens[seq]
            own = table[seq, : pages[seq]]
            keys, values = (x[own].reshape(-1, *pool[2:])[:length] for x in arrays[1:3])
            tokens = np.unique([0, new - 1, *rng.integers(0, new, 6)])
            rows = starts[seq] + tokens
            worst = max(worst, row_error(out[rows], query[rows], keys, values, tokens + length - new))
        return worst

    return Pair(
        f"{case.id}",
        lambda: ours(*arrays, last),
        {name: lambda f=f: f(0) for name, f in peers.items()},
        error,
    )


def documents() -> Pair:
    """Of lognormal lengths, end to end in one row; the peer is told where they begin."""
    import torch

    shares = np.random.default_rng(0).lognormal(0, 1, DOCUMENTS)
    ends = np.round(np.cumsum(shares) / shares.sum() * DOCUMENT_TOKENS).astype(np.int32)
    starts = np.concatenate([[0], ends]).astype(np.int32)
    query, key, value = (normal(i, 1, DOCUMENT_TOKENS, heads, 128) for i, heads in enumerate((32, 8, 8)))
    bounds = jnp.asarray(starts)
    ours = jax.jit(lambda q, k, v, c: pallas_attn.flash_attention(q, k, v, causal=True, cu_q_lens=c))
    ours = ours.lower(query, key, value, bounds).compile()
    rows, longest = tuple(to_torch(x[0]) for x in (query, key, value)), int(np.diff(starts).max())
    of_peer = torch.tensor(starts, device=rows[0].device)

    def peer() -> Any:
        return fa3._attend(
            *rows,
            query_starts=of_peer,
            key_starts=of_peer,
            longest=(longest, longest),
            scale=128**-0.5,
            window=(-1, -1),
        )

    def error(out: jax.Array) -> float:
        worst = 0.0
        for first, end in ((starts[0], starts[1]), (starts[-2], starts[-1])):
            tokens = np.unique(np.linspace(0, end - first - 1, 8).astype(int))
            own = slice(int(first), int(end))
            worst = max(
                worst,
                row_error(
                    out[0, first + tokens], query[0, first + tokens], key[0, own], value[0, own], tokens
                ),
            )
        return worst

    return Pair(
        f"{DOCUMENTS} documents in {DOCUMENT_TOKENS}",
        lambda: ours(query, key, value, bounds),
        {"": peer},
        error,
    )


def row_error(
    out: jax.Array, query: jax.Array, keys: jax.Array, values: jax.Array, places: np.ndarray
) -> float:
    """The largest relative error of rows whose queries stand at `places` among the keys."""
    rows, heads, dim = query.shape
    grouped = query.astype(jnp.float32).reshape(rows, keys.shape[1], -1, dim)
    scores = jnp.einsum("qhgd,khd->hgqk", grouped, keys.astype(jnp.float32), precision="highest") * dim**-0.5
    scores = jnp.where(jnp.arange(keys.shape[0]) <= jnp.asarray(places)[:, None], scores, -jnp.inf)
    right = jnp.einsum(
        "hgqk,khd->qhgd", jax.nn.softmax(scores), values.astype(jnp.float32), precision="highest"
    )
    right = right.reshape(rows, heads, dim)
    norms = (jnp.linalg.norm(x, axis=-1) for x in (out.astype(jnp.float32) - right, right))
    return float((next(norms) / next(norms)).max())


def in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Microseconds of each in each round."""
    import torch

    def seconds(call: Callable[[], Any], times: int) -> float:
        begin = time.perf_counter()
        done = [call() for _ in range(times)][-1]
        jax.block_until_ready(done) if isinstance(done, jax.Array) else torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times

    for call in calls.values():
        seconds(call, 1)
    times = {name: max(2, int(BURST_SECONDS / seconds(call, 3))) for name, call in calls.items()}
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            measured[name].append(seconds(call, times[name]) * 1e6)
    return measured


def clock() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    arguments = argparse.ArgumentParser(description="Prompts beside FlashAttention-3.")
    arguments.add_argument(
        "--max-seconds", type=float, default=float("inf"), metavar="S", help="begin no cell later"
    )
    options = arguments.parse_args()
    begin, ratios = time.monotonic(), []
    print(jax.devices()[0].device_kind, fa3.available() or fa3.TITLE, flush=True)
    for build in cells():
        if time.monotonic() - begin > options.max_seconds:
            print("out of time")
            break
        pair = build()
        us = in_turns({"ours": pair.ours} | pair.peers)
        best = min(pair.peers, key=lambda name: statistics.median(us[name]))
        ratio = statistics.median(peer / own for peer, own in zip(us[best], us["ours"], strict=True))
        ratios.append(ratio)
        print(
            f"{pair.name:44s} ours {statistics.median(us['ours']):8.1f} us  FA3 {statistics.median(us[best]):8.1f}"
            f"  ratio {ratio:.3f}  error {pair.error(pair.ours()):.1e}  {clock()}  {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    print(
        f"geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}, of {len(ratios)} cells"
    )


if __name__ == "__main__":
    main()
