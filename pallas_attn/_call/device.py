"""The device a call is being traced for: what dispatch and configuration ask of it."""

import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Device:
    """`platform` is "gpu", "cpu" or "tpu"; `kind` the vendor's name; `num_cores` streaming multiprocessors."""

    platform: str
    kind: str
    num_cores: int
    compute_capability: int | None
    """90 for sm_90; None where there is no NVIDIA GPU."""

    @property
    def slug(self) -> str:
        """Folder name of this device's configs and results: "nvidia-h100-80gb-hbm3"."""
        return re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-")

    @property
    def asynchronous_products(self) -> bool:
        """Whether matrix products may run beside a program: on the data centre's Hopper, here, and Blackwell."""
        return 90 <= (self.compute_capability or 90) < 120

    @property
    def products_in_tensor_memory(self) -> bool:
        """Whether sums of products have a memory of their own: on the data centre's Blackwell."""
        return 100 <= (self.compute_capability or 0) < 120

    @property
    def shared_kib(self) -> int:
        """Shared memory that one program may have."""
        return 227 if self.asynchronous_products else {80: 163, 87: 163}.get(self.compute_capability or 0, 99)


# An abstract device carries no compute capability, so its name has to tell.
_CAPABILITY_OF_NAME = {
    "RTX 5090": 120,
    "B200": 100,
    "B100": 100,
    "H200": 90,
    "H100": 90,
    "L40": 89,
    "A100": 80,
    "T4": 75,
    "V100": 70,
}


def current_device() -> Device:
    """The abstract device of the mesh in use, if it has one; else the default device; else the first device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        platform = "gpu" if abstract.platform in ("gpu", "cuda") else abstract.platform
        capability = next(
            (c for name, c in _CAPABILITY_OF_NAME.items() if name in abstract.device_kind), None
        )
        return Device(platform, abstract.device_kind, abstract.num_cores or 1, capability)
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = None
    if device.platform == "gpu" and re.fullmatch(
        r"\d+\.\d+", cc := getattr(device, "compute_capability", "")
    ):
        major, minor = cc.split(".")
        capability = 10 * int(major) + int(minor)
    return Device(device.platform, device.device_kind, getattr(device, "core_count", None) or 1, capability)
