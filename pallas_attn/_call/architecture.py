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
    """That one program may have: a multiprocessor's, less one (CUDA's programming guide)."""
    warpgroups: bool = False
    """Whether matrix products may run beside a program, out of shared memory: on the data centre's Hopper and
    Blackwell."""
    tensor_memory: bool = False
    """Whether sums of products have a memory of their own: on the data centre's Blackwell."""


ARCHITECTURES = (
    Architecture(80, 163),
    Architecture(86, 99),
    Architecture(87, 163),
    Architecture(89, 99),
    Architecture(90, 227, warpgroups=True),
    Architecture(100, 227, warpgroups=True, tensor_memory=True),
    Architecture(103, 227, warpgroups=True, tensor_memory=True),
    Architecture(110, 227, warpgroups=True, tensor_memory=True),
    Architecture(120, 99),
    Architecture(121, 99),
)
HOPPER = 90


class Kind(NamedTuple):
    name: str
    """Part of the vendor's: an abstract device carries no capability, so its name has to tell."""
    capability: int
    gigabytes: int
    """A second that its memory moves, by its data sheet."""


# The first whose name is in a device's; of a capability, the first is what others of it are taken for.
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
    capability = HOPPER if capability is None else capability
    return max((known for known in ARCHITECTURES if known.capability <= capability), default=ARCHITECTURES[0])


def capability_of(kind: str) -> int | None:
    return next((known.capability for known in KINDS if known.name in kind), None)


def gigabytes_of(kind: str, capability: int | None) -> int:
    """A second that the memory moves of a GPU of this name or, where that tells nothing, of this capability."""
    named = [known for known in KINDS if known.name in kind]
    same = [known for known in KINDS if known.capability == of_capability(capability).capability]
    return (named or same or KINDS)[0].gigabytes
