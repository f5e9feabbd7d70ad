"""A function with its own reverse-mode derivative: what is kept, which gradients are asked for, over which devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_attn._call import gradients, sharding

type Arrays = dict[str, Any]
type Results = tuple[jax.Array, ...]


class Rule(NamedTuple):
    """
    function: for messages.
    floats: names of the operands that have gradients, if given; arrays, or tuples of arrays, whose gradients are asked
        for as "name.0" and so on.
    forward: (operands, keep) -> (results, what else gradients need; None unless `keep`).
    gradients: (operands, results, kept, cotangents, asked) -> gradients by name, at least for the `asked`; None is 0.
    checkpoint_name: the name of results and residuals for policies of jax.checkpoint, or None.
    """

    function: str
    floats: tuple[str, ...]
    forward: Callable[[Any, bool], tuple[Results, Any]]
    gradients: Callable[[Any, Results, Any, Results, dict[str, None]], dict[str, Any]]
    checkpoint_name: str | None = None


def differentiable(rule: Rule, operands: Any) -> Results:
    """The results of `rule.forward(operands)`.

    The rule wraps `partition.run`, forward and backward, so that each device works on its own heads and sequences in
    both, and the partitioner never has to differentiate.
    """
    # Here, so that gradients of what is the same everywhere are summed over the axes.
    operands = sharding.vary_wide(operands, sharding.varying_axes(operands))
    given = {name: getattr(operands, name) for name in rule.floats}
    floats = {name: array for name, array in given.items() if array is not None}
    others = dataclasses.replace(operands, **dict.fromkeys(floats))

    with gradients.in_reverse_mode(
        rule.function, "second ones in reverse mode, too, by implementation 'xla'"
    ):
        return _with_rule(rule, False)(floats, others)[0]


def _with_rule(rule: Rule, keep: bool) -> Callable[[Arrays, Any], tuple[Results, Any]]:
    @jax.custom_vjp
    def attended(floats: Arrays, others: Any) -> tuple[Results, Any]:
        return rule.forward(dataclasses.replace(others, **floats), keep)

    def forwards(floats: Any, others: Any):
        # With symbolic zeros every leaf says whether its gradient is asked for.
        asked = [name for name, leaf in floats.items() if _asked(leaf)]
        asked += [
            f"{name}.{i}"
            for name, leaf in floats.items()
            if isinstance(leaf, tuple)
            for i, one in enumerate(leaf)
            if one.perturbed
        ]
        floats, others = primals((floats, others))
        # Again with the rule, for second derivatives.
        results, kept = _with_rule(rule, True)(floats, others)
        if rule.checkpoint_name is not None:
            # Named here, where results are residuals too: a policy that keeps them runs the kernel once.
            results, kept = checkpoint_name((results, kept), rule.checkpoint_name)
        saved = (floats, others, results, kept, dict.fromkeys(asked))
        return (results, kept if keep else None), saved

    def backwards(saved: Any, cotangents: Any):
        floats, others, results, kept, asked = saved
        of_results = tuple(map(array, cotangents[0]))
        operands = dataclasses.replace(others, **floats)
        found = rule.gradients(operands, results, kept, of_results, asked)
        placed = {
            name: None if gradient is None else jax.tree.map(sharding.placed_like, gradient, floats[name])
            for name, gradient in found.items()
        }
        return placed, None

    attended.defvjp(forwards, backwards, symbolic_zeros=True)
    return attended


def _asked(leaf: Any) -> bool:
    return any(one.perturbed for one in jax.tree.leaves(leaf, is_leaf=_is_primal))


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def primals(tree: Any) -> Any:
    """The values of what a forward rule with symbolic zeros is given."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_primal)


def array(cotangent: Any) -> jax.Array:
    """A cotangent, which may be a symbolic zero, as an array."""
    shape, dtype = cotangent.shape, cotangent.dtype
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(shape, dtype) if is_zero else cotangent
