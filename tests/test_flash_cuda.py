"""`flash_attention` by the CUDA kernel of csrc/attention: against float64 on the GPU, and what it leaves to others."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
import test_command_buffer as command_buffer
import test_flash_attention as flash
import test_shifted_gradients as shifted
from flash_inputs import make
from jax import export
from jax.sharding import AxisType, PartitionSpec
from lowering import H100, abstract_mesh, lower_for_four, lower_for_gpu

import pallas_attn
from pallas_attn import FlashAttentionConfig, FlashAttentionTiles
from pallas_attn._tile.band import Band
from pallas_attn.ops.flash_attention import cuda, segments, segments_cuda
from pallas_attn.ops.flash_attention.operands import Operands, Rules
from pallas_attn.testing import compare
from pallas_attn.testing.flash_attention import FlashCase

gpu = pytest.mark.gpu
TARGET = "pallas_attn_attention_forward_sm90"
CASES = [
    FlashCase(300, 300, 4, 2, 128, "bfloat16", causal=True),
    FlashCase(257, 400, 8, 1, 128, "float16", layout="BNTH"),
    FlashCase(130, 333, 3, 1, 64, "bfloat16", causal=True, q_offset=203),
    FlashCase(200, 200, 6, 2, 96, "float16", softcap=3.0, sinks=True),
    FlashCase(150, 260, 4, 4, 80, "bfloat16", value_dim=64, sliding_window=(40, 17), q_offset=60),
    FlashCase(333, 333, 4, 2, 192, "bfloat16", value_dim=128, causal=True),
    FlashCase(260, 260, 2, 2, 192, "bfloat16", sliding_window=70, sinks=True, layout="BNTH"),
    FlashCase(400, 400, 2, 1, 256, "bfloat16", causal=True, softcap=20.0),
    FlashCase(170, 300, 4, 2, 256, "float16", causal=True, q_offset=-50, sinks=True),
    # A few queries of many heads over many keys, which are split.
    FlashCase(5, 5000, 32, 2, 128, "bfloat16", causal=True, q_offset=4995, sinks=True, softcap=9.0),
    FlashCase(100, 4000, 4, 2, 256, "bfloat16", layout="BNTH"),
    # Documents: in one piece, in many, of which some have no keys; and split keys of them.
    FlashCase(500, 500, 4, 2, 128, "bfloat16", segments="packed", causal=True),
    FlashCase(300, 170, 4, 1, 128, "float16", segments="any", sinks=True),
    FlashCase(260, 260, 2, 2, 64, "bfloat16", segments="any", causal=True, layout="BNTH"),
    FlashCase(190, 190, 4, 2, 256, "bfloat16", segments="any", sliding_window=50, softcap=5.0),
    FlashCase(70, 3000, 2, 1, 192, "bfloat16", segments="any", batch=1),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_reference(case):
    """Gradients too, which need more of the forward pass than its results."""
    data = make(case)
    results = flash.run(case, data, "cuda")
    flash.check(case, data, results)
    again = flash.run(case, data, "cuda")
    for name, first in results.items():
        assert np.asarray(first).tobytes() == np.asarray(again[name]).tobytes(), name


@gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[9], CASES[12]], ids=lambda case: case.id)
def test_out_is_the_same_without_gradients(case):
    data: dict[str, Any] = {name: jnp.asarray(array) for name, array in make(case).items()}
    if "q_ids" in data:
        data["segment_ids"] = data.pop("q_ids"), data.pop("kv_ids")
    floats = [data.pop(name) for name in ("query", "key", "value")]
    others = {name: data[name] for name in ("sinks", "segment_ids") if name in data}
    call = functools.partial(
        pallas_attn.flash_attention, **case.options, **others, return_lse=True, implementation="cuda"
    )
    out, lse = jax.jit(call)(*floats)
    kept, kept_lse = jax.jit(lambda *floats: jax.vjp(call, *floats)[0])(*floats)
    np.testing.assert_array_equal(np.float32(out), np.float32(kept))
    np.testing.assert_allclose(lse, kept_lse, rtol=1e-6, atol=1e-5)


@gpu
@pytest.mark.parametrize(
    "change", [{"softcap": None}, {"sliding_window": (31, 20)}, {"q_offset": 1}, {"causal": False}]
)
@pytest.mark.control
def test_a_dropped_feature_is_caught(change):
    """The comparison notices what a kernel that ignores an option would make."""
    case = FlashCase(
        260, 260, 4, 2, 128, "bfloat16", softcap=2.0, sliding_window=(30, 20), causal="causal" in change
    )
    data = make(case)
    results = flash.run(dataclasses.replace(case, **change), data, "cuda")
    with pytest.raises(AssertionError):
        flash.check(case, data, {name: results[name] for name in ("out", "lse")})


@gpu
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_gradients_of_shifted_keys_and_values(causal, dim):
    attention = functools.partial(shifted.flash, causal=causal, implementation="cuda")
    found = shifted.ratios(attention, 512, "bfloat16", causal, False, dim)
    for shift, each in found.items():
        assert max(each) <= shifted.MOST, (shift, each)


@gpu
@pytest.mark.parametrize("kind", ["pieces", "stripes"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_do_not_touch_each_other(causal, kind):
    """Not in a bit, whatever others hold: also such numbers as have exponentials worked out in another way."""
    length = 700
    at = np.arange(length)
    ids = np.searchsorted([137, 500], at, side="right") if kind == "pieces" else at // 37 % 3
    mine: np.ndarray = ids == 1
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((1, length, heads, 128)).astype(jnp.dtype("bfloat16")) for heads in (4, 2, 2, 4)
    ]

    @jax.jit
    def both(query, key, value, d_out):
        call = functools.partial(
            pallas_attn.flash_attention, segment_ids=jnp.asarray(ids[None], jnp.int32), causal=causal,
            return_lse=True, implementation="cuda",
        )  # fmt: skip
        (out, lse), pull = jax.vjp(call, query, key, value)
        return out, lse, *pull((d_out, jnp.ones_like(lse)))

    expected = [np.asarray(x, np.float32)[:, mine] for x in both(*arrays)]
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0.1 for x in expected)
    for other in (7.0, 3e4, np.nan, np.inf):
        for array in arrays:
            array[:, ~mine] = other
        for got, wanted in zip(both(*arrays), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32)[:, mine], wanted)


@gpu
def test_keys_that_no_query_sees_may_hold_anything():
    rng = np.random.default_rng(0)
    shapes = [(1, length, heads, 128) for length, heads in ((120, 4), (400, 2), (400, 2), (120, 4))]
    arrays = [rng.standard_normal(shape).astype(jnp.dtype("bfloat16")) for shape in shapes]

    @jax.jit
    def both(query, key, value, d_out):
        call = functools.partial(
            pallas_attn.flash_attention, causal=True, sliding_window=70, q_offset=140, softcap=3.0,
            implementation="cuda",
        )  # fmt: skip
        out, pull = jax.vjp(call, query, key, value)
        return out, *pull(d_out)

    expected = both(*arrays)
    unseen = np.r_[:71, 260:400]
    for nothing in (np.nan, np.inf):
        for array in arrays[1:3]:
            array[:, unseen] = nothing
        for got, wanted in zip(both(*arrays), expected, strict=True):
            np.testing.assert_array_equal(np.float32(got), np.float32(wanted))


@gpu
@pytest.mark.parametrize(
    "lens", [(0, 100, 100, 101, 400, 850), (3, 100, 260), (0, 300, 200, 900), (0,), (0, 900)]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_end_to_end(lens, sinks):
    """Tokens of none are padding, in front of the sequences and behind them, whatever they hold."""
    case = FlashCase(900, 900, 4, 2, 128, "bfloat16", causal=True, batch=1, sinks=sinks)
    data = make(case)
    at = np.arange(900)
    held = (at >= lens[0]) & (at < lens[-1]) & (np.diff(lens) >= 0).all()
    seq = np.searchsorted(lens, at, side="right")
    given = data | {"q_ids": np.where(held, seq, -1)[None], "kv_ids": np.where(held, seq, -2)[None]}
    expected = flash.reference(dataclasses.replace(case, segments="packed"), given)
    arrays = [np.where(held[:, None, None], data[name], np.nan) for name in ("query", "key", "value")]
    call = functools.partial(pallas_attn.flash_attention, causal=True, return_lse=True, implementation="cuda")
    out, lse = jax.jit(call)(
        *(jnp.asarray(x, jnp.bfloat16) for x in arrays),
        cu_q_lens=jnp.array(lens, jnp.int32),
        sinks=jnp.asarray(data["sinks"]) if sinks else None,
    )  # fmt: skip
    right = np.asarray(expected["out"])
    right[:, ~held] = 0
    right_lse = np.where(held[None, :, None], np.asarray(expected["lse"]), -np.inf)
    compare.assert_rows_close(out, right, dtype="bfloat16", case_id=str(lens))
    compare.assert_lse_close(lse, right_lse, dtype="bfloat16", case_id=str(lens))


@gpu
def test_more_documents_than_shared_memory_has_room_for():
    case = FlashCase(5000, 5000, 1, 1, 64, "bfloat16", causal=True, batch=2)
    data = make(case)
    data["q_ids"] = data["kv_ids"] = (
        np.random.default_rng(0).permutation(10000).reshape(2, 5000).astype(np.int32)
    )
    arrays = [jnp.asarray(data[name]) for name in ("query", "key", "value")]
    out = pallas_attn.flash_attention(
        *arrays, segment_ids=jnp.asarray(data["q_ids"]), causal=True, implementation="cuda"
    )
    # Each sees itself.
    np.testing.assert_array_equal(np.float32(out), np.float32(arrays[2]))


@gpu
@pytest.mark.parametrize("names", [(0,), (1,), (0, 1)], ids=["queries", "keys", "both"])
def test_lengths_of_dot_product_attention(names):
    """What lies behind them may hold anything."""
    case = FlashCase(300, 260, 4, 2, 128, "bfloat16", batch=4)
    data = make(case)
    most = {"query_seq_lengths": 300, "key_value_seq_lengths": 260}
    lens = {name: np.array([n, 0, 130, n + 5], np.int32) for name, n in most.items()}
    lens = {name: jnp.asarray(lens[name]) for i, name in enumerate(lens) if i in names}
    held: list[np.ndarray] = [
        np.arange(n) < np.asarray(lens.get(name, np.full(4, n)))[:, None] for name, n in most.items()
    ]
    given = data | {"q_ids": np.where(held[0], 0, -1), "kv_ids": np.where(held[1], 0, -2)}
    expected = flash.reference(dataclasses.replace(case, segments="packed"), given)
    for name, place in (("query", 0), ("key", 1), ("value", 1)):
        data[name][~held[place]] = np.nan

    @jax.jit
    def both(query, key, value, d_out):
        call = functools.partial(
            pallas_attn.dot_product_attention, return_residual=True, implementation="cuda"
        )
        (out, lse), pull = jax.vjp(functools.partial(call, **lens), query, key, value)
        return out, lse, *pull((d_out, jnp.zeros_like(lse)))

    out, lse, *gradients = both(*(jnp.asarray(data[name]) for name in ("query", "key", "value", "d_out")))
    compare.assert_rows_close(out, expected["out"], dtype="bfloat16", case_id="lengths")
    compare.assert_lse_close(lse, expected["lse"], dtype="bfloat16", case_id="lengths")
    for gradient, place in zip(gradients, (0, 1, 1), strict=True):
        assert np.isfinite(np.float32(gradient)).all()
        assert (np.asarray(gradient, np.float32)[~held[place]] == 0).all()


@gpu
def test_scan_and_vmap():
    case = dataclasses.replace(CASES[0], batch=1)
    query, key, value = (jnp.asarray(make(case)[name]) for name in ("query", "key", "value"))
    call = functools.partial(pallas_attn.flash_attention, causal=True, implementation="cuda")

    def gradient(*floats):
        return jax.grad(lambda *floats: call(*floats).astype(jnp.float32).sum(), (0, 1, 2))(*floats)

    for function in (lambda *floats: (call(*floats),), gradient):
        alone = jax.jit(function)(query, key, value)
        several = [jnp.stack([x, 2 * x, x]) for x in (query, key, value)]
        both = jax.jit(jax.vmap(function))(*several)
        for one, three in zip(alone, both, strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(three[0]))
            np.testing.assert_array_equal(np.float32(one), np.float32(three[2]))
    _, layers = jax.jit(lambda q: jax.lax.scan(lambda c, _: (c, call(c, key, value)), q, None, length=2))(
        query
    )
    np.testing.assert_array_equal(np.float32(layers[0]), np.float32(call(query, key, value)))
    np.testing.assert_array_equal(np.float32(layers[1]), np.float32(layers[0]))


@gpu
def test_layers_are_launched_as_one_graph(tmp_path):
    """Forward and backward, with the same bits."""
    query, key, value = (jnp.asarray(make(CASES[0])[name]) for name in ("query", "key", "value"))

    def layers(query, key, value):
        for _ in range(3):
            query += jax.grad(functools.partial(loss, causal=True, implementation="cuda"))(query, key, value)
        return query

    def results(options):
        compiled = jax.jit(layers).lower(query, key, value).compile(compiler_options=options)
        return command_buffer.traced(compiled, (query, key, value), tmp_path / str(len(options)))

    launched, host, _ = results(command_buffer.LAUNCHED)
    assert command_buffer.count(host, "cuGraphLaunch") == 0
    captured, host, device = results(command_buffer.CAPTURED)
    assert command_buffer.count(host, "cuGraphLaunch") == 1
    assert (command_buffer.count(host, "forward_kernel"), command_buffer.count(device, "forward_kernel")) == (
        0,
        3,
    )
    np.testing.assert_array_equal(captured, launched)


@pytest.fixture
def built(monkeypatch):
    support.as_if_cuda(monkeypatch)


def shapes(
    length: int = 2048, dim: int = 128, dtype="bfloat16", batch: int = 1
) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.dtype(dtype)) for heads in (16, 4, 4)]


def loss(*floats, **options):
    return pallas_attn.flash_attention(*floats, **options).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "sliding_window": (512, 9), "softcap": 3.0, "q_offset": 7}]
)
def test_a_hopper_gpu_takes_it_by_itself(built, options):
    text = lower_for_gpu(functools.partial(pallas_attn.flash_attention, **options), *shapes()).as_text()
    assert TARGET in text
    text = lower_for_gpu(jax.grad(functools.partial(loss, **options)), *shapes()).as_text()
    assert TARGET in text
    assert "pallas_attn_flash_attention_dq" in text
    assert 'name = "pallas_attn_flash_attention"' not in text  # the other forward pass


def test_narrow_heads_are_taken_where_the_call_is_long(built):
    text = lower_for_gpu(pallas_attn.flash_attention, *shapes(length=8192, dim=64)).as_text()
    assert TARGET in text


PACKED = jax.ShapeDtypeStruct((1, 2048), jnp.int32), jax.ShapeDtypeStruct((9,), jnp.int32)


@pytest.mark.parametrize("name", ["segment_ids", "cu_q_lens", "query_seq_lengths"])
def test_documents_are_its_own_too(built, name):
    packing = {"segment_ids": PACKED[0], "cu_q_lens": PACKED[1]}.get(
        name, jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    of_jax = name == "query_seq_lengths"
    function = pallas_attn.dot_product_attention if of_jax else pallas_attn.flash_attention
    text = lower_for_gpu(
        lambda *floats: function(*floats[:3], **{name: floats[3]}), *shapes(), packing
    ).as_text()
    assert TARGET in text
    # A kernel finds them; what is known of lengths needs none.
    assert (segments_cuda.TARGET in text) == (name == "segment_ids")
    assert "stablehlo.sort" not in text


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        (shapes(dim=64), {}),
        (shapes(length=1024), {}),
        (shapes(dtype="float32"), {}),
        (shapes(dim=132), {}),
        (shapes(), {"bias": jnp.zeros((1, 1, 1, 2048))}),
        (shapes(), {"mask": jnp.ones((1, 1, 1, 2048), bool)}),
        (shapes(), {"config": FlashAttentionConfig(*[FlashAttentionTiles(64, 64)] * 3)}),
    ],
    ids=["narrow", "short", "float32", "odd", "bias", "mask", "config"],
)  # fmt: skip
def test_what_else_is_left_to_pallas(built, arrays, options):
    text = lower_for_gpu(functools.partial(pallas_attn.flash_attention, **options), *arrays).as_text()
    assert TARGET not in text
    assert "pallas_attn_flash_attention" in text


def operands(
    *, tokens: int = 2048, group: int = 4, dim: int = 128, value_dim: int = 128, dtype: Any = "bfloat16",
    **arrays: Any,
) -> Operands:  # fmt: skip
    struct = jax.ShapeDtypeStruct
    return Operands(
        query=struct((1, tokens, 4, group, dim), jnp.dtype(dtype)),
        key=struct((1, tokens, 4, dim), jnp.dtype(dtype)),
        value=struct((1, tokens, 4, value_dim), jnp.dtype(dtype)),
        rules=Rules("BTNH", 1.0, None, Band()),
        **arrays,
    )


PAIRS = jax.ShapeDtypeStruct((1, 1, 1, 1, 2048), jnp.int8)
DOCUMENTS = segments.Documents(PAIRS, PAIRS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": PAIRS}, "has no bias"),
        ({"mask": PAIRS}, "has no mask"),
        ({"dtype": "float32"}, "needs bfloat16 or float16, got float32"),
        ({"dim": 100}, "a multiple of 8, got 100"),
        ({"value_dim": 264}, "value_dim of at most 256"),
        ({"group": 130}, "at most 128 query heads"),
        (
            {"tokens": 2**20, "q_documents": DOCUMENTS},
            "takes fewer tokens where there are documents, got 1048576",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_it_does_not_serve_it_says(change, reason):
    assert cuda.unsupported(operands()) is None
    refusal = cuda.unsupported(operands(**change))
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": jnp.ones((1, 1, 1, 2048), bool)}, "has no mask"),
        (
            {"config": FlashAttentionConfig(*[FlashAttentionTiles(64, 64)] * 3)},
            "takes a FlashAttentionCudaConfig",
        ),
    ],
    ids=["mask", "config"],
)
def test_asked_for_it_says_so_to_the_caller(built, options, reason):
    with abstract_mesh(H100), pytest.raises(ValueError, match=f"'cuda' cannot serve this call: {reason}"):
        jax.eval_shape(
            functools.partial(pallas_attn.flash_attention, **options, implementation="cuda"), *shapes()
        )


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Manual])
def test_each_device_calls_it_with_what_is_its_own(built, axis_type):
    """Explicit axes, and shard_map's, whose check of what varies it passes."""
    specs = [PartitionSpec("x", None, "y")] * 3 + [PartitionSpec("x"), PartitionSpec("y")]
    ids, sinks = jax.ShapeDtypeStruct((2, 2048), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.float32)

    def gradients(query, key, value, ids, sinks):
        call = functools.partial(loss, causal=True, segment_ids=ids, implementation="cuda")
        return jax.grad(lambda *floats: call(*floats[:3], sinks=floats[3]), (0, 1, 2, 3))(
            query, key, value, sinks
        )

    arrays = [*shapes(batch=2), ids, sinks]
    text = lower_for_four(gradients, arrays, specs, [*specs[:3], specs[4]], axis_type)
    [call] = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    assert "tensor<1x2048x8x128xbf16>" in call


def test_exports_and_comes_back(built):
    known = export.DisabledSafetyCheck.custom_call(TARGET)
    with abstract_mesh():
        call = jax.jit(functools.partial(pallas_attn.flash_attention, causal=True))
        exported = export.export(call, platforms=["cuda"], disabled_checks=[known])(*shapes())
    again = export.deserialize(exported.serialize())
    assert TARGET in again.mlir_module()
    assert again.out_avals[0].shape == (1, 2048, 16, 128)
