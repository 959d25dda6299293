"""fp8 training in a Trainer: what is converted, with what beside it, and on what hardware not."""

import sys

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.functional import float8
from tests.distributed_cases import float8_beside_checkpointing
from tests.models import Net, assert_same, fit, largest_difference, seeded, weights


class Seen(Net):
    """Notes the dtype that the first block's linear layer gives."""

    def __init__(self, **options) -> None:
        super().__init__(width=16, **options)
        self.dtypes: set[torch.dtype] = set()

    def loss(self, batch):
        self.dtypes.add(self.net[0].linear(batch[0].repeat(1, 2)).dtype)
        return super().loss(batch)


def fp8(**options) -> lt.Float8Training:
    return lt.Float8Training(**{"emulate": True, **options})


def test_the_table_says_which_layers_were_converted(capsys) -> None:
    fit(Net(width=16), fp8())
    printed = read(capsys)
    assert "3 linear layers in fp8 (tensorwise, emulated): net.0.linear, net.1.linear, net.2.linear" in printed
    assert "net.3: excluded" in printed
    fit(Net(width=16), fp8(exclude=()))
    assert "net.3: 16 x 1 does not divide by 16" in read(capsys)


def read(capsys) -> str:
    """What was printed, without the lines of the table."""
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_nothing_to_convert_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"no linear layer to convert: net\.0\.linear: 8 x 8 does not divide by 16"):
        fit(Net(), fp8())


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_it_trains_as_well_in_either_precision(precision: str, dtype: torch.dtype) -> None:
    losses = []
    for callbacks in ([], [fp8()], [fp8(recipe="rowwise")]):
        module = seeded(Seen)
        fit(module, *callbacks, max_epochs=5, precision=precision)
        assert module.dtypes == {dtype}
        losses.append(sum(module.losses[-7:]) / 7)
        assert losses[-1] < 0.7 * module.losses[0]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.2)
    assert losses[1] != losses[0] != losses[2]


@pytest.mark.parametrize(
    ("device", "hip", "capability", "recipe", "fine"),
    [
        ("cpu", None, None, "tensorwise", False),
        ("cuda", None, (8, 0), "tensorwise", False),
        ("cuda", None, (8, 9), "tensorwise", True),
        ("cuda", None, (8, 9), "rowwise", False),
        ("cuda", None, (9, 0), "rowwise", True),
        ("cuda", None, (10, 0), "tensorwise", True),
    ],
)
def test_hardware_without_fp8_is_named(device, hip, capability, recipe, fine, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    if fine:
        float8.refuse_hardware(torch.device(device), recipe)
        return
    found = "cpu" if device == "cpu" else f"A100 of compute capability {capability[0]}.{capability[1]}"
    with pytest.raises(RuntimeError, match=rf"got {found}: .* emulate=True"):
        float8.refuse_hardware(torch.device(device), recipe)


def test_without_torchao_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning_tricks\[fp8\]"):
        fit(Net(width=16), fp8())


def test_checkpointed_blocks_recompute_the_same() -> None:
    results = []
    for callbacks in ([fp8()], [fp8(), lt.ActivationCheckpointing()]):
        module = seeded(lambda: Net(width=16, dropout=0.2))
        fit(module, *callbacks)
        results.append(weights(module))
    assert_same(*results)


def test_under_fsdp2_and_beside_checkpointing(two_processes) -> None:
    first, second = two_processes.run(float8_beside_checkpointing)
    for (alone, both), (other, _) in zip(first, second, strict=True):
        assert_same(alone, both)  # checkpointing changes no bit under fsdp2
        assert_same(alone, other)
    plain, eight = first[0][0], first[1][0]
    assert 0 < largest_difference(plain, eight) < 0.1
