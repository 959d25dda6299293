"""What the README says: its code runs, its table is the code's, and the tests that it names exist."""

import re
from pathlib import Path

import lightning.pytorch as pl
import torch

import lightning_tricks as lt
from lightning_tricks.__main__ import main, strategies_in_markdown, table_in_markdown
from tests.behaviour_cases import run_code
from tests.models import Net, loader

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def is_distributed(code: str) -> bool:
    return "devices=2" in code


def test_code_runs(monkeypatch, tmp_path, capsys) -> None:
    """In the order in which it stands there, as a reader would type it; the reader brings the module and the data."""
    monkeypatch.chdir(tmp_path)
    names = {"module": Net(), "data": loader(), "torch": torch}
    python = [code for code in blocks("python") if not is_distributed(code)]
    assert len(python) == 7
    for code in python:
        exec(compile(code, "README.md", "exec"), names)
    assert lt.step_ledger(names["trainer"])[0].applied == 7
    printed = capsys.readouterr().out
    assert "7 0 0 0 applied" in printed
    assert "net.0-2  3 x 88      3 x 176" in printed
    assert len([line for line in python[0].splitlines() if line]) <= 12

    assert 0 < lt.step_ledger(names["guarded"])[0].applied <= 7
    assert lt.step_ledger(names["accumulating"])[0].applied == 7
    assert lt.step_ledger(names["averaging"])[0].applied == 7
    noisy = names["GradientNoise"](0.1)
    run = pl.Trainer(callbacks=[noisy, lt.GradientNormClipping()], max_epochs=1, accelerator="cpu", log_every_n_steps=1)
    run.fit(Net(), loader())
    assert float(run.callback_metrics["noise/std"]) == torch.tensor(0.1)


def test_distributed_code_runs(two_processes, tmp_path) -> None:
    (code,) = filter(is_distributed, blocks("python"))
    two_processes.run(run_code, code, str(tmp_path))
    Net().load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"])


def test_table_of_strategies_is_the_codes() -> None:
    between = README.split("<!-- strategies: python -m lightning_tricks list --markdown -->")[1]
    assert between.split("<!-- /strategies -->")[0].strip() == strategies_in_markdown()


def test_two_commands_do_all_the_set_up() -> None:
    start = README.split("## Start")[1].split("\n## ")[0]
    assert re.findall(r"```\n(.*?)\n```", start) == [
        'pip install -e ".[plot]" && python examples/train_language_model.py',
        'pip install -e ".[test]" && pytest',
    ]


def test_continuous_integration_runs_the_readmes_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script  # it reads them from there


def test_table_of_tricks_is_the_codes() -> None:
    between = README.split("<!-- tricks: python -m lightning_tricks list --markdown -->")[1].split("<!-- /tricks -->")[
        0
    ]
    assert between.strip() == table_in_markdown()


def test_command_line_prints_the_table(capsys) -> None:
    main(["list", "--markdown"])
    assert capsys.readouterr().out.strip() == f"{table_in_markdown()}\n\n{strategies_in_markdown()}"
    main(["list"])
    printed = capsys.readouterr().out
    assert "GradientNormClipping" in printed
    assert "fsdp2_offload" in printed


def test_command_lines_run(capsys) -> None:
    lines = re.findall(r"^python -m lightning_tricks .*$", README, flags=re.MULTILINE)
    assert [line.split()[3] for line in lines] == ["plot-schedule", "guide"]
    for line in lines:
        main(line.split()[3:])
    assert "WarmupStableDecayScheduler: learning rate over 10000 steps, 500 of warmup" in capsys.readouterr().out


def test_guide_to_precision(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    main(["guide", "precision"])
    printed = capsys.readouterr().out
    assert "full speed here (cpu)" in printed
    rows = [re.split(r"\s*│\s*", line.strip())[1:-1] for line in printed.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["fp32", "tf32", "fp16", "bf16", "fp8 e4m3", "fp8 e5m2"]
    assert rows[2][1:6] == ["16", "6.55e+04", "6.1e-05", "5.96e-08", "0.000977"]
    assert rows[0][6] == "yes"
    assert rows[4][6] == "no"


def test_the_tests_that_it_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 15
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in named if f"def {name}(" not in written} == set()


def test_modes_of_the_readme_are_those_that_are_measured() -> None:
    from tests.benchmarks.activation import MODES

    between = README.split("<!-- modes -->")[1].split("<!-- /modes -->")[0]
    assert re.findall(r"^\| ([^|]+?) \|", between, flags=re.MULTILINE)[2:] == list(MODES)


def test_benchmarks_of_the_readme_are_those_that_run() -> None:
    from tests.benchmarks.__main__ import BENCHMARKS

    between = README.split("<!-- benchmarks -->")[1].split("<!-- /benchmarks -->")[0]
    named = re.findall(r"^\| ([^|]+?) \|", between, flags=re.MULTILINE)[2:]
    assert named == [benchmark.name for benchmark in BENCHMARKS]
