"""Limits of the architectures that plans are tested for, as their devices report them."""

from __future__ import annotations

from cuflash.planning.device import DeviceLimits

KIB = 1024


def _limits(capability: tuple[int, int], block: int, sm: int, sms: int, l2: int) -> DeviceLimits:
    return DeviceLimits(
        compute_capability=capability,
        shared_per_block=block * KIB,
        shared_per_sm=sm * KIB,
        registers_per_block=65536,
        num_sms=sms,
        l2=l2 << 20,
    )


#: CUDA C Programming Guide, table of technical specifications by compute capability; SM count and
#: L2 of one product each (T4, A100, RTX 3080, RTX 4090, H200, B200, RTX 5090).
LIMITS = {
    "75": _limits((7, 5), 64, 64, 40, 4),
    "80": _limits((8, 0), 163, 164, 108, 40),
    "86": _limits((8, 6), 99, 100, 68, 5),
    "89": _limits((8, 9), 99, 100, 128, 72),
    "90": _limits((9, 0), 227, 228, 132, 50),
    "100": _limits((10, 0), 227, 228, 148, 126),
    "120": _limits((12, 0), 99, 100, 170, 96),
}
