"""The CUDA kernel of attention's backward pass, its own source run on the host (stand_in/device.h). No GPU."""

import dataclasses
import struct
import subprocess
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_block_mask import dense

from pallas_attn import block_mask, mods
from pallas_attn._call import hopper_backward
from pallas_attn.ops.flash_attention import segments

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def program(backward_on_host: Path) -> Path:
    return backward_on_host


PREFIXES = jnp.array([40, 200], jnp.int32)


def by_head(b, h, q, k):
    """Blocks that are seen by one head alone, in part and whole, and queries and keys that nobody sees."""
    return (k <= q) & (q - k < 90 * (3 * h + 1)) & (q % 5 > 0) & (k % 7 > 0)


@dataclasses.dataclass(frozen=True)
class Case:
    q_len: int
    kv_len: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 0
    batch: int = 1
    dtype: str = "bfloat16"
    heads_first: bool = False
    left: int = -1
    right: int = -1
    offset: int = 0
    together: int = 1
    ctas: int = 2
    shift: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    documents: str = ""
    """Ids of queries and keys: each of "packed", "mixed" or "around"."""
    ordered: bool = True
    mask: mods.MaskMod | None = None
    blocks: tuple[int, int] = (128, 128)
    seed: int = 0

    def __str__(self) -> str:
        default = {field.name: field.default for field in dataclasses.fields(self)}
        given = dataclasses.asdict(self) | {"mask": self.mask and self.mask.__qualname__.split(".")[0]}
        return "-".join(f"{k}={v}" for k, v in given.items() if v != default[k])

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def slopes(self) -> np.ndarray:
        return 0.5 / np.arange(2, 2 + self.heads * self.alibi)


def drawn(case: Case) -> list[np.ndarray]:
    """query, key, value, d_out [batch, tokens, heads, dim]."""
    rng = np.random.default_rng(case.seed)
    value_dim = case.value_dim or case.head_dim
    shapes = [
        (case.q_len, case.heads, case.head_dim),
        (case.kv_len, case.kv_heads, case.head_dim),
        (case.kv_len, case.kv_heads, value_dim),
        (case.q_len, case.heads, value_dim),
    ]
    arrays = [rng.standard_normal((case.batch, *shape)) for shape in shapes]
    arrays[1] += case.shift
    arrays[2] += case.shift
    return [a.astype(np.float32).astype(_dtype(case)) for a in arrays]


def _dtype(case: Case) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, case.dtype, None) or case.dtype)


def ids(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Of queries and of keys [batch, tokens]. Some have queries alone, some keys alone; or one is around another."""
    if case.documents == "around":
        q, k = (np.tile(np.abs(np.arange(n) - n / 2) < n / 2 - 9, (case.batch, 1)) * 1
                for n in (case.q_len, case.kv_len))  # fmt: skip
        return q, k
    rng = np.random.default_rng(7)
    q = np.sort(rng.integers(0, 5, (case.batch, case.q_len)), axis=1)
    k = q if case.q_len == case.kv_len else np.sort(rng.integers(1, 7, (case.batch, case.kv_len)), axis=1)
    return (q, k) if case.documents == "packed" else (rng.permuted(q, axis=1), rng.permuted(k, axis=1))


def seen(case: Case) -> np.ndarray:
    """[batch, 1, queries, keys]"""
    place = np.arange(case.q_len)[:, None] + case.offset
    key = np.arange(case.kv_len)[None, :]
    left = case.left < 0 or key >= place - case.left
    right = case.right < 0 or key <= place + case.right
    within = np.broadcast_to(left & right, (case.batch, 1, case.q_len, case.kv_len))
    if case.mask is not None:
        return np.array(dense(case.mask, case.batch, case.heads, case.q_len, case.kv_len))
    if not case.documents:
        return within
    q, k = ids(case)
    return within & (q[:, None, :, None] == k[:, None, None, :])


def exact(case: Case, query, key, value, d_out):
    """Gradients in float64, and what the kernel asks of rows: maximum, rest, delta, total [batch, heads, q_len]."""
    q, k, v, do = (np.nan_to_num(a.astype(np.float64)).swapaxes(1, 2) for a in (query, key, value, d_out))
    group = case.heads // case.kv_heads
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    mask = seen(case)
    raw, scale, slope = q @ k.swapaxes(2, 3), case.scale, 1.0
    if case.softcap:
        raw, scale = np.tanh(raw * scale / case.softcap), case.softcap
        slope = 1.0 - raw * raw
    if case.alibi:
        ahead = np.arange(case.kv_len) - np.arange(case.q_len)[:, None] - case.offset
        raw, scale = raw * scale + case.slopes[:, None, None] * ahead, 1.0
    raw = np.where(mask, raw, -np.inf)
    maximum = raw.max(axis=-1)
    maximum = np.where(np.isfinite(maximum), maximum, 0.0)
    p = np.where(mask, np.exp((raw - maximum[..., None]) * scale), 0.0)
    total = p.sum(axis=-1)
    rest = np.log2(total, where=total > 0, out=np.zeros_like(total))
    p /= np.where(total > 0, total, 1.0)[..., None]
    dp = do @ v.swapaxes(2, 3)
    delta = np.sum(p * dp, axis=-1)
    ds = p * (dp - delta[..., None]) * slope

    def of_group(a):
        return a.reshape(a.shape[0], case.kv_heads, group, *a.shape[2:]).sum(axis=2)

    d_query = ds @ k * case.scale
    d_key, d_value = of_group(ds.swapaxes(2, 3) @ q * case.scale), of_group(p.swapaxes(2, 3) @ do)
    gradients = [a.swapaxes(1, 2) for a in (d_query, d_key, d_value)]
    return gradients, [maximum, rest, delta, np.zeros_like(delta)]


def lists_of(case: Case, most: int = 64):
    """(Sizes, arrays) of a mask as the kernel takes them."""
    if case.mask is None:
        return (0, 0, 0, 0, 0), []
    made = block_mask(
        case.mask, q_len=case.q_len, kv_len=case.kv_len, batch=case.batch, num_heads=case.heads,
        block_q=case.blocks[0], block_kv=case.blocks[1], max_partial=64,
    )  # fmt: skip
    assert made.bits is not None
    (order, _, ends), (key_order, _, key_ends), (words, first) = made.of_queries, made.of_keys, made.bits
    blocks = hopper_backward.blocks_of((order, ends), (key_order, key_ends), first, words[:most], case.blocks)
    arrays = [*blocks.of_keys, *blocks.of_queries, blocks.bits]
    return (*made.shape[:2], *case.blocks, blocks.bits.shape[0]), arrays


def run(program: Path, case: Case, arrays, rows, lists=None, layout=None) -> list[np.ndarray]:
    """`layout`: (tables of queries and of keys, its sizes, its arrays)."""
    query, key, value, _ = arrays
    sides = segments.sides(*(jnp.asarray(x, jnp.int32) for x in ids(case))) if case.documents else ()
    tables, ranks = [side.table for side in sides], [side.rank for side in sides]
    list_sizes, listed = lists or lists_of(case)
    layout_sizes = (0, 0, 0, 0)
    if layout is not None:
        tables, layout_sizes, listed = layout
        list_sizes = (0, 0, *case.blocks, 0)
    call = struct.pack(
        "26i2f",
        *(case.dtype == "float16", case.batch, case.q_len, case.kv_len, case.heads, case.kv_heads),
        *(query.shape[-1], value.shape[-1], case.heads_first, case.left, case.right, case.offset),
        *(case.together, case.ctas, tables[0].shape[1] if tables else 0),
        *(case.ordered, *list_sizes, *layout_sizes, case.alibi, case.scale, case.softcap),
    )
    place = (lambda a: a.swapaxes(1, 2)) if case.heads_first else (lambda a: a)
    given = [np.ascontiguousarray(place(a)) for a in arrays] + [np.float32(r) for r in (*rows, case.slopes)]
    given += [*tables, *ranks, *listed]
    done = subprocess.run(
        [program],
        input=call + b"".join(np.asarray(a).tobytes() for a in given),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found, at = [], 0
    for like in (query, key, value):
        shape = place(like).shape
        array = np.frombuffer(done.stdout, like.dtype, like.size, at).reshape(shape)
        found.append(np.float64(place(array)))
        at += like.size * 2
    assert at == len(done.stdout)
    return found


def check(case: Case, found, right, most: float) -> None:
    for name, ours, true in zip(("query", "key", "value"), found, right, strict=True):
        error = np.linalg.norm(ours - true) / max(np.linalg.norm(true), 1e-30)
        assert error < most, (str(case), name, error)


def asked(case: Case) -> list[tuple[int, str]]:
    """What a case has beyond a plain one, whatever its sizes, of each kernel."""
    options = ("dtype", "heads_first", "left", "right", "shift", "softcap", "alibi", "ordered")
    plain = Case(case.q_len, case.kv_len)
    given = [name for name in options if getattr(case, name) != getattr(plain, name)]
    passes = 1 if case.head_dim <= 128 and case.mask is None else 3
    return [(passes, name) for name in (*given, case.documents, "mask" if case.mask else "")]


@pytest.mark.sweep(case=asked)
@pytest.mark.parametrize(
    "case",
    [
        Case(200, 300, heads=2, kv_heads=1, ctas=3),
        Case(260, 260, right=0, batch=2, together=2, heads_first=True),
        Case(130, 390, head_dim=128, right=0, offset=260, dtype="float16", ctas=1),
        Case(300, 300, left=70, right=0, heads=2, kv_heads=2, together=2, ctas=4, dtype="float16"),
        Case(200, 140, left=5, right=9, offset=-40, head_dim=56),
        Case(1, 129, heads=3, kv_heads=1, head_dim=120),
        Case(200, 200, right=0, head_dim=96, value_dim=80, ctas=3),
        Case(260, 300, heads=2, kv_heads=1, ordered=False, ctas=3),
        Case(200, 200, right=0, softcap=1.5),
        Case(200, 260, right=0, offset=60, heads=4, kv_heads=2, alibi=True, ctas=3),
        Case(260, 260, left=90, heads=2, head_dim=128, documents="packed", alibi=True, dtype="float16"),
        Case(150, 150, right=0, heads=3, kv_heads=1, head_dim=88, documents="mixed", alibi=True),
        Case(300, 300, right=0, documents="packed", ctas=3),
        Case(170, 200, batch=2, heads=2, kv_heads=1, documents="packed", dtype="float16", together=1),
        Case(140, 150, left=60, right=60, documents="mixed", heads_first=True),
        Case(150, 260, heads=2, kv_heads=1, head_dim=192, value_dim=128, right=0, offset=110, ctas=3),
        Case(140, 140, head_dim=256, right=0, softcap=1.5, dtype="float16"),
        Case(70, 200, head_dim=136, value_dim=256, left=5, right=60, heads_first=True),
        Case(270, 300, documents="around", right=0, ctas=3),
        Case(70, 130, head_dim=192, value_dim=40, documents="mixed"),
        Case(300, 300, heads=4, kv_heads=2, mask=by_head, ctas=3),
        Case(260, 390, head_dim=128, mask=mods.sliding_window(150, 20), blocks=(256, 128), dtype="float16"),
        Case(200, 333, batch=2, head_dim=96, value_dim=120, mask=mods.prefix_lm(PREFIXES), softcap=3.0),
        Case(200, 200, heads=2, kv_heads=1, head_dim=136, mask=by_head, blocks=(128, 256), heads_first=True),
        Case(130, 257, head_dim=32, mask=mods.and_masks(), blocks=(128, 512)),
        Case(256, 256, mask=mods.dilated(3, 200), ctas=1),
    ],
    ids=str,
)
def test_gradients(program, case):
    arrays = drawn(case)
    right, rows = exact(case, *arrays)
    check(case, run(program, case, arrays, rows), right, {"bfloat16": 6e-3, "float16": 8e-4}[case.dtype])


@pytest.mark.parametrize(
    "case",
    [
        Case(300, 300, right=0, documents="packed"),
        Case(130, 150, documents="mixed", dtype="float16"),
        Case(70, 70, head_dim=136, documents="packed"),
    ],
    ids=str,
)
def test_what_neighbours_hold_does_not_matter(program, case):
    arrays = drawn(case)
    _, rows = exact(case, *arrays)
    found = run(program, case, arrays, rows)
    q, k = ids(case)
    for chosen in (1, 3):
        spoilt = [np.where((side == chosen)[..., None, None], a, np.nan).astype(a.dtype)
                  for side, a in zip((q, k, k, q), arrays, strict=True)]  # fmt: skip
        spoilt_rows = [np.where((q == chosen)[:, None], r, np.nan) for r in rows]
        again = run(program, case, spoilt, spoilt_rows)
        for side, ours, before in zip((q, k, k), again, found, strict=True):
            np.testing.assert_array_equal(ours[side == chosen], before[side == chosen])


def test_the_order_of_sums_is_one(program):
    """However many CTAs take the tiles, and whoever comes first."""
    case = Case(140, 270, heads=2, kv_heads=1)
    arrays = drawn(case)
    _, rows = exact(case, *arrays)
    first = run(program, case, arrays, rows)
    for ctas in (1, 3):
        again = run(program, dataclasses.replace(case, ctas=ctas), arrays, rows)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "case",
    [Case(200, 200, right=0, shift=8.0, **more) for more in ({}, {"head_dim": 192}, {"mask": mods.causal()})],
    ids=str,
)
def test_what_keys_share_is_taken_back(program, case):
    arrays = drawn(case)
    right, rows = exact(case, *arrays)
    check(case, run(program, case, arrays, rows), right, 8e-3)


def test_queries_whose_bits_are_beyond_what_is_kept_have_no_gradients(program):
    """They have no log-sum-exp, either."""
    case = Case(384, 384, mask=mods.causal())
    arrays = drawn(case)
    _, rows = exact(case, *arrays)
    good = run(program, case, arrays, rows)
    spoilt = [np.where(np.arange(384) >= 256, np.nan, r) for r in rows]
    d_query, d_key, d_value = run(program, case, arrays, spoilt, lists_of(case, most=2))
    np.testing.assert_array_equal(d_query[:, :256], good[0][:, :256])
    for array in (d_query[:, 256:], d_key, d_value):
        assert np.isnan(array).all()


def test_of_lists_that_cannot_be_right_nothing_outside_the_arrays_is_read(program):
    case = Case(128, 256, mask=mods.and_masks())
    arrays = drawn(case)
    _, rows = exact(case, *arrays)
    sizes, listed = lists_of(case)
    of_keys, key_counts, of_queries, query_counts, bits = map(np.array, listed)
    of_keys[..., 0], of_queries[..., 1, :] = -(2**30), 2**30
    key_counts[:], query_counts[:] = 2**30, 2**30
    for found in run(
        program, case, arrays, rows, (sizes, [of_keys, key_counts, of_queries, query_counts, bits])
    ):
        assert np.isfinite(found).all()


def test_blocks_that_nobody_sees_may_hold_anything(program):
    case = Case(300, 300, mask=mods.and_masks(mods.causal(), lambda b, h, q, k: (k >= 128) & (q < 256)))
    arrays = drawn(case)
    right, rows = exact(case, *arrays)
    query, key, value, d_out = arrays
    query[:, :128], key[:, :128], value[:, :128], d_out[:, :128] = [np.nan] * 4
    query[:, 256:], key[:, 256:], value[:, 256:], d_out[:, 256:] = [np.nan] * 4
    check(case, run(program, case, arrays, rows), right, 6e-3)


@pytest.mark.parametrize("dim", [64, 136])
def test_what_is_not_seen_may_hold_anything(program, dim):
    """Queries that see no key, and keys that no query sees."""
    case = Case(200, 140, left=5, right=0, offset=-40, head_dim=dim)
    arrays = drawn(case)
    right, rows = exact(case, *arrays)
    pairs = seen(case)[0, 0]
    for array, of_tokens in zip(
        arrays, (pairs.any(1), pairs.any(0), pairs.any(0), pairs.any(1)), strict=True
    ):
        array[:, ~of_tokens] = np.nan
    check(case, run(program, case, arrays, rows), right, 6e-3)
