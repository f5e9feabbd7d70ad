"""What implementation "triton" takes of JAX beyond its public interface: here a new JAX shows which name it broke."""

import importlib
import sys

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn._lowering import private


def test_private_names_are_where_they_were():
    assert private.missing() is None
    assert callable(importlib.import_module("jax._src.effects").control_flow_allowed_effects.add_type)
    assert private.pallas_takes_rules(), private.PALLAS_RULES


def test_what_is_public_but_not_promised():
    aval = jax.core.ShapedArray((2,), jnp.dtype("float32"))
    assert aval.update(shape=(3,), dtype=jnp.dtype("int32"), weak_type=False).shape == (3,)
    assert hasattr(jax.interpreters.batching, "primitive_batchers")
    for name in ("register_lowering", "i32_attr", "ir"):
        assert hasattr(jax.interpreters.mlir, name), f"jax.interpreters.mlir.{name}"
    loop = jax.make_jaxpr(lambda n: jax.lax.while_loop(lambda x: x < n, lambda x: x + 1, 0))(3).eqns[0]
    assert {"cond_nconsts", "body_nconsts", "cond_jaxpr", "body_jaxpr"} <= loop.params.keys()
    fixed = jax.make_jaxpr(lambda n: jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, n))(3).eqns[0]
    assert {"jaxpr", "length"} <= fixed.params.keys()
    branch = jax.make_jaxpr(lambda p: jax.lax.cond(p, lambda: 1, lambda: 2))(True).eqns[-1]
    assert "branches" in branch.params


def test_a_missing_name_is_the_reason_of_a_refusal(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.effects", None)
    assert private._found(private.ALLOWED_EFFECTS) is None
    monkeypatch.setattr(private, "_allowed_effects", None)
    struct = jax.ShapeDtypeStruct
    pool, new = struct((4, 16, 2, 64), jnp.bfloat16), struct((3, 2, 64), jnp.bfloat16)

    def write(*arrays):
        return pallas_attn.write_kv(*arrays, implementation="triton")

    with pytest.raises(
        ValueError, match=r"'triton' cannot serve this call: jax .* has no jax\._src\.effects"
    ):
        lowering.lower_for_gpu(write, new, new, pool, pool, struct((3,), jnp.int32))
