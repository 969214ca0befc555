"""The table of subcommands and what they share: parsing, errors, exit statuses.

A new subcommand is a module with `configure(parser)` and `run(options) -> exit status`, and one row here. These modules are imported
on every start, so they import torch and the compiler inside `run` only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import __version__
from ..diagnostics import env
from ..diagnostics.errors import InputError, SashikoError
from . import doctor, explain, quantize
from .bench import command as bench

FAILED, USAGE = 1, 2


@dataclass(frozen=True)
class Command:
    """One subcommand. configure: adds its arguments. run: does it and returns the exit status."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: tuple[Command, ...] = (
    Command("quantize", "calibrate a model, write it quantized, and report", quantize.configure, quantize.run),
    Command("explain", "tell what became of a model: fusions, kernels, and what was left to PyTorch", explain.configure, explain.run),
    Command("bench", "time models beside Inductor, OpenVINO, ONNX Runtime and PyTorch itself", bench.configure, bench.run),
    Command("doctor", "show what this machine can do and what is installed", doctor.configure, doctor.run),
)


def run(arguments: Sequence[str], commands: Sequence[Command] = COMMANDS) -> int:
    """Runs one command line and returns the exit status: 0 done, 2 wrong arguments, 1 another SashikoError; they are printed to
    stderr.

    With SASHIKO_DEBUG >= 2 a SashikoError is raised instead, with its traceback.
    """
    parser = argparse.ArgumentParser(prog="sashiko", description="Quantizes PyTorch models and stitches them into native functions.")
    parser.add_argument("--version", action="version", version=f"sashiko {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        command.configure(subparsers.add_parser(command.name, help=command.help, description=command.help))
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as stop:
        # argparse leaves with 0 after --help and 2 after a wrong argument; callers of run() get it as a value.
        return int(stop.code or 0)
    chosen = next(command for command in commands if command.name == options.command)
    raises = False
    try:
        raises = env.debug_level() >= 2
        return chosen.run(options)
    except SashikoError as error:
        if raises:
            raise
        print(f"sashiko {chosen.name}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, InputError) else FAILED
