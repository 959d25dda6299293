"""Scripts as users start them: by Lightning's launcher, and by torchrun on two nodes, on loopback."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.models import assert_same
from tests.pool import free_port
from tests.strategy_cases import expected


def environment() -> dict[str, str]:
    """Without what earlier tests of this process left for launchers to find, and with a port of its own."""
    ours = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
    return {key: value for key, value in os.environ.items() if key not in ours} | {"MASTER_PORT": str(free_port())}


def test_two_nodes_of_two_ranks_by_the_string_hsdp(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "weights.pt"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--master-addr=127.0.0.1", f"--master-port={port}",
    ]  # fmt: skip
    nodes = [
        subprocess.Popen(
            [*command, f"--node-rank={rank}", "-m", "tests.script", "hsdp", "2", str(file)],
            cwd=Path(__file__).parents[2],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / f"{rank}.txt").open("w"),
        )
        for rank in range(2)
    ]
    try:
        codes = [node.wait(120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], (tmp_path / "0.txt").read_text()[-3000:]
    saved = torch.load(file, weights_only=True)
    assert saved["world"] == 4
    assert "replicate=2, data_parallel=2" in saved["mesh"]
    assert_same(saved["weights"], expected("tied", "momentum"), rtol=0, atol=1e-6)


def test_a_script_under_lightnings_launcher(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.script", "fsdp2", "1", str(file)],
        cwd=Path(__file__).parents[2],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(file, weights_only=True)
    assert saved["world"] == 2
    assert_same(saved["weights"], expected("tied", "momentum"), rtol=0, atol=1e-6)
