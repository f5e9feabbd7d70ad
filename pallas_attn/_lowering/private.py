"""The one name of JAX that is not its public interface, and the mechanism of XLA that is not either.

Seen to work with jax 0.11.2 and 0.12.0.1, and looked at by tests/test_private_names.py.
"""

from jax._src.effects import control_flow_allowed_effects
from jax.extend.core import Effect

PTX_CALL = "__gpu$xla.gpu.ptx"
"""XLA's own custom call for a kernel given as PTX (openxla, KernelCall in service/gpu/kernel_call.h)."""


def allow_in_control_flow(effect: type[Effect]) -> None:
    """Lets loops and branches hold equations with this effect."""
    control_flow_allowed_effects.add_type(effect)
