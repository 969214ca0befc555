"""`sashiko explain MODULE:FUNCTION`: compiles what the function returns and prints the explanation."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..diagnostics.errors import InputError

_FORM = "MODULE:FUNCTION, where the function takes nothing and returns (model, example_inputs)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sashiko explain`."""
    parser.add_argument("source", metavar="MODULE:FUNCTION", help=f"{_FORM}; MODULE is an importable name or a .py file")
    parser.add_argument("--target", default=None, help="name of the target to compile for; this machine when not given")
    parser.add_argument("--precision", choices=("fp32", "bf16", "auto"), default="fp32")


def run(options: argparse.Namespace) -> int:
    """Prints the explanation of the model to stdout."""
    model, example_inputs = load_example(options.source)
    # By name, because the root package loads its public functions on first use.
    api = importlib.import_module(__name__.partition(".")[0])
    compiled = api.compile(model, example_inputs, precision=options.precision, target=options.target)
    print(api.explain(compiled))
    return 0


def load_example(source: str) -> tuple[Any, Any]:
    """Returns the model and the example inputs that `MODULE:FUNCTION` gives; InputError when there is no such thing."""
    module_name, separator, function_name = source.rpartition(":")
    if not separator or not module_name or not function_name:
        raise InputError(f"{source!r} is not of the form MODULE:FUNCTION", hint=f"give {_FORM}")
    module = _load_module(module_name)
    function: Callable[[], object] | None = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{module_name} has no function {function_name!r}", hint=f"give {_FORM}")
    result = function()
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"{source} returned {type(result).__name__}, not (model, example_inputs)", hint=f"give {_FORM}")
    return result


def _load_module(name: str) -> ModuleType:
    """Imports a module by its name or its file."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    here = os.getcwd()
    # A console script does not have the working folder on its path. It goes last, so that it shadows nothing.
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's own code fails to import is the user's error, and keeps its traceback.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        hint = "run it from the folder that holds the module, or give the .py file"
        raise InputError(f"there is no module {name!r}", hint=hint) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Under its name while it runs, since dataclasses and pickle look it up there.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
