"""Which implementation serves a call: each has a name, a function, and a reason where it cannot serve.

An op registers its implementations; `resolve` picks one. With `implementation=None` the order is
cuda > pallas > triton > xla on a GPU and xla elsewhere. A forced implementation that cannot serve raises with its
reason.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_attn._call import architecture, ffi, symbolic
from pallas_attn._call.checks import fail, shown
from pallas_attn._call.device import Device, current_device

PACKAGE = str(Path(__file__).parents[1])
Reason = str | None
"""The reason why an implementation cannot serve; None when it can."""


def _hopper(device: Device) -> Reason:
    if not device.runs_hopper_code:
        return f"needs an sm_90 GPU (H100, H200), the device is {device.kind!r}"
    return None


def _library() -> Reason:
    available, reason = ffi.is_available()
    return None if available else reason


def _gpu(device: Device) -> Reason:
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, the device is {device.kind!r} (to debug without one: 'interpret')"
    if architecture.too_old(device.compute_capability):
        return f"needs sm_80 or newer, the device is sm_{device.compute_capability}"
    return None


def _known_gpu(device: Device) -> Reason:
    if device.platform == "gpu" and device.compute_capability is None:
        return f"the compute capability of {device.kind!r} is not known"
    return _gpu(device)


def _always(_: Any) -> Reason:
    return None


# In order of preference; "interpret" runs the Pallas kernel in Python, for debugging, and is never a default.
_DEVICES: dict[str, Callable[[Device], Reason]] = {
    "cuda": _hopper,
    "pallas": _gpu,
    "triton": _known_gpu,
    "xla": _always,
    "interpret": _always,
}
installed: dict[str, Callable[[], Reason]] = {"cuda": _library}
"""What an implementation lacks on this machine, apart from a device: filled in by the file that compiles kernels."""


def _missing(name: str) -> Reason:
    return installed[name]() if name in installed else None


@dataclass(frozen=True)
class Implementation:
    """`supports(operands)` gives the reason this function cannot serve them, or None.

    `yields(operands)` says that a later implementation in the order of preference, if it can serve, is the faster one.
    `takes_config`: whether it has tiles that a config names.
    `own_config`: the class of config that it takes instead of the op's; `check_config(operands, config)` raises for one
    that cannot serve.
    `prepare(operands)`: with what this implementation adds to them: what it can.
    `steps`: what else there is to do by it, by name: gradients, of which each says for itself whether it has tiles.
    """

    fn: Callable[..., Any]
    supports: Callable[[Any], Reason] = _always
    yields: Callable[[Any], bool] = lambda operands: False
    takes_config: bool = True
    own_config: type | None = None
    check_config: Callable[[Any, Any], None] = lambda operands, config: None
    prepare: Callable[[Any], Any] = lambda operands: operands
    steps: Mapping[str, "Implementation"] = field(default_factory=dict)

    def leaves_idle(self, config: Any, others: tuple[type, ...]) -> Reason:
        """Why a config would not be heard; `others`: classes that implementations of the op have as their own."""
        given = type(config).__name__
        if config is None or (self.own_config and isinstance(config, self.own_config)):
            return None
        if self.own_config:
            return f"takes a {self.own_config.__name__}, got a {given}"
        if isinstance(config, others):
            return f"takes no {given}"
        return None if self.takes_config else "takes no config"


_OPS: dict[str, dict[str, Implementation]] = {}
_recorders: list[dict[str, str]] = []


def register(op: str, implementations: dict[str, Implementation]) -> None:
    _OPS[op] = {name: implementations[name] for name in _DEVICES if name in implementations}


def check_name(function: str, op: str, requested: Any) -> None:
    """For functions that pass `implementation` on to an op, so that an error names them."""
    known = _OPS[op]
    expected = f"None or one of {', '.join(map(repr, known))}"
    if not isinstance(requested, str | None):
        fail(function, "implementation", expected, shown(requested), TypeError)
    if requested is not None and requested not in known:
        fail(function, "implementation", expected, repr(requested))


def resolve(
    op: str, case: Any, requested: str | None, operands: Mapping[str, Any], *, config: Any = None
) -> tuple[str, Callable[..., Any]]:
    """The implementation's name and function. ValueError for an unknown name, or one that cannot serve.

    config: the caller's, for which one that does not take it gives way; "xla", the last, is told apart.
    """
    known, device = _OPS[op], current_device()
    unknown_sizes = symbolic.reason(operands)
    own_configs = tuple(one.own_config for one in known.values() if one.own_config)

    def refusal(name: str) -> Reason:
        idle = known[name].leaves_idle(config, own_configs)
        if name == "xla":
            return known[name].supports(case) or (idle if isinstance(config, own_configs) else None)
        return _DEVICES[name](device) or unknown_sizes or idle or known[name].supports(case) or _missing(name)

    if requested is not None:
        check_name(op, op, requested)
        if reason := refusal(requested):
            raise ValueError(f"{op}: implementation {requested!r} cannot serve this call: {reason}")
        return _record(op, requested), known[requested].fn

    on_gpu = [name for name in _DEVICES if name in known and name != "interpret"]
    candidates = on_gpu if device.platform == "gpu" else ["xla"]
    reasons = {name: refusal(name) for name in candidates}
    able = [name for name in candidates if reasons[name] is None]
    if not able:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"{op}: no implementation can serve this call: {listed}")
    willing = [name for name in able if name != "xla" and not known[name].yields(case)]
    name = (willing or able)[0]
    # Only reasons of implementations for this device: the user can do nothing about others.
    if name == "xla" and (refused := [n for n in candidates if reasons[n] and not _DEVICES[n](device)]):
        because = "; ".join(f"{n}: {reasons[n]}" for n in refused)
        text = f"{op}: served by the slow 'xla' implementation because {because}"
        warnings.warn(text, skip_file_prefixes=(PACKAGE,))
    return _record(op, name), known[name].fn


def _record(op: str, name: str) -> str:
    for choices in _recorders:
        choices[op] = name
    return name


@contextlib.contextmanager
def record_implementations() -> Iterator[dict[str, str]]:
    """Collects {op: implementation} for every call that is traced inside the block (a cached jit traces nothing)."""
    choices: dict[str, str] = {}
    _recorders.append(choices)
    try:
        yield choices
    finally:
        _recorders.remove(choices)


def available_implementations() -> dict[str, dict[str, Reason]]:
    """{op: {implementation: None if it can run on this device, else the reason}}."""
    device = current_device()
    return {
        op: {name: _DEVICES[name](device) or _missing(name) for name in known} for op, known in _OPS.items()
    }
