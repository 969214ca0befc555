"""Functions of the user by name: `MODULE:FUNCTION`, where MODULE is an importable name or a .py file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..diagnostics.errors import InputError


def load_function(source: str, form: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names; InputError when there is no such thing. form: what it should be, for the hint."""
    module_name, function_name = named(source, form)
    function: Callable[..., Any] | None = getattr(_load_module(module_name), function_name, None)
    if not callable(function):
        raise InputError(f"{module_name} has no function {function_name!r}", hint=f"give {form}")
    return function


def result_of(source: str, form: str) -> Any:
    """What the function returns that `MODULE:FUNCTION` names; InputError when there is none, or it takes arguments."""
    function = load_function(source, form)
    check_takes(function, source, form)
    return function()


def check_takes(function: Callable[..., Any], source: str, form: str, *arguments: Any) -> None:
    """InputError where the function that `source` names does not take the arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError(f"{source} cannot be called: {error}", hint=f"give {form}") from error
    except ValueError:
        return  # some functions that are not written in Python do not tell


def named(source: str, form: str) -> tuple[str, str]:
    """The module and the function of `MODULE:FUNCTION`, not imported; InputError when the form is wrong or a file is not there."""
    module, _, function = source.rpartition(":")
    if not module or not function:
        raise InputError(f"{source!r} is not of the form MODULE:FUNCTION", hint=f"give {form}")
    if module.endswith(".py") and not os.path.isfile(module):
        raise InputError(f"there is no file {module!r}", hint=f"give {form}")
    return module, function


def _load_module(name: str) -> ModuleType:
    """Imports a module by its name or its file."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    if "" in name.split("."):
        raise InputError(f"{name!r} is no name of a module", hint="give its whole name, or the .py file")
    _importable(os.getcwd())  # a console script does not have the working folder on its path
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's own code fails to import is the user's error, and keeps its traceback.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        hint = "run it from the folder that holds the module, or give the .py file"
        raise InputError(f"there is no module {name!r}", hint=hint) from error


def _importable(folder: str) -> None:
    """Modules of a folder can be imported. It goes last, so that it shadows nothing."""
    if folder not in sys.path:
        sys.path.append(folder)


def _load_file(path: Path) -> ModuleType:
    """The module of a file, which is run once, however often it is named; another file of that name has a number after its own."""
    path = path.resolve()
    name, number = path.stem, 1
    while (known := sys.modules.get(name)) is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == path:
            return known
        number += 1
        name = f"{path.stem}__{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} cannot be imported")
    _importable(str(path.parent))  # as for a script, whose modules lie beside it
    # Under its name from the start, since dataclasses and pickle look it up there.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
