"""`sashiko explain MODULE:FUNCTION`: compiles what the function returns and prints the explanation."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from ..diagnostics.errors import InputError
from .source import result_of

FORM = "MODULE:FUNCTION, where the function takes nothing and returns (model, example_inputs)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sashiko explain`."""
    parser.add_argument("source", metavar="MODULE:FUNCTION", help=f"{FORM}; MODULE is an importable name or a .py file")
    parser.add_argument("--target", default=None, help="name of the target to compile for; this machine when not given")
    precision = "of floating point; %(default)s when not given"
    parser.add_argument("--precision", choices=("fp32", "bf16", "auto"), default="fp32", help=precision)


def run(options: argparse.Namespace) -> int:
    """Prints the explanation of the model to stdout."""
    from ..platforms.host import resolve

    resolve(options.target)  # unknown names are refused before any work
    model, example_inputs = load_example(options.source)
    # By name, because the root package loads its public functions on first use.
    api = importlib.import_module(__name__.partition(".")[0])
    compiled = api.compile(model, example_inputs, precision=options.precision, target=options.target)
    print(api.explain(compiled))
    return 0


def load_example(source: str) -> tuple[Any, Any]:
    """Returns the model and the example inputs that `MODULE:FUNCTION` gives; InputError when there is no such thing."""
    result = result_of(source, FORM)
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"{source} returned {type(result).__name__}, not (model, example_inputs)", hint=f"give {FORM}")
    return result
