"""What is known of GPUs: two tables, and one rule for a GPU that is in neither. Nobody else asks what a GPU is; what it
can do has a name here.

The rule: a GPU is taken for the newest that is known before it. One whose name tells nothing is a Hopper.
"""

from typing import NamedTuple

KIB = 1024  # bytes
# Of a multiprocessor of every GPU here (CUDA's programming guide): 32-bit registers, how many of them a thread may
# have, and bytes of shared memory that each program takes beside its own.
REGISTERS, THREAD_REGISTERS = 65536, 255
PROGRAM_BYTES = KIB
# Threads of a warp, and warps of a group that has asynchronous products together.
WARP, WARPGROUP = 32, 4
# Rows or columns of the tensor core's tile, and of an asynchronous product: as many for each warp.
LEAST_SIDE = 16
ASYNCHRONOUS_ROWS = LEAST_SIDE * WARPGROUP


class Architecture(NamedTuple):
    capability: int
    """90 for sm_90."""
    shared_kib: int
    """The most that one program may have (CUDA's programming guide)."""
    products: str = "mma"
    """The matrix instructions that compilers choose: "mma" is issued by single warps; "wgmma" (data-centre Hopper) and
    "tcgen05" (data-centre Blackwell) run asynchronously and read shared memory; "tcgen05" accumulates in a memory of
    its own."""

    @property
    def shared_bytes(self) -> int:
        return self.shared_kib * KIB

    @property
    def warpgroup_products(self) -> bool:
        return self.products == "wgmma"

    @property
    def asynchronous_products(self) -> bool:
        """Whether matrix products may run beside a program."""
        return self.products != "mma"

    @property
    def tensor_memory(self) -> bool:
        """Whether sums of products have a memory of their own."""
        return self.products == "tcgen05"

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may say when the next one may be launched."""
        return self.capability >= HOPPER.capability

    @property
    def converts_e4m3(self) -> bool:
        return self.capability >= ADA.capability


ARCHITECTURES = (
    AMPERE := Architecture(80, 163),
    Architecture(86, 99),
    Architecture(87, 163),
    ADA := Architecture(89, 99),
    HOPPER := Architecture(90, 227, "wgmma"),
    Architecture(100, 227, "tcgen05"),
    Architecture(103, 227, "tcgen05"),
    Architecture(110, 227, "tcgen05"),
    Architecture(120, 99),
    Architecture(121, 99),
)


class Card(NamedTuple):
    name: str
    """Part of the vendor's name: an abstract device carries no capability, so it is recognised by name."""
    capability: int
    gigabytes: int
    """Bytes a second, by its data sheet."""


# The first whose name is in a device's; others of a capability are taken for its first.
CARDS = (
    Card("RTX PRO", 120, 1792),
    Card("RTX 50", 120, 1792),
    Card("GB10", 121, 273),
    Card("Thor", 110, 273),
    Card("B300", 103, 8000),
    Card("B200", 100, 8000),
    Card("B100", 100, 8000),
    Card("H200", 90, 4800),
    Card("H100", 90, 3350),
    Card("L40", 89, 864),
    Card("L4", 89, 300),
    Card("RTX 40", 89, 1008),
    Card("A100", 80, 2039),
    Card("A30", 80, 933),
    Card("A10", 86, 600),
    Card("T4", 75, 320),
    Card("V100", 70, 900),
)


def of_capability(capability: int | None) -> Architecture:
    if capability is None:
        return HOPPER
    older = (known for known in ARCHITECTURES if known.capability <= capability)
    return max(older, default=AMPERE)


def too_old(capability: int | None) -> bool:
    """For our kernels, all of which copy asynchronously."""
    return capability is not None and capability < AMPERE.capability


def runs_hopper_code(capability: int | None) -> bool:
    """Of sm_90a, which runs on no other, and so is not for a GPU that is only taken for a Hopper."""
    return capability == HOPPER.capability


def capability_of(name: str) -> int | None:
    return next((card.capability for card in CARDS if card.name in name), None)


def gigabytes_of(name: str, capability: int | None) -> int:
    """A second that the memory moves of a GPU of this name or, where that tells nothing, of this capability."""
    named = [card for card in CARDS if card.name in name]
    alike = [card for card in CARDS if card.capability == of_capability(capability).capability]
    return (named or alike or CARDS)[0].gigabytes
