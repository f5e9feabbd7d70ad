"""The attention modules: options in prompts as in decoding, and positions and layers that they cannot serve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import small_cache

from pallas_attn import PagedLatentCache, mla_schedule, nn
from pallas_attn.nn import LatentGQA, MLAConfig, MultiHeadLatentAttention, PagedAttention, linen

TABLES = jnp.array([[2, 0], [1, 3]], jnp.int32)
COUNTED = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
OPTIONS = {
    "plain": {},
    "scale": dict(scale=0.7),
    "softcap": dict(softcap=0.8),
    "window": dict(sliding_window=3),
    "alibi": dict(alibi_slopes=nn.alibi_slopes(4)),
    "sinks": dict(sinks=True, num_heads=4),
}
OPTIONS["all"] = functools.reduce(dict.__or__, OPTIONS.values())
SINKS = jnp.array([1.0, -2.0, 0.0, 3.0])


def new_tokens(n: int = 6, heads: tuple[int, ...] = (4, 2, 2), dim: int = 16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (2, n, h, dim)) for k, h in zip(keys, heads, strict=True)]


def paged(options: dict, implementation: str | None = None) -> PagedAttention:
    module = PagedAttention(**options, implementation=implementation)
    if module.sinks is not None:
        module.sinks[...] = SINKS
    return module


def latent_cache(layers: int = 1) -> PagedLatentCache:
    return PagedLatentCache.create(
        num_layers=layers, num_pages=4, page_size=8, block_tables=TABLES, dtype=jnp.float32
    )


@functools.cache
def prompted(name: str, implementation: str) -> np.ndarray:
    """What a module with these options gives for a prompt."""
    module, cache = paged(OPTIONS[name], implementation), small_cache(num_layers=1, block_tables=TABLES)
    return np.asarray(jax.jit(lambda cache, *new: module(*new, cache, 0, COUNTED)[0])(cache, *new_tokens()))


@pytest.mark.parametrize(
    ("name", "implementation"), [("all", "interpret"), *((name, "xla") for name in OPTIONS)]
)
def test_a_prompt_sees_what_decoding_sees(name, implementation):
    module, whole = paged(OPTIONS[name], implementation), prompted(name, implementation)
    new, cache = new_tokens(), small_cache(num_layers=1, block_tables=TABLES)
    step = jax.jit(lambda cache, at, *new: module(*new, cache, 0, at))
    for i in range(6):
        out, cache = step(cache, COUNTED[:, i : i + 1], *[x[:, i : i + 1] for x in new])
        np.testing.assert_allclose(np.asarray(out)[:, 0], whole[:, i], atol=2e-6)
    if name != "plain":
        assert np.abs(prompted("plain", "xla") - whole).max() > 1e-2


@pytest.mark.slow
@pytest.mark.once
def test_a_prompts_window_may_be_traced():
    """As layers have it that are scanned while their windows alternate; in place of the module's own."""
    new, cache = new_tokens(), small_cache(num_layers=1, block_tables=TABLES)
    run = jax.jit(
        lambda window: paged(dict(sliding_window=2))(*new, cache, 0, COUNTED, sliding_window=window)[0]
    )
    for window in (-1, 1, 3, 2**31 - 1):
        options = dict(sliding_window=max(window, 1))
        expected, _ = paged(options)(*new, cache, 0, COUNTED)
        np.testing.assert_allclose(run(jnp.int32(window)), expected, atol=1e-6)
        static, _ = paged(dict(sliding_window=2))(*new, cache, 0, COUNTED, **options)
        np.testing.assert_array_equal(static, expected)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_scan_over_layers_whose_windows_alternate(implementation):
    """Decoding: windows are traced scalars, and every layer gives what it gives with a static one."""
    windows, module = (2, 5), PagedAttention(implementation=implementation)
    query, key, value = (x[:, :1] for x in new_tokens())
    cache = small_cache(num_layers=len(windows), block_tables=TABLES)
    pools = (jax.random.normal(jax.random.key(i), cache.key_cache.shape) for i in (1, 2))
    cache = cache.replace(**dict(zip(("key_cache", "value_cache"), pools, strict=True)))
    at = jnp.array([[6], [3]], jnp.int32)

    @jax.jit
    def scanned(cache, windows):
        def layer(carry, xs):
            query, cache = carry
            index, window = xs
            out, cache = module(query, key, value, cache, index, at, sliding_window=window)
            return (out, cache), out  # the next layer asks with what this one found

        (_, cache), outs = jax.lax.scan(layer, (query, cache), (jnp.arange(len(windows)), windows))
        return outs, cache

    @jax.jit
    def unrolled(cache):
        x, outs = query, []
        for index, window in enumerate(windows):
            x, cache = module(x, key, value, cache, index, at, sliding_window=window)
            outs.append(x)
        return jnp.stack(outs), cache

    outs, written = scanned(cache, jnp.array(windows, jnp.int32))
    expected, expected_cache = unrolled(cache)
    np.testing.assert_allclose(outs, expected, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, written, expected_cache)
    # The rows hold seven tokens and four: without windows both see more in the first layer, row 0 in the second too.
    unhidden, _ = scanned(cache, jnp.full(len(windows), 2**31 - 1, jnp.int32))
    alone, _ = scanned(cache, jnp.array([windows[0], 2**31 - 1], jnp.int32))
    assert (np.abs(outs - unhidden)[0].max(axis=(1, 2, 3)) > 1e-2).all()
    assert np.abs(outs - alone)[1, 0].max() > 1e-2


@pytest.mark.parametrize("n", [1, 6])
def test_linen_has_the_same_options(n):
    new, cache = [x[:, :n] for x in new_tokens()], small_cache(num_layers=1, block_tables=TABLES)
    options = {k: v for k, v in OPTIONS["all"].items() if k != "num_heads"}
    module = linen.PagedAttention(**options)
    arguments = (*new, cache, 0, COUNTED[:, :n])
    variables = module.init(jax.random.key(0), *arguments)
    assert variables["params"]["sinks"].shape == (4,)
    out, _ = module.apply({"params": {"sinks": SINKS}}, *arguments)
    expected, _ = paged(OPTIONS["all"])(*arguments)
    np.testing.assert_array_equal(out, expected)


def test_sinks_are_learned():
    module, cache = PagedAttention(sinks=True, num_heads=4), small_cache(num_layers=1, block_tables=TABLES)
    (name,) = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert name == "sinks"
    gradient = nnx.grad(lambda module: module(*new_tokens(), cache, 0, COUNTED)[0].sum())(module)
    assert (np.asarray(gradient["sinks"][...]) != 0).all()


def test_slopes_of_published_models():
    assert nn.alibi_slopes(8) == tuple(2.0**-k for k in range(1, 9))
    np.testing.assert_allclose(nn.alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    assert len(nn.alibi_slopes(71)) == 71
    cache = small_cache(num_layers=1, block_tables=TABLES)
    with pytest.raises(ValueError, match=r"PagedAttention: argument 'alibi_slopes': expected num_heads=4 "):
        PagedAttention(alibi_slopes=[1.0, 0.5])(*new_tokens(), cache, 0, COUNTED)
    with pytest.raises(ValueError, match="argument 'num_heads': expected None without sinks, got 4"):
        PagedAttention(num_heads=4)


def mla_layer() -> MultiHeadLatentAttention:
    config = MLAConfig(hidden_size=12, num_heads=2, qk_nope_head_dim=8, v_head_dim=8)
    return MultiHeadLatentAttention(config, implementation="xla", rngs=nnx.Rngs(0))


def mla(absorbed: bool):
    layer = mla_layer()
    x = jax.random.normal(jax.random.key(1), (2, 6, 12))
    return lambda cache, at, layer_index=0, **more: layer(
        leading(x, at), cache, layer_index, at, absorbed=absorbed or None, **more
    )


def leading(x: jax.Array, at: jax.Array) -> jax.Array:
    """As many of the tokens as there are positions: of both sequences, or of the first in the ragged form."""
    return x[:, : at.shape[1]] if at.ndim == 2 else x[0, : at.size]


def attending(module, heads=(4, 2, 2)):
    new = new_tokens(heads=heads)
    return lambda cache, at, layer=0, **more: module(*[leading(x, at) for x in new], cache, layer, at, **more)


MODULES = {
    "PagedAttention": (lambda: attending(PagedAttention(implementation="xla")), small_cache),
    "LatentGQA": (lambda: attending(LatentGQA(implementation="xla")), None),
    "MultiHeadLatentAttention": (lambda: mla(False), None),
    "MultiHeadLatentAttention, absorbed": (lambda: mla(True), None),
}


def made(name: str, layers: int = 1):
    module, cache = MODULES[name]
    return module(), latent_cache(layers) if cache is None else cache(num_layers=layers, block_tables=TABLES)


SERVED_ROWS = (
    *([0, 1, 2, 3, 4, 5], [0, 1, 2, -1, -1, -1], [-1] * 6, [-1, -1, 0, 1, 2, 3]),
    *([4, 5, 6, -1, -1, -1], [7, 8, 9, 10, 11, 12], [-1, 0, -1, 1, 2, -1]),
)
OTHER_ROWS = ([0, 1, 3, 4, 5, 6], [0] * 6, [5, 4, 3, 2, 1, 0], [0, -1, -1, 3, -1, -1])
NEWEST_ROWS = (
    *([0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12], [-1, -1, 0, 1, 2, 3], [-1, -1, -1, -1, 8, 9]),
    [-1] * 6,
)
SCATTERED_ROWS = ([0, 1, 2, -1, -1, -1], [0, 1, 3, 4, 5, 6], [0] * 6, [5, 4, 3, 2, 1, 0])


@pytest.mark.once
@pytest.mark.parametrize("name", MODULES)
def test_positions_that_cannot_be_served(name):
    """Refused where they are known; where they are traced, NaN in their row and nothing else in the other."""
    absorbed = name.endswith("absorbed")
    served, others = (NEWEST_ROWS, SCATTERED_ROWS) if absorbed else (SERVED_ROWS, OTHER_ROWS)
    call, cache = made(name)
    run = jax.jit(lambda at: call(cache, at)[0])
    right = np.asarray(run(jnp.asarray([served[0]] * 2, jnp.int32)))
    for row in served:
        out = np.asarray(run(jnp.asarray([served[0], row], jnp.int32)))
        assert np.isfinite(out).all()
        # Prompts from their beginning may be served by another program than a batch with others.
        np.testing.assert_allclose(out[0], right[0], atol=1e-6)
    for row in others:
        at = jnp.asarray([served[0], row], jnp.int32)
        out = np.asarray(run(at))
        assert np.isnan(out[1][np.array(row) >= 0]).all(), row
        np.testing.assert_allclose(out[0], right[0], atol=1e-6)
        with pytest.raises(
            ValueError, match=rf"^{name.split(',')[0]}: argument 'positions': expected .* in row 1"
        ):
            call(cache, at)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("absorbed")])
def test_ragged_positions_that_cannot_be_served(name):
    call, cache = made(name)
    bounds = jnp.array([0, 3, 5], jnp.int32)
    run = jax.jit(lambda at: call(cache, at, cu_q_lens=bounds)[0])
    right = np.asarray(run(jnp.array([0, 1, 2, 4, 5, -1], jnp.int32)))
    assert np.isfinite(right).all()
    for other in ([4, 6], [5, 4], [-1, 0]):
        at = jnp.array([0, 1, 2, *other, 77], jnp.int32)
        out = np.asarray(run(at))
        assert np.isnan(out[3:5]).all()
        np.testing.assert_allclose(out[:3], right[:3], atol=1e-6)
        with pytest.raises(ValueError, match=r"argument 'positions': expected consecutive .* in row 1$"):
            call(cache, at, cu_q_lens=bounds)


def all_options() -> PagedAttention:
    return paged(OPTIONS["all"], "xla")


def tokens_of(module):
    """A call of the module with the tokens at (rows, at) of two sequences, in the shape of these; NaN at negative
    positions, which are padding."""
    if isinstance(module, MultiHeadLatentAttention):
        inputs = [jax.random.normal(jax.random.key(1), (2, 6, 12))]
    else:
        inputs = new_tokens()

    @jax.jit
    def call(cache, rows, at, **bounds):
        index, real = (rows, jnp.maximum(at, 0)), at >= 0
        new = [jnp.where(real.reshape(*at.shape, *[1] * (x.ndim - 2)), x[index], jnp.nan) for x in inputs]
        return module(*new, cache, 0, at, **bounds)

    return call


KINDS = {
    "PagedAttention": (all_options, lambda: small_cache(num_layers=1, block_tables=TABLES)),
    "LatentGQA": (lambda: LatentGQA(implementation="xla"), latent_cache),
    "MultiHeadLatentAttention": (lambda: mla_layer(), latent_cache),
}


@pytest.mark.parametrize("name", KINDS)
def test_chunks_and_mixed_batches_give_what_one_token_at_a_time_gives(name):
    """A prompt in chunks beside a shorter one that is padded on either side, and beside tokens of an answer."""
    make, empty = KINDS[name]
    call = tokens_of(make())

    def batched(cache, rows):
        at = jnp.array(rows, jnp.int32)
        out, cache = call(cache, np.broadcast_to(np.arange(2)[:, None], at.shape), at)
        out = np.asarray(out)
        for row, positions in enumerate(rows):
            for column, position in enumerate(positions):
                if position >= 0:
                    np.testing.assert_allclose(out[row, column], expected[row, position], atol=2e-5)
        return cache

    def ragged(cache, first, second):
        """Of seven tokens, padding included, so that one compiled program serves every call."""
        count = len(first) + len(second)
        at = np.array([*first, *second, *[-1] * (7 - count)], np.int32)
        rows = np.array([0] * len(first) + [1] * (7 - len(first)))
        bounds = jnp.array([0, len(first), count], jnp.int32)
        out, cache = call(cache, rows, jnp.asarray(at), cu_q_lens=bounds)
        for row, position, got in zip(rows, at, np.asarray(out), strict=True):
            if position >= 0:
                np.testing.assert_allclose(got, expected[row, position], atol=2e-5)
        return cache

    expected = np.zeros((2, 6, 1))
    single = empty()
    outs = []
    for i in range(6):
        out, single = call(single, np.array([[0], [1]]), jnp.full((2, 1), i, jnp.int32))
        outs.append(np.asarray(out)[:, 0])
    expected = np.stack(outs, axis=1)
    assert np.abs(expected[:, 5]).max() > 0.01

    cache = batched(empty(), [[0, 1, 2], [-1, 0, 1]])
    batched(cache, [[3, 4, 5], [2, 3, -1]])
    cache = ragged(empty(), [0, 1, 2], [0])
    cache = ragged(cache, [3], [1, 2, 3, 4])
    ragged(cache, [4, 5], [])
    ragged(cache, [], [5])


@pytest.mark.once
@pytest.mark.parametrize("name", MODULES)
def test_traced_layers_out_of_range(name):
    call, cache = made(name, layers=2)
    run = jax.jit(lambda at, layer: call(cache, at, layer))
    for n in (1, 6):
        right, written = run(COUNTED[:, :n], 1)
        if n > 1:  # decoding: a model's layers in a scan give what they give one after the other
            expected, _ = jax.jit(lambda at: call(cache, at, 1))(COUNTED)
            np.testing.assert_array_equal(right, expected)
        assert any(
            (np.asarray(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (written, cache)), strict=True)
        )
        for layer in (2, -1, 2**31 - 1):
            out, after = run(COUNTED[:, :n], layer)
            assert np.isnan(out).all()
            jax.tree.map(np.testing.assert_array_equal, after, cache)


@pytest.mark.once
def test_absorbed_serves_chunks_and_left_padding():
    """As token by token: a prompt in two chunks in one row, a shorter one padded on the left in the other."""
    module, cache = mla_layer(), latent_cache()
    x = jax.random.normal(jax.random.key(2), (2, 6, 12))
    run = jax.jit(lambda x, cache, at: module(x, cache, 0, at, absorbed=True))
    expected, single = [], cache
    for i in range(6):
        out, single = run(x[:, i : i + 1], single, COUNTED[:, i : i + 1])
        expected.append(out[:, 0])
    first, cache = run(
        jnp.stack([x[0, :3], jnp.concatenate([x[1, :1] * 0, x[1, :2]])]),
        cache,
        jnp.array([[0, 1, 2], [-1, 0, 1]], jnp.int32),
    )
    second, cache = run(jnp.stack([x[0, 3:], x[1, 2:5]]), cache, jnp.array([[3, 4, 5], [2, 3, 4]], jnp.int32))
    expected = np.stack(expected, axis=1)
    np.testing.assert_allclose(jnp.concatenate([first[0], second[0]]), expected[0], atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([first[1, 1:], second[1]]), expected[1, :5], atol=1e-5)


def test_what_only_one_form_takes_is_refused():
    layer = mla_layer()
    schedule = mla_schedule(jnp.full(2, 6, jnp.int32), num_heads=2, q_len=6, num_parts=2)
    with pytest.raises(
        ValueError, match="argument 'schedule': expected None without absorbed, got an MLASch"
    ):
        layer(jnp.ones((2, 6, 12)), latent_cache(), 0, COUNTED, schedule=schedule)
    bounds = jnp.array([0, 6, 6], jnp.int32)
    with pytest.raises(ValueError, match="argument 'absorbed': expected False or None with cu_q_lens, got"):
        layer(jnp.ones((6, 12)), latent_cache(), 0, COUNTED[0], cu_q_lens=bounds, absorbed=True)
    short = latent_cache().replace(latent_cache=latent_cache().latent_cache.astype(jnp.bfloat16))
    with pytest.raises(
        TypeError, match=r"'cache.latent_cache': expected dtype float32 or uint8, got bfloat16"
    ):
        layer(jnp.ones((2, 6, 12)), short, 0, COUNTED)
