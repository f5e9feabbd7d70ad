"""What jax.checkpoint's policies keep of attention, and what is said of derivatives that it has not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocksparse_inputs import SMALL_TILES as SMALL_BLOCKS
from flash_inputs import SMALL_TILES
from support import unchecked

import pallas_attn
from pallas_attn.ops.blocksparse_attention import builders

NAMED = jax.checkpoint_policies.save_only_these_names("attention")


def flash(x, **options):
    return unchecked(pallas_attn.flash_attention)(
        x, x, x, implementation="interpret", config=SMALL_TILES, **options
    )


def in_jax_nns_place(x, **options):
    return unchecked(pallas_attn.dot_product_attention)(x, x, x, implementation="interpret", **options)


def blocksparse(x, **options):
    layout, ends = builders.dense_causal(32, block_size=16, q_block_size=16), jnp.array([0, 32], jnp.int32)
    options = dict(cu_q_lens=ends, cu_k_lens=ends, implementation="interpret", config=SMALL_BLOCKS, **options)
    return unchecked(pallas_attn.blocksparse_attention)(x[0], x[0], x[0], layout, **options)


FUNCTIONS = pytest.mark.parametrize("function", [flash, in_jax_nns_place, blocksparse])


def kernels(jaxpr) -> list[str]:
    """Names of all kernels that are run."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(
                str(equation.params.get("name") or equation.params.get("name_and_src_info")).split()[0]
            )
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                found += kernels(getattr(inner, "jaxpr", inner))
    return found


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("policy", "name", "runs"), [
    (NAMED, "attention", 1), (NAMED, "other", 2), (NAMED, None, 2), (None, "attention", 2),
    (jax.checkpoint_policies.everything_saveable, None, 1),
])  # fmt: skip
@FUNCTIONS
def test_the_forward_kernel_runs_once_where_its_results_are_kept(function, policy, name, runs, dtype):
    def layer(x):
        return jnp.sum(jnp.sin(function(2 * x, residual_checkpoint_name=name)).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 32, 2, 16), dtype)
    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(layer, policy=policy)))(x)
    found = kernels(jaxpr.jaxpr)
    # In float32 single queries have a kernel of their own beside that of prompts.
    assert sum(kernel.endswith(("flash_attention", "_prefill")) for kernel in found) == runs, found
    assert sum(kernel.endswith(("_dq", "_dkv")) for kernel in found) == 2, found


def test_what_is_kept_gives_the_same_gradients():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 32, 2, 16)), jnp.bfloat16)

    def layer(x, name):
        return jnp.sum(jnp.sin(flash(2 * x, residual_checkpoint_name=name)).astype(jnp.float32))

    plain = jax.jit(jax.grad(functools.partial(layer, name=None)))(x)
    kept = jax.jit(jax.grad(jax.checkpoint(functools.partial(layer, name="attention"), policy=NAMED)))(x)
    np.testing.assert_array_equal(plain, kept)


@FUNCTIONS
def test_a_name_is_a_string(function):
    with pytest.raises(
        TypeError, match="argument 'residual_checkpoint_name': expected a str or None, got int"
    ):
        function(jnp.ones((1, 32, 2, 16)), residual_checkpoint_name=3)


@pytest.mark.parametrize("derivative", ["jvp", "jacfwd", "hessian"])
@FUNCTIONS
def test_forward_mode_is_refused_in_words(function, derivative):
    name = "blocksparse_attention" if function is blocksparse else "flash_attention"
    x = jnp.ones((1, 32, 2, 16))

    def total(x):
        return function(x).sum()

    with pytest.raises(
        NotImplementedError, match=rf"^{name}: has derivatives in reverse mode alone .*jax\.hessian"
    ):
        jax.jvp(total, (x,), (x,)) if derivative == "jvp" else getattr(jax, derivative)(total)(x)


@FUNCTIONS
def test_what_jax_finds_out_later_it_refuses_in_its_own_words(function):
    """No rule of ours is asked any more: forward mode through jax.jit, and transposition."""
    x = jnp.ones((1, 32, 2, 16))
    with pytest.raises(TypeError, match=r"forward-mode .* to a custom_vjp function"):
        jax.jvp(jax.jit(function), (x,), (x,))
    with pytest.raises(NotImplementedError, match="'custom_vjp_call' not implemented"):
        jax.linear_transpose(function, x)(function(x))


@pytest.mark.once
def test_second_derivatives_in_reverse_mode_by_xla():
    """As those of differences of gradients."""
    x, towards = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 8, 2, 16)), jnp.float32)

    def total(x):
        return jnp.sum(jnp.sin(pallas_attn.flash_attention(x, x, x, causal=True, implementation="xla")))

    gradient = jax.jit(jax.grad(total))
    found = jax.jit(jax.grad(lambda x: jnp.sum(gradient(x) * towards)))(x)
    step = 1e-2
    expected = (gradient(x + step * towards) - gradient(x - step * towards)) / (2 * step)
    np.testing.assert_allclose(found, expected, atol=2e-2 * float(jnp.abs(expected).max()))
