"""Common GPUs by name: memory, bandwidth and peak arithmetic.

Bandwidth and TFLOPS are the peaks of the vendors' data sheets and architecture papers, without
sparsity and with 32-bit accumulation: NVIDIA's for A10, A10G, A40, A100, H100, H200, L4, L40S,
T4, V100, RTX A6000 and RTX 6000 Ada, its GA102, Ada and Blackwell papers for the GeForce
cards, its HGX page for B200, and AMD's for MI300X and MI325X. The rows of A10G, H100 NVL and
RTX 5090 are the least sure. Memory is what the driver reports
as the device's total (what torch names in an out-of-memory error), which is less than what the
name says; it differs by a few hundred MiB between driver versions, and error correction, where
it is on as delivered, takes a share.
"""

from __future__ import annotations

import msgspec

from octavo_core.errors import ConfigError

_GIB = 1 << 30


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device.

    Attributes:
        name: As ``--device`` takes it.
        memory_bytes: Total as the driver reports it.
        bandwidth_gb_s: Peak of its memory, in 10⁹ bytes a second.
        bf16_tflops: Dense peak in bfloat16; in float16 where there is no bfloat16 (T4, V100).
        fp8_tflops: Dense peak in 8-bit floats; None where there are none.
    """

    name: str
    memory_bytes: int
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None


def _table(*rows: tuple[str, float, float, float, float | None]) -> dict[str, DeviceSpec]:
    return {
        name: DeviceSpec(
            name=name,
            memory_bytes=int(gib * _GIB),
            bandwidth_gb_s=bandwidth,
            bf16_tflops=bf16,
            fp8_tflops=fp8,
        )
        for name, gib, bandwidth, bf16, fp8 in rows
    }


# Name, memory in GiB, bandwidth in GB/s, dense bfloat16 and 8-bit TFLOPS. By name.
DEVICES = _table(
    ("a10-24g", 22.0, 600, 125, None),
    ("a100-40g", 39.4, 1555, 312, None),
    ("a100-80g", 79.1, 2039, 312, None),
    ("a10g-24g", 22.0, 600, 70, None),
    ("a40-48g", 44.4, 696, 149.7, None),
    ("b200-180g", 178.3, 7700, 2250, 4500),
    ("h100-80g", 79.1, 3350, 989.4, 1978.9),
    ("h100-nvl-94g", 93.0, 3900, 835.5, 1670.5),
    ("h100-pcie-80g", 79.1, 2000, 756, 1513),
    ("h200-141g", 139.8, 4800, 989.4, 1978.9),
    ("l4-24g", 22.0, 300, 121, 242.5),
    ("l40s-48g", 44.4, 864, 362.1, 733),
    ("mi300x-192g", 191.7, 5300, 1307.4, 2614.9),
    ("mi325x-256g", 255.7, 6000, 1307.4, 2614.9),
    ("rtx-3090-24g", 23.6, 936, 71, None),
    ("rtx-4090-24g", 23.5, 1008, 165.2, 330.3),
    ("rtx-5090-32g", 31.3, 1792, 209.5, 419),
    ("rtx-6000-ada-48g", 44.4, 960, 364.2, 728.5),
    ("rtx-a6000-48g", 47.4, 768, 154.8, None),
    ("t4-16g", 14.6, 320, 65, None),
    ("v100-32g", 31.7, 900, 125, None),
)


def find_device(name: str) -> DeviceSpec:
    """Return the device of that name, with or without its size (``l4`` is ``l4-24g``).

    Args:
        name: Upper or lower case; blanks and underscores count as dashes.

    Raises:
        ConfigError: There is none, or several sizes; the message names those that are close.
    """
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    key = key.removeprefix("nvidia-").removeprefix("amd-").removeprefix("geforce-")
    if key in DEVICES:
        return DEVICES[key]
    # "h100" is several devices, and none of them the obvious one; "l4" is not "l40s".
    same = [known for known in DEVICES if known.startswith(key + "-")] if key else []
    if len(same) == 1:
        return DEVICES[same[0]]
    close = same or _close_matches(key)
    hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(DEVICES)}."
    reason = "is several devices" if same else "is not in the table"
    raise ConfigError(
        f"device {name!r} {reason}; {hint} Any other is planned by --device-memory.",
        field="device",
    )


def _close_matches(key: str) -> list[str]:
    import difflib  # takes longer to import than the table

    short = {known.rpartition("-")[0]: known for known in DEVICES}
    found = difflib.get_close_matches(key, [*DEVICES, *short], n=4, cutoff=0.5)
    return sorted({short.get(name, name) for name in found})
