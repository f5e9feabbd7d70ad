"""The two names of JAX and the mechanism of XLA in use that are not public interfaces.

They work with jax 0.11.2 and 0.12.0.1 and are checked by tests/test_private_names.py. Without the first name there is
no implementation "triton"; without the second, kernels of "pallas" use tiles that need no limit on registers, and do
nothing early (`dependent_launch.py`).
"""

import importlib
from collections.abc import Callable
from typing import Any

from jax.extend.core import Effect, Primitive
from jax.interpreters import mlir

ALLOWED_EFFECTS = "jax._src.effects.control_flow_allowed_effects"
PALLAS_RULES = "jax._src.pallas.triton.lowering.register_lowering"
PTX_CALL = "__gpu$xla.gpu.ptx"
"""XLA's own custom call for a kernel given as PTX (openxla, KernelCall in service/gpu/kernel_call.h)."""


def _found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


_allowed_effects = _found(ALLOWED_EFFECTS)
_pallas_rules = _found(PALLAS_RULES)


def missing() -> str | None:
    """The name that this JAX lacks, or None."""
    return ALLOWED_EFFECTS if _allowed_effects is None else None


def allow_in_control_flow(effect: type[Effect]) -> None:
    """Lets loops and branches hold equations with this effect."""
    if _allowed_effects is not None:
        _allowed_effects.add_type(effect)


def pallas_takes_rules() -> bool:
    """Whether Pallas' Triton lowering exists and accepts rules for new primitives."""
    return _pallas_rules is not None


class _Line(Effect):
    """Keeps JAX from dropping what has no result."""


def in_pallas(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one array, to one like it, which Pallas' Triton lowering writes by `rule(ctx, value)`."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    return _ruled(primitive, rule)


def line_in_pallas(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A line of a kernel's, without a result, which Pallas' Triton lowering writes by `rule(ctx, *values,
    **parameters)`."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *_, **__: ([], {_Line()}))
    return _ruled(primitive, rule)


def _ruled(primitive: Primitive, rule: Callable[..., Any]) -> Callable[..., Any]:
    if _pallas_rules is not None:
        _pallas_rules(primitive)(rule)
    return primitive.bind


def assembly(line: str, constraints: str, result: Any, *operands: Any, pure: bool) -> Any:
    """In such a rule: a line of assembly, whose result is of that type."""
    made = mlir.ir.Operation.create(
        "tt.elementwise_inline_asm",
        results=[result],
        operands=operands,
        attributes={
            "asm_string": mlir.ir.StringAttr.get(line),
            "constraints": mlir.ir.StringAttr.get(constraints),
            "pure": mlir.ir.BoolAttr.get(pure),
            "packed_element": mlir.i32_attr(1),
        },
    )
    return made.result
