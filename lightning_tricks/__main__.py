"""The command line: ``python -m lightning_tricks list``, ``guide``, ``plot-schedule`` and ``consolidate``."""

import argparse
import ast
import inspect
import sys
from pathlib import Path
from pickle import UnpicklingError

import torch
from rich.console import Console
from rich.table import Table

import lightning_tricks
from lightning_tricks._schedule import Schedule
from lightning_tricks.composition import Trick
from lightning_tricks.distributed.sharded_checkpoint import consolidate
from lightning_tricks.functional.number_formats import full_speed, number_formats
from lightning_tricks.strategies import PRESETS


def public_tricks() -> list[type[Trick]]:
    """Return the public callbacks, in alphabetical order."""
    public = (getattr(lightning_tricks, name) for name in sorted(lightning_tricks.__all__))
    return [one for one in public if isinstance(one, type) and issubclass(one, Trick) and one is not Trick]


def table_in_markdown() -> str:
    """Return the table of tricks as it stands in the README."""
    rows = [f"| `{trick.__name__}` | {trick.buys} | {trick.costs} |" for trick in public_tricks()]
    return "\n".join(["| callback | what it buys | what it costs |", "| --- | --- | --- |", *rows])


def strategies_in_markdown() -> str:
    """Return the table of strategy strings as it stands in the README."""
    rows = [f"| `{one.name}` | {one.description} | `{one.use}` |" for one in PRESETS if isinstance(one.strategy, type)]
    return "\n".join(["| string | what it does | the same by class |", "| --- | --- | --- |", *rows])


def precision_table() -> Table:
    """Return the number formats, and which of them this machine runs at full speed."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    fast = full_speed(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    table = Table(
        "format", "bits", "largest", "smallest normal", "smallest subnormal", "epsilon", f"full speed here ({name})"
    )
    for one in number_formats():
        figures = (one.largest, one.smallest_normal, one.smallest_subnormal, one.epsilon)
        table.add_row(
            one.name, str(one.bits), *(f"{figure:.3g}" for figure in figures), "yes" if fast[one.name] else "no"
        )
    return table


def public_schedules() -> dict[str, type[Schedule]]:
    """Return the public learning-rate schedules by name."""
    return {trick.__name__: trick for trick in public_tricks() if issubclass(trick, Schedule)}


def schedule_from(name: str, settings: list[str]) -> Schedule:
    """Build a schedule from words of the command line, each an argument as NAME=VALUE."""
    arguments = {}
    for one in settings:
        key, _, value = one.partition("=")
        if not key or not value:
            raise ValueError(f"expected arguments of {name} as NAME=VALUE, such as warmup=100, got {one!r}")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    schedule = public_schedules()[name]
    strangers = set(arguments) - set(inspect.signature(schedule).parameters)
    if strangers:
        known = ", ".join(inspect.signature(schedule).parameters)
        raise ValueError(f"expected arguments of {name}, which are {known}; got {', '.join(sorted(strangers))}")
    return schedule(**arguments)


def whole_number(text: str) -> int:
    """Read a number of steps, also one like 1e4."""
    number = float(text)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"expected a whole number of steps, got {text}")
    return int(number)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the words after the program's name; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_tricks", description=lightning_tricks.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the tricks and strategies, what each buys and costs")
    listing.add_argument("--markdown", action="store_true", help="as a Markdown table")
    guiding = commands.add_parser("guide", help="which trick for which bottleneck")
    guiding.add_argument("topic", choices=["precision"], help="precision: the number formats, and which run fast here")
    plotting = commands.add_parser("plot-schedule", help="the learning rate of a schedule over a run")
    plotting.add_argument(
        "schedule", choices=sorted(public_schedules()), metavar="SCHEDULE", help="the callback's name"
    )
    plotting.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="its arguments, such as warmup=100")
    plotting.add_argument("--steps", type=whole_number, help="length of the run, in applied steps")
    plotting.add_argument("--lr", type=float, default=1.0, help="the learning rate at the top (default: 1.0)")
    plotting.add_argument("--png", type=Path, metavar="FILE", help="write a PNG file, with the `plot` extra")
    consolidating = commands.add_parser("consolidate", help="a distributed checkpoint as one ordinary file")
    consolidating.add_argument("folder", type=Path, metavar="DIR", help="the folder that FSDP2Strategy saved")
    consolidating.add_argument("file", type=Path, metavar="FILE", help="where to write the file")
    consolidating.add_argument("--trusted", action="store_true", help="unpickle any object that the folder holds")
    options = parser.parse_args(arguments)
    if options.command == "consolidate":
        try:
            consolidate(options.folder, options.file, weights_only=not options.trusted)
        except (FileNotFoundError, IsADirectoryError) as error:
            sys.exit(str(error))
        except UnpicklingError as error:
            sys.exit(f"{error}\n\nIf you trust where the folder comes from, add --trusted.")
        print(f"wrote {options.file}")
    elif options.command == "plot-schedule":
        try:
            schedule_from(options.schedule, options.arguments).plot(options.steps, base_lr=options.lr, path=options.png)
        except (TypeError, ValueError, ImportError) as error:
            sys.exit(str(error))
    elif options.command == "guide":
        Console().print(precision_table())
    elif options.markdown:
        print(table_in_markdown())
        print()
        print(strategies_in_markdown())
    else:
        table = Table("callback", "what it buys", "what it costs")
        for trick in public_tricks():
            table.add_row(trick.__name__, trick.buys, trick.costs)
        Console().print(table)
        table = Table("strategy", "what it does", "the same by class")
        for preset in PRESETS:
            if isinstance(preset.strategy, type):
                table.add_row(preset.name, preset.description, preset.use.removeprefix("lightning_tricks."))
        Console().print(table)


if __name__ == "__main__":
    main()
