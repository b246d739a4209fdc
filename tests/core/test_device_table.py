import pytest

from octavo_core.device_table import DEVICES, find_device
from octavo_core.errors import ConfigError

GIB = 1 << 30


def test_the_table_is_sorted_and_its_figures_are_possible() -> None:
    assert list(DEVICES) == sorted(DEVICES)
    for name, device in DEVICES.items():
        assert device.name == name
        named = int(name.rpartition("-")[2].removesuffix("g"))
        # The driver keeps some of what the name says; names count in 10⁹ on some.
        assert 0.9 * named * 10**9 < device.memory_bytes < named * GIB
        assert 100 < device.bandwidth_gb_s < 10_000
        assert device.fp8_tflops is None or 1.9 < device.fp8_tflops / device.bf16_tflops < 2.1


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100-80g", "h100-80g"),
        ("H100-80G", "h100-80g"),
        ("NVIDIA H100 80g", "h100-80g"),
        ("rtx_4090", "rtx-4090-24g"),
        ("GeForce RTX 4090", "rtx-4090-24g"),
        ("l4", "l4-24g"),
        ("L40S", "l40s-48g"),
        ("mi300x", "mi300x-192g"),
    ],
)
def test_names_are_found_however_they_are_written(name: str, found: str) -> None:
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100", ["several", "h100-80g, h100-nvl-94g, h100-pcie-80g"]),
        ("a100", ["several", "a100-40g, a100-80g"]),
        ("h100-80", ["not in the table", "h100-80g"]),
        ("rtx-4080", ["did you mean", "rtx-4090-24g"]),
        ("abacus", ["known: a10-24g", "v100-32g", "--device-memory"]),
        ("", ["known: "]),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_close(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        find_device(name)
    assert refused.value.field == "device"
    assert all(word in refused.value.message for word in words), refused.value.message
