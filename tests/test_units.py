"""Numbers as people read them, and device names as people write them."""

from __future__ import annotations

import pytest

from autoplace.device_names import canonical_device, is_accelerator
from autoplace.errors import UsageError
from autoplace.units import (
    format_bytes,
    format_duration,
    format_percent,
    format_rate,
    format_seconds,
    significant,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(1.5), "1.50 s"),
        (format_seconds(0.0413), "41.3 ms"),
        (format_seconds(4.5e-6), "4.50 µs"),
        (format_seconds(3e-9), "3.00 ns"),
        (format_seconds(0.00099951), "1.00 ms"),
        (format_seconds(0.00099949), "999 µs"),
        (format_seconds(0), "0 s"),
        (format_bytes(512), "512 B"),
        (format_bytes(23.5 * 2**30), "23.5 GiB"),
        (format_rate(12340.4), "12,340"),
        (format_rate(8.123), "8.12"),
        (format_percent(0.034), "3.4 %"),
        (format_percent(0.41), "41 %"),
        (format_duration(3723), "1:02:03"),
        (format_duration(123), "2:03"),
        (significant(0.000123456), "0.000123"),
        (significant(0), "0"),
    ],
)
def test_numbers_are_written_with_the_digits_that_matter(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("name", "accelerators", "expected"),
    [
        ("cpu", (), "cpu"),
        ("CPU", (), "cpu"),
        ("cpu:0", (), "cpu"),
        ("cuda", (), "cuda:0"),
        ("CUDA:0", (), "cuda:0"),
        (" cuda:1 ", (), "cuda:1"),
        ("mps", (), "mps:0"),
        ("xpu:2", (), "xpu:2"),
        ("gpu", (), "cuda:0"),
        ("gpu", ("xpu:0",), "xpu:0"),
        ("gpu:1", ("xpu:0", "xpu:1"), "xpu:1"),
        ("emu:1", ("emu:0",), "emu:1"),
    ],
)
def test_every_spelling_of_a_device_has_one_canonical_form(
    name: str, accelerators: tuple[str, ...], expected: str
) -> None:
    assert canonical_device(name, accelerators) == expected


@pytest.mark.parametrize("name", ["", "auto", "tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "0"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="a device is cpu, cuda"):
        canonical_device(name)


def test_only_the_cpu_is_no_accelerator() -> None:
    assert not is_accelerator("cpu")
    assert is_accelerator("cuda:0")
