"""The table of formats, held to bit patterns and to what rounds away."""

import math

import pytest
import torch

from lightning_tricks.functional.number_formats import FORMATS, full_speed, number_formats

BY_NAME = {one.name: one for one in number_formats()}
DTYPES = {
    "fp32": (torch.float32, torch.int32),
    "fp16": (torch.float16, torch.int16),
    "bf16": (torch.bfloat16, torch.int16),
    "fp8 e4m3": (torch.float8_e4m3fn, torch.int8),
    "fp8 e5m2": (torch.float8_e5m2, torch.int8),
}


@pytest.mark.parametrize("name", DTYPES)
def test_every_figure_is_that_of_the_bits(name: str) -> None:
    dtype, bits = DTYPES[name]
    found = BY_NAME[name]
    patterns = torch.arange(2 ** (found.bits - 1) if found.bits <= 16 else 2, dtype=torch.int64)
    if found.bits <= 16:  # all positive numbers there are
        values = patterns.to(bits).view(dtype).double()
        finite = values[torch.isfinite(values)]
        assert found.largest == float(finite.max())
        assert found.smallest_subnormal == float(finite[finite > 0].min())
        above_one = finite[finite > 1].min()
        assert found.epsilon == float(above_one) - 1.0
    else:
        assert found.smallest_subnormal == float(torch.tensor(1, dtype=bits).view(dtype).double())
        assert found.largest == float(torch.tensor(0x7F7FFFFF, dtype=bits).view(dtype).double())
    steps = round(math.log2(found.smallest_normal / found.smallest_subnormal))
    assert found.smallest_subnormal * 2**steps == found.smallest_normal
    assert 2.0**-steps == found.epsilon


def test_tf32_is_fp32_without_thirteen_bits() -> None:
    tf32 = BY_NAME["tf32"]
    keep = torch.tensor(0x7F7FE000, dtype=torch.int32)
    assert tf32.largest == float(keep.view(torch.float32).double())
    assert tf32.epsilon == BY_NAME["fp16"].epsilon
    assert tf32.smallest_normal == BY_NAME["fp32"].smallest_normal


def test_the_textbooks_figures() -> None:
    assert BY_NAME["fp16"].largest == 65504
    assert BY_NAME["fp16"].smallest_subnormal == pytest.approx(5.96e-8, rel=1e-3)
    assert BY_NAME["bf16"].largest == pytest.approx(3.39e38, rel=1e-3)
    assert BY_NAME["fp8 e4m3"].largest == 448
    assert BY_NAME["fp8 e5m2"].largest == 57344


@pytest.mark.parametrize(
    ("capability", "fast"),
    [
        ((6, 0), {"fp32"}),
        ((7, 5), {"fp32", "fp16"}),
        ((8, 0), {"fp32", "tf32", "fp16", "bf16"}),
        ((8, 9), set(FORMATS)),
        ((9, 0), set(FORMATS)),
    ],
)
def test_full_speed_on_nvidia(capability: tuple[int, int], fast: set[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert {name for name, yes in full_speed(torch.device("cuda")).items() if yes} == fast


@pytest.mark.parametrize(("amx", "avx"), [(False, False), (False, True), (True, True)])
def test_full_speed_on_a_cpu(amx: bool, avx: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    assert full_speed(torch.device("cpu"))["bf16"] == (amx or avx)
    assert not full_speed(torch.device("cpu"))["fp8 e4m3"]
