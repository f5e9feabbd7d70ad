"""Each rule that writes a primitive as Triton IR: what it writes compiles, and on a GPU gives what plain JAX gives."""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
import triton_kernels
from jax import lax

from pallas_attn import _lowering

SHAPE = (32, 64)
F32, BF16, F16, I32, U32, I8 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint32, jnp.int8
E5M2, E4M3 = jnp.float8_e5m2, jnp.float8_e4m3fn

BY_ROWS = (((1,), (1,)), ((), ()))


def row_sums(square: jax.Array) -> jax.Array:
    return jnp.sum(square, axis=1)[:, None] + jnp.zeros(SHAPE, square.dtype)


# Name: (function of tiles, their names, how far the result may be from JAX's, relative).
OPERATIONS: dict[str, tuple[Callable[..., Any], str, float]] = {
    "bf16 sum": (operator.add, "b b", 0),
    "bf16 quotient": (operator.truediv, "b f16", 1e-2),
    "f16 product": (operator.mul, "f16 f16", 0),
    "maximum": (jnp.maximum, "f nan", 0),
    "minimum": (jnp.minimum, "f nan", 0),
    "float remainder": (lambda x: lax.rem(x, F32(0.7)), "f", 1e-4),
    "floor and ceil": (lambda x: jnp.floor(x) - 2 * jnp.ceil(x), "f", 0),
    "round": (jnp.round, "f", 0),
    "signs": (lambda x, i: jnp.sign(x) + jnp.abs(x) - (-x) + jnp.sign(i) - jnp.abs(i), "f i", 1e-6),
    "sign of NaN": (jnp.sign, "nan", 0),
    "powers of two": (lambda x: jnp.exp2(x) + jnp.log2(jnp.abs(x) + 1), "f", 2e-6),
    "powers at the ends": (lambda x: jnp.exp2(jnp.where(x > 3, jnp.inf, jnp.where(x < -3, -jnp.inf, 30 * x)))
                           + jnp.exp2(x / 0), "f", 4e-6),
    "logarithms at the ends": (lambda x, y: jnp.log2(jnp.where(x > 3, jnp.inf, jnp.where(x < -3, 0, y))),
                               "f nan", 2e-6),
    "exp and log": (lambda x: jnp.exp(x) + jnp.log(jnp.abs(x) + 1) + jnp.log1p(jnp.abs(x)), "f", 2e-6),
    "tanh": (jnp.tanh, "f", 2e-6),
    "erf and logistic": (lambda x: lax.erf(x) + lax.logistic(x), "f", 1e-5),
    "roots": (lambda x: jnp.sqrt(jnp.abs(x)) + lax.rsqrt(jnp.abs(x) + 1), "f", 2e-6),
    "sin and cos": (lambda x: jnp.sin(x) + 2 * jnp.cos(x), "f", 2e-5),
    "integer powers": (lambda x: x**2 + x**3 + lax.square(x), "f", 2e-6),
    "clip": (lambda x: jnp.clip(x, -1, 1), "f", 0),
    "floor division": (lambda i, j: i // j + i % j, "i j", 0),
    "floor division by constants": (lambda i: sum(k * (i // by) + k**2 * (i % by)
                                    for k, by in enumerate((1, 4, 5, 16, -3, -4), 2)), "i", 0),
    "floor division of narrow integers": (lambda n: (n // 8).astype(I32) + n % 8 + n // I8(3) + n % 3, "n", 0),
    "unsigned": (lambda u: u // 7 + u % 5 + (u >> 3) + jnp.maximum(u, U32(2**31)), "u", 0),
    "bits": (lambda i, j: ((i & j) ^ (i | 3)) + (i << 2) + (i >> 1) + ~i, "i j", 0),
    "comparisons": (lambda x, i: ((x < 1) & (x >= -1)) | (i == 3) | ~(i != 2) | (x > 2) | (i <= -9), "f i", 0),
    "comparison with NaN": (lambda x, y: (x < y) | (x == y) | ~(x != y), "f nan", 0),
    "select": (lambda x, i: jnp.where(i > 0, x, -jnp.inf), "f i", 0),
    "bf16 and f16": (lambda b: b.astype(F16).astype(F32), "b", 0),
    "float to int": (lambda x: (10 * x).astype(I32) + (100 * x).astype(I8).astype(I32), "f", 0),
    "int to float": (lambda i, u: i.astype(BF16).astype(F32) + u.astype(F32), "i u", 0),
    "narrow integers": (lambda i: i.astype(I8).astype(I32) + i.astype(jnp.uint8).astype(I32), "i", 0),
    "bool to numbers": (lambda x: (x > 0).astype(F32) + (x < 0).astype(I32) + x.astype(bool), "f", 0),
    "e5m2": (lambda x: x.astype(E5M2).astype(F16).astype(F32), "f", 0),
    "e4m3": (lambda x: x.astype(E4M3).astype(F32), "f", 0),
    "e4m3 to e5m2": (lambda x: x.astype(E4M3).astype(E5M2).astype(F32), "f", 0),
    "narrow constants": (lambda i: i + sum(jnp.full(SHAPE, number, dtype).astype(I8).astype(I32) for number, dtype in
                         ((300, I32), (-1e9, F32), (jnp.inf, F32), (jnp.nan, F32))), "i", 0),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, I32), "f", 0),
    "sum": (lambda x: x + jnp.sum(x, axis=1)[:, None] + jnp.sum(x), "f", 1e-4),
    "extremes": (lambda x, i: jnp.max(x, 1)[:, None] + jnp.min(x, 0) + jnp.max(i), "f i", 1e-6),
    "all and any": (lambda x: x + jnp.all(x > -9, axis=1)[:, None] + jnp.any(x > 2.5, axis=0), "f", 1e-6),
    "cumulative sum": (lambda i: jnp.cumsum(i, axis=1) + lax.cumsum(i, axis=0, reverse=True), "i", 0),
    "transpose": (lambda x: x.T.reshape(SHAPE) + x.reshape(64, 32).T, "f", 0),
    "stack": (lambda x: jnp.sum(jnp.stack([x, x * x], axis=-1), axis=-1), "f", 1e-6),
    "new axes": (lambda x: (x[:, None, :] + 1).reshape(SHAPE), "f", 0),
    "iota": (lambda i: i + lax.broadcasted_iota(I32, SHAPE, 0) * lax.broadcasted_iota(I32, SHAPE, 1), "i", 0),
    "product": (lambda b: row_sums(jnp.dot(b, b.T, preferred_element_type=F32)), "b", 1e-3),
    "float32 product": (lambda x: row_sums(jnp.dot(x, x.T, precision="highest")), "f", 1e-3),
    # Of terms with one sign: by default a GPU rounds float32 operands to 10 bits, which a cancelled sum would magnify.
    "rounded product": (lambda x: row_sums(jnp.dot(jnp.abs(x), jnp.abs(x.T))), "f", 2e-3),
    "int8 product": (lambda n: row_sums(lax.dot_general(n, n, BY_ROWS, preferred_element_type=I32)), "n", 0),
    "fixed loop": (lambda x: lax.fori_loop(0, 5, lambda k, y: y * 0.5 + k, x), "f", 1e-6),
    "loop": (lambda x, i: lax.fori_loop(jnp.min(i), jnp.max(i), lambda k, y: y * 0.5 + k, x), "f i", 1e-5),
    "loop of none": (lambda x, i: lax.fori_loop(jnp.max(i), jnp.min(i), lambda k, y: y + k, x), "f i", 0),
    "while": (lambda x: lax.while_loop(lambda y: jnp.max(y) > 0.1, lambda y: y * 0.5, x), "f", 0),
    "count of floats": (lambda x: lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1.5, c[1], c[2] * 0.5),
                        (F32(0), jnp.max(x), x))[2], "f", 0),
    "count of unsigned": (lambda x: lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + U32(1), c[1], c[2] * 0.5),
                          (U32(2**31 - 2), jnp.max(x).astype(U32) + U32(2**31), x))[2], "f", 0),
    "switch": (lambda x, i: sum(lax.switch(jnp.max(i) % 4 + k, [lambda x: x, lambda x: -x, lambda x: x * x], x)
                                for k in range(-1, 3)), "f i", 1e-6),
    "nested": (lambda x, i: lax.fori_loop(0, jnp.max(i), lambda k, y: lax.cond(k % 2 == 0, lambda z: z + k,
               lambda z: lax.fori_loop(0, k, lambda m, w: w + 0.25 * m, z), y), x), "f i", 1e-5),
    "called": (lambda x: jax.jit(jax.nn.relu)(x) + jax.checkpoint(jnp.tanh)(x), "f", 2e-6),
}  # fmt: skip


def tiles() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    normal = 3 * rng.standard_normal(SHAPE)
    integers = rng.integers(-9, 10, SHAPE)
    return {
        "f": jnp.asarray(normal, F32),
        "nan": jnp.asarray(np.where(rng.random(SHAPE) < 0.1, np.nan, -normal), F32),
        "b": jnp.asarray(normal, BF16),
        "f16": jnp.asarray(normal + 10, F16),
        "i": jnp.asarray(integers, I32),
        "j": jnp.asarray(np.where(integers == 0, 4, -integers), I32),
        "u": jnp.asarray(rng.integers(0, 2**32, SHAPE, np.uint64).astype(np.uint32)),
        "n": jnp.asarray(rng.integers(-128, 128, SHAPE), I8),
    }


GROUPS = [list(OPERATIONS)[first : first + 10] for first in range(0, len(OPERATIONS), 10)]


def run(names: list[str], arrays: dict[str, jax.Array], capability: int) -> list[jax.Array]:
    """Each operation's result by one kernel; bools as 0 and 1."""

    def result(name: str, values: dict[str, jax.Array]) -> jax.Array:
        function, operands, _ = OPERATIONS[name]
        made = function(*(values[operand] for operand in operands.split()))
        return made.astype(I32) if made.dtype == bool else made

    def body(refs, *out_refs):
        place = lax.broadcasted_iota(I32, SHAPE, 0), lax.broadcasted_iota(I32, SHAPE, 1)
        values = {name: _lowering.load(ref.at[place]) for name, ref in refs.items()}
        for name, ref in zip(names, out_refs, strict=True):
            _lowering.store(ref.at[place], result(name, values))

    return _lowering.launch(
        body,
        arrays,
        name="rules",
        grid=(1,),
        out_shape=[jax.eval_shape(functools.partial(result, name), arrays) for name in names],
        num_warps=4,
        num_stages=1,
        input_output_aliases={},
        capability=capability,
        most_shared=99 * 1024,
    )


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITONS)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_compiles(group, triton):
    with triton_kernels.written() as kernels:
        lowering.lower_for_gpu(functools.partial(run, group, capability=90), tiles())
    assert ".entry rules" in kernels[0].compile(triton).ptx


def written(function: Callable[[jax.Array], Any], dtype: Any) -> str:
    """What is written of a function of one tile of 8 elements."""

    def body(in_ref, out_ref):
        place = jnp.arange(8)
        _lowering.store(out_ref.at[place], function(_lowering.load(in_ref.at[place])))

    def call(x):
        sizes = dict(num_warps=4, num_stages=1, input_output_aliases={}, capability=90, most_shared=1)
        out = [jax.ShapeDtypeStruct((8,), dtype)]
        return _lowering.launch(body, x, name="rules", grid=(1,), out_shape=out, **sizes)

    with triton_kernels.written() as kernels:
        lowering.lower_for_gpu(call, jax.ShapeDtypeStruct((8,), dtype))
    return kernels[0].text


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (lambda i: i // 16, ["shrsi"]),
        (lambda i: i % 16, ["remui"]),
        (lambda i: jnp.max(i) // 16 + i, ["maxsi", "shrsi", "addi"]),
        (lambda i: i // i, ["divsi", "remsi", "xori", "cmpi", "cmpi", "andi", "extsi", "addi"]),
    ],
)
def test_floor_division_is_written_short(function, operations):
    """By what jnp calls it, so with every jax: twice as many operations would be right as well, and compiled slowly."""
    found = re.findall(r"arith\.(?!constant|muli)(\w+)", written(function, I32))  # places are multiplied
    assert found == operations


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_gives_what_jax_gives(group):
    arrays = tiles()
    device = jax.devices()[0]
    capability = int(device.compute_capability.replace(".", ""))
    results = jax.jit(functools.partial(run, group, capability=capability))(arrays)
    for name, result in zip(group, results, strict=True):
        function, operands, tolerance = OPERATIONS[name]
        with jax.default_device(jax.devices("cpu")[0]):
            expected = function(*(jnp.asarray(np.asarray(arrays[operand])) for operand in operands.split()))
        result, expected = (np.asarray(x).astype(np.float64) for x in (result, expected))
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance, err_msg=name)


LONG_GRID = (2, 3, 70_000)


def numbered(x: jax.Array, capability: int) -> jax.Array:
    """Each program of a grid, which is too long for a GPU's third axis, writes its number."""

    def body(_, out_ref):
        place = tuple(_lowering.program_id(axis) for axis in range(3))
        number = (place[0] * LONG_GRID[1] + place[1]) * LONG_GRID[2] + place[2]
        _lowering.store(out_ref.at[place], number)

    sizes = dict(num_warps=1, num_stages=1, input_output_aliases={}, capability=capability, most_shared=1)
    out = [jax.ShapeDtypeStruct(LONG_GRID, I32)]
    return _lowering.launch(body, x, name="numbered", grid=LONG_GRID, out_shape=out, **sizes)[0]


def test_a_grid_too_long_for_an_axis_is_counted_along_the_first():
    with triton_kernels.written() as kernels:
        text = lowering.lower_for_gpu(functools.partial(numbered, capability=90), jnp.zeros(1)).as_text()
    assert re.findall(r"grid_. = (\d+)", text) == ["420000", "1", "1"]
    assert kernels[0].text.count("tt.get_program_id x") == kernels[0].text.count("tt.get_program_id") == 1


@pytest.mark.gpu
def test_programs_of_a_long_grid_know_their_place():
    capability = int(jax.devices()[0].compute_capability.replace(".", ""))
    found = jax.jit(functools.partial(numbered, capability=capability))(jnp.zeros(1))
    np.testing.assert_array_equal(np.asarray(found).ravel(), np.arange(found.size))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (jnp.sort, "rules: no rule writes the primitive 'sort' as Triton IR"),
        (lambda x: x[jnp.arange(8)], "no rule writes the primitive 'gather'"),
        (lambda x: x * np.arange(8, dtype=np.float32), "an array of constants"),
        (lambda x: x + jnp.sum(jnp.zeros((8, 3), F32), axis=1), "powers of two"),
        (lambda x: lax.scan(lambda y, z: (y + z, None), x, jnp.zeros((4, 8)))[0], "a scan over arrays"),
        (lambda x: x**7, "a power of 7"),
        (lambda x: lax.reduce_precision(x, 8, 7), "no rule writes the primitive 'reduce_precision'"),
        (
            lambda x: jnp.dot(x + jnp.zeros((8, 1)), x + jnp.zeros((8, 1)), precision="high")[0],
            "precision .*HIGH",
        ),
        (
            lambda x: jnp.dot(*[(x + jnp.zeros((8, 1))).astype(jnp.uint8)] * 2)[0] + F32(0),
            "rules: the primitive 'dot_general': a product of uint8",
        ),
        (lambda x: jnp.dot(*[(x + jnp.zeros((8, 1))).astype(jnp.int16)] * 2)[0] + F32(0), "product of int16"),
        # Stored as wide as int8, so that the way there and back would have changed nothing.
        (lambda x: x.astype(I8).astype(jnp.int4).astype(F32), "rules: .* 'convert_element_type': dtype int4"),
        (lambda x: jnp.real(x + 1j), "rules: the primitive 'convert_element_type': dtype complex64"),
        (lambda x: jax.jit(jnp.sort)(x), "^rules: no rule writes the primitive 'sort'"),
        (lambda x: lax.fori_loop(0, 3, lambda _, y: y**7, x), "^rules: the primitive 'integer_pow': a power"),
    ],
)
def test_what_no_rule_writes_is_refused_by_name(function, message):
    with pytest.raises(NotImplementedError, match=message):
        written(function, F32)
