"""What is known of GPUs: two tables, and one rule for a GPU that is in neither.

That rule: it is what the newest before it is. One whose name tells nothing is a Hopper.
"""

from typing import NamedTuple

# Of a multiprocessor of every GPU here (CUDA's programming guide): 32-bit registers, how many of them a thread may
# have, and bytes of shared memory that each program takes beside its own.
REGISTERS, THREAD_REGISTERS = 65536, 255
PROGRAM_BYTES = 1024


class Architecture(NamedTuple):
    capability: int
    """90 for sm_90."""
    shared_kib: int
    """The most that one program may have (CUDA's programming guide)."""
    products: str = "mma"
    """The matrix instructions that compilers choose: "mma" is issued by single warps; "wgmma" (data-centre Hopper) and
    "tcgen05" (data-centre Blackwell) run asynchronously and read shared memory; "tcgen05" accumulates in a memory of
    its own."""


ARCHITECTURES = (
    Architecture(80, 163),
    Architecture(86, 99),
    Architecture(87, 163),
    Architecture(89, 99),
    HOPPER := Architecture(90, 227, "wgmma"),
    Architecture(100, 227, "tcgen05"),
    Architecture(103, 227, "tcgen05"),
    Architecture(110, 227, "tcgen05"),
    Architecture(120, 99),
    Architecture(121, 99),
)


class Kind(NamedTuple):
    name: str
    """Part of the vendor's name: an abstract device carries no capability, so it is recognised by name."""
    capability: int
    gigabytes: int
    """Bytes a second, by its data sheet."""


# The first whose name is in a device's; others of a capability are taken for its first.
KINDS = (
    Kind("RTX PRO", 120, 1792),
    Kind("RTX 50", 120, 1792),
    Kind("GB10", 121, 273),
    Kind("Thor", 110, 273),
    Kind("B300", 103, 8000),
    Kind("B200", 100, 8000),
    Kind("B100", 100, 8000),
    Kind("H200", 90, 4800),
    Kind("H100", 90, 3350),
    Kind("L40", 89, 864),
    Kind("L4", 89, 300),
    Kind("RTX 40", 89, 1008),
    Kind("A100", 80, 2039),
    Kind("A30", 80, 933),
    Kind("A10", 86, 600),
    Kind("T4", 75, 320),
    Kind("V100", 70, 900),
)


def of_capability(capability: int | None) -> Architecture:
    if capability is None:
        return HOPPER
    older = (known for known in ARCHITECTURES if known.capability <= capability)
    return max(older, default=ARCHITECTURES[0])


def capability_of(kind: str) -> int | None:
    return next((known.capability for known in KINDS if known.name in kind), None)


def gigabytes_of(kind: str, capability: int | None) -> int:
    """A second that the memory moves of a GPU of this name or, where that tells nothing, of this capability."""
    named = [known for known in KINDS if known.name in kind]
    alike = [known for known in KINDS if known.capability == of_capability(capability).capability]
    return (named or alike or KINDS)[0].gigabytes
