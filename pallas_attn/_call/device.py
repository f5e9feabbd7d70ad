"""The device that a call is traced for: what dispatch and configuration need to know of it."""

import functools
import re
from dataclasses import dataclass

import jax

from pallas_attn._call import architecture
from pallas_attn._call.architecture import Architecture


@dataclass(frozen=True)
class Device:
    """`platform` is "gpu", "cpu" or "tpu"; `kind` the vendor's name; `num_cores` streaming multiprocessors."""

    platform: str
    kind: str
    num_cores: int
    compute_capability: int | None
    """90 for sm_90; None where there is no NVIDIA GPU, or none that is known."""

    @property
    def slug(self) -> str:
        """Folder name of this device's configs and results: "nvidia-h100-80gb-hbm3"."""
        return re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-")

    @functools.cached_property
    def architecture(self) -> Architecture:
        """What it can do, or what the GPU can do that it is taken for."""
        return architecture.of_capability(self.compute_capability)

    @functools.cached_property
    def bytes_ns(self) -> int:
        """A nanosecond that the memory moves."""
        return architecture.gigabytes_of(self.kind, self.compute_capability)

    @property
    def runs_hopper_code(self) -> bool:
        return architecture.runs_hopper_code(self.compute_capability)


def current_device() -> Device:
    """The abstract device of the mesh in use, if it has one; else the default device; else the first device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        platform = "gpu" if abstract.platform in ("gpu", "cuda") else abstract.platform
        kind = abstract.device_kind
        return Device(platform, kind, abstract.num_cores or 1, architecture.capability_of(kind))
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = None
    if device.platform == "gpu" and re.fullmatch(
        r"\d+\.\d+", cc := getattr(device, "compute_capability", "")
    ):
        capability = int(cc.replace(".", ""))
    return Device(device.platform, device.device_kind, getattr(device, "core_count", None) or 1, capability)
