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
    def shared_bytes(self) -> int:
        """Shared memory that one program may have."""
        return 1024 * _shared_kib(self.compute_capability)


# A program's shared memory by compute capability, in KiB: a multiprocessor's, less one (CUDA's programming guide).
SHARED_KIB = {
    70: 96,
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}


def _shared_kib(capability: int | None) -> int:
    """Of a GPU that is not in the table, what the newest that is older has; where a name tells nothing, Hopper's, as
    `asynchronous_products` has it."""
    if capability is None:
        return SHARED_KIB[90]
    older = [known for known in SHARED_KIB if known <= capability]
    return SHARED_KIB[max(older, default=75)]


# An abstract device carries no compute capability, so its name has to tell; the first of these that is in it.
_CAPABILITY_OF_NAME = {
    "RTX PRO": 120,
    "RTX 50": 120,
    "GB10": 121,
    "Thor": 110,
    "B300": 103,
    "B200": 100,
    "B100": 100,
    "H200": 90,
    "H100": 90,
    "L40": 89,
    "L4": 89,
    "RTX 40": 89,
    "A100": 80,
    "A30": 80,
    "A10": 86,
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
