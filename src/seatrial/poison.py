"""What memory holds before a kernel writes it: two kinds of poison, known to the child and to the parent.

Buffers that the child hands to a kernel are filled with NaN or with FINITE. Memory that the kernel allocates
for itself on the CPU is filled byte by byte by the C allocator (glibc's M_PERTURB), on allocation and on
release; the bytes are chosen so that every float format reads an absurd number.
"""

from __future__ import annotations

NAN = float("nan")
ALL_BITS = 0xFF  # around and between the tensors of a call: NaN in float formats, -1 in integers
OTHER_BITS = 0x47  # instead of it: 51015.3 in fp32, 51072 in bf16, 7.3 in fp16; 18247 in int16
FINITE = 192.0  # unlikely as a result, exact in every float format of 8 bits or more

# glibc fills released memory with the byte and fresh memory with its complement.
BYTE_UNDER_NAN = 0x80  # fresh memory reads 0x7F7F…: 3.4e38 in fp32 and bf16, NaN in fp16 and fp8
BYTE_UNDER_FINITE = 0xBE  # fresh memory reads 0x4141…: 12.1 in fp32 and bf16


def perturb_byte(poison: float | None) -> int:
    """The byte for the allocator under this poison; 0 leaves memory alone."""
    if poison is None:
        return 0
    return BYTE_UNDER_NAN if poison != poison else BYTE_UNDER_FINITE


def allocator_fills(poison: float) -> tuple[int, int]:
    """The two bytes that unwritten memory may repeat under this poison: fresh, released."""
    byte = perturb_byte(poison)
    return byte ^ 0xFF, byte
