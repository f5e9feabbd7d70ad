"""Masks and scores of one's own, beside torch's compiled flex_attention, or beside the built-in options.

    python benchmarks/masks.py                           # causal, documents, window and ALiBi at 2k, 4k and 16k
    python benchmarks/masks.py --seconds 150             # ends by then, with what there is
    python benchmarks/masks.py --ways ours pallas cuda   # beside Pallas, and with gradients by CUDA
    python benchmarks/masks.py --beside built-in         # what a block mask costs: causal, segment_ids, a window
    python benchmarks/masks.py --dims 64 --lengths 4096
    python benchmarks/masks.py --tiny                    # anywhere, in seconds, without torch, to try it

16 heads of 128 in bf16, or as much of other heads, 16k tokens in all; forward, and forward with gradients. The block
mask is given to either side, made before: what that takes is no part of a call. Ours has room for all blocks that are
seen in part, so that on Hopper CUDA serves it. torch's function is compiled for its sizes
alone (dynamic=False), and once for both: its forward saves what gradients need, as ours does not have to.

How it measures: outputs and gradients of some tokens are compared with those of the first, and one that is further
apart than rounding is WRONG. Then they take turns, round by round, each second round in reverse; a turn is several
calls, one behind the other. Printed are medians, and of each round's ratio to what ours is beside. The last line has
the geometric mean of all.
"""

import argparse
import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import baselines
import jax
import jax.numpy as jnp
import numpy as np

TOKENS, WIDTH, DIM = 16384, 2048, 128
LENGTHS = (16384, 4096, 2048)
DOCUMENTS, WINDOW = 8, 1024
NAMES = ("causal", "documents", "window", "ALiBi")
FLEX, BUILT_IN = "flex", "built-in"
ERROR = 2e-2  # in norm
COMPARED = 37
"""Of so many tokens one, which is some in each tile."""
CALLS, ROUNDS = 32, 5
"""So many that what the first one waits for counts for little."""
WAYS = {
    "ours": (None, None),
    "pallas": ("pallas", None),
    "cuda": ("cuda", "cuda"),
    "tiled": ("cuda", "tiled"),
    BUILT_IN: (None, None),
}
"""Implementations, and where CUDA serves, whose gradients are."""


class Case(NamedTuple):
    name: str
    batch: int
    length: int
    heads: int
    dim: int
    documents: np.ndarray
    """[length], ascending ids."""

    @property
    def slopes(self) -> np.ndarray:
        return (2.0 ** (-8 * np.arange(1, self.heads + 1) / self.heads)).astype(np.float32)

    def functions(self, arrays: Any) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """(mask_mod, score_mod), of jnp or torch, which capture `arrays`: documents and slopes."""
        documents, slopes = arrays

        def alibi(score, b, h, q, k):
            return score - slopes[h] * (q - k)

        def causal(b, h, q, k):
            return k <= q

        masks = {
            "documents": lambda b, h, q, k: documents[q] == documents[k],
            "window": lambda b, h, q, k: (k <= q) & (q - k < WINDOW),
        }
        return masks.get(self.name, causal), alibi if self.name == "ALiBi" else None


def cases(tokens: int, lengths: Sequence[int], heads: int, dim: int) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for length in lengths:
        cuts = np.sort(rng.choice(np.arange(1, length), DOCUMENTS - 1, replace=False))
        ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
        for name in NAMES:
            yield Case(name, tokens // length, length, heads, dim, ids)


def drawn(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value and the output's gradient, [batch, tokens, heads, dim]."""
    shape = case.batch, case.length, case.heads, case.dim
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)
    )


def blocks_of(case: Case) -> Any:
    """With room for all that are seen in part."""
    import pallas_attn
    from pallas_attn.mods.lists import PARTIAL

    mask, _ = case.functions((jnp.asarray(case.documents), jnp.asarray(case.slopes)))
    make = functools.partial(pallas_attn.block_mask, mask, q_len=case.length, kv_len=case.length)
    return make(max_partial=int((make().kinds() == PARTIAL).sum()))


def options_of(case: Case, blocks: Any, built_in: bool) -> dict[str, Any] | None:
    """Those of flash_attention that are arrays, and which say what the case's functions do; None: it has none."""
    _, score = case.functions((jnp.asarray(case.documents), jnp.asarray(case.slopes)))
    if not built_in:
        return {"block_mask": blocks, "score_mod": score}
    ids = jnp.broadcast_to(jnp.asarray(case.documents), (case.batch, case.length))
    return {
        "causal": {"causal": True},
        "documents": {"segment_ids": ids},
        "window": {"causal": True, "sliding_window": WINDOW},
    }.get(case.name)


def ours(case: Case, blocks: Any, given: tuple[jax.Array, ...], way: str, gradients: bool, xla: bool) -> Any:
    """jax.stages.Lowered, of the arrays of a call, and these; or None."""
    import pallas_attn

    implementation, backward = ("xla", None) if xla else WAYS[way]
    config = None if backward is None else pallas_attn.FlashAttentionCudaConfig(backward=backward)
    options = options_of(case, blocks, way == BUILT_IN)
    if options is None:
        return None
    arrays = {name: options.pop(name) for name in ("block_mask", "segment_ids") if name in options}

    def attend(arrays, *given):
        return pallas_attn.flash_attention(
            *given, **arrays, **options, implementation=implementation, config=config
        )

    def both(arrays, *given):
        out, pull = jax.vjp(functools.partial(attend, arrays), *given[:3])
        return out, *pull(given[3])

    given = given if gradients else given[:3]
    return jax.jit(both if gradients else attend).lower(arrays, *given), (arrays, *given)


def ways_of(gradients: bool, ways: Sequence[str]) -> list[str]:
    """Each once."""
    return [way for way in ways if gradients or WAYS[way][1] is None]


class Torch:
    """flex_attention, as its users call it."""

    def __init__(self, case: Case, given: tuple[jax.Array, ...]):
        self.torch = importlib.import_module("torch")
        importlib.import_module(
            "torch._dynamo"
        ).reset()  # or the ninth case is not compiled, and nobody says so
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        arrays = [self.torch.tensor(x, device="cuda") for x in (case.documents, case.slopes)]
        mask, self.score = case.functions(arrays)
        self.blocks = flex.create_block_mask(mask, None, None, case.length, case.length, device="cuda")
        self.attend = self.torch.compile(flex.flex_attention, dynamic=False)
        tensors = baselines.as_tensors(given)
        self.given = [x.transpose(1, 2).contiguous().requires_grad_(i < 3) for i, x in enumerate(tensors)]

    def forward(self) -> Any:
        return self.attend(*self.given[:3], score_mod=self.score, block_mask=self.blocks)

    def both(self) -> tuple[Any, ...]:
        out = self.forward()
        return out, *self.torch.autograd.grad(out, self.given[:3], self.given[3])

    def wait(self, result: Any) -> None:
        self.torch.cuda.synchronize()

    def arrays(self, result: Any) -> list[np.ndarray]:
        results = result if isinstance(result, tuple) else (result,)
        return [x.detach().transpose(1, 2)[:, ::COMPARED].float().cpu().numpy() for x in results]


class Contender(NamedTuple):
    call: Callable[[], Any]
    wait: Callable[[Any], Any]
    arrays: Callable[[Any], list[np.ndarray]]


def as_numpy(result: Any) -> list[np.ndarray]:
    return [np.asarray(x)[:, ::COMPARED].astype(np.float32) for x in jax.tree.leaves(result)]


def apart(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True))


def turn(contender: Contender, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = contender.call()
    contender.wait(result)
    return (time.perf_counter() - start) / calls * 1e6


def race(contenders: dict[str, Contender], calls: int) -> dict[str, list[float]]:
    """Microseconds of each round; wrong ones have none."""
    first, times = None, {}
    for name, one in contenders.items():
        found = one.arrays(one.call())
        first = found if first is None else first
        if not (error := apart(found, first)) < ERROR:  # NaN is wrong
            print(f"  {name}: WRONG, {error:.1e} apart", flush=True)
            continue
        times[name] = []
        turn(one, calls)
    for i in range(ROUNDS):
        for name in list(times)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(turn(contenders[name], calls))
    return times


type Made = dict[bool, dict[str, tuple[Future, Any]]]


def measured(case: Case, made: Made, beside: str | None, calls: int) -> list[float]:
    """Prints a case's lines; ratios of the time of what is `beside` to ours, or to what is there in its place."""
    peer, ratios = Torch(case, drawn(case)) if beside == FLEX else None, []
    for gradients, ways in made.items():
        contenders = {
            way: Contender(functools.partial(executable.result(), *arrays), jax.block_until_ready, as_numpy)
            for way, (executable, arrays) in ways.items()
        }
        if peer is not None:
            contenders[FLEX] = Contender(peer.both if gradients else peer.forward, peer.wait, peer.arrays)
        times = race(contenders, calls)
        line = [f"{name} {statistics.median(each):.0f} us" for name, each in times.items()]
        if beside in times and len(times) > 1:
            first = next(iter(times.values()))
            ratios.append(statistics.median(b / a for a, b in zip(first, times[beside], strict=True)))
            line.append(f"{ratios[-1]:.2f}")
        sizes = f"{case.batch} x {case.length:5d} {case.heads} x {case.dim}"
        print(
            f"{sizes} {case.name:9s} {'both' if gradients else 'forward':7s}  {', '.join(line)}", flush=True
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after so many")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["ours"], help="columns, of ours")
    parser.add_argument("--beside", choices=(FLEX, BUILT_IN), default=FLEX, help="the last column")
    parser.add_argument("--dims", nargs="+", type=int, default=[DIM], help="of a head")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--tiny", action="store_true", help="small sizes, by plain jnp, without torch")
    chosen = parser.parse_args()
    start = time.monotonic()
    baselines.search_folders()
    beside, ways, reason = chosen.beside, list(chosen.ways), None
    if beside == BUILT_IN:
        ways.append(BUILT_IN)
    elif reason := "tiny" if chosen.tiny else baselines.torch_on_gpu():
        beside = None
    print(jax.devices()[0].device_kind, "jax", jax.__version__, reason or "", flush=True)
    if chosen.tiny:
        every = list(cases(256, (256, 128), 2, 16))
    else:
        every = [case for dim in chosen.dims for case in cases(TOKENS, chosen.lengths, WIDTH // dim, dim)]
    every = [case for case in every if case.name in chosen.names]
    ratios = []
    with ThreadPoolExecutor() as pool:

        def made(case: Case) -> Made:
            blocks, given = blocks_of(case), drawn(case)

            def of(gradients: bool) -> dict[str, tuple[Future, Any]]:
                found = {
                    way: ours(case, blocks, given, way, gradients, chosen.tiny)
                    for way in ways_of(gradients, ways)
                }
                return {way: (pool.submit(one[0].compile), one[1]) for way, one in found.items() if one}

            return {gradients: of(gradients) for gradients in (False, True)}

        for case, one in [(case, made(case)) for case in every]:
            if time.monotonic() - start < chosen.seconds:
                ratios += measured(case, one, beside, 1 if chosen.tiny else CALLS)
    if ratios:
        print(
            f"geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}, of {len(ratios)}"
        )


if __name__ == "__main__":
    main()
