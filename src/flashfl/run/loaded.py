"""Import a user's Python file before methods are looked up."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ..core.errors import ConfigError


def load_file(path: Path) -> None:
    """Import a file that registers custom methods and rules. Worker processes import it again by its name."""
    file = path.resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"--load {path}: expected an existing file whose name ends in .py")
    if str(file.parent) not in sys.path:
        _add(file.parent, path)
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:  # custom code may raise anything
        raise ConfigError(f"--load {path}: importing it failed ({type(error).__name__}: {error})") from error
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise ConfigError(f"--load {path}: another module is also called {file.stem}; rename the file")


def _add(folder: Path, path: Path) -> None:
    """Let modules be imported from the file's folder, unless a file there would hide an installed package.

    The folder comes last, but its files would still win against namespace packages and some editable installs.
    """
    importlib.invalidate_caches()
    names = {p.name.partition(".")[0] for p in folder.iterdir() if p.suffix in (".py", ".so", ".pyd") or p.is_dir()}
    installed = {name: found for name in sorted(names) if (found := _found(name)) is not None}
    sys.path.append(str(folder))
    for name, before in installed.items():
        if (now := _found(name)) != before:
            sys.path.remove(str(folder))
            raise ConfigError(
                f"--load {path}: {now} would hide the installed package {name}. Rename it, or move {path.name} to "
                "another folder."
            )


def _found(name: str) -> str | None:
    """Where an import would find a module, whether or not it is loaded already; None if nowhere."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return None if spec is None else spec.origin or "a namespace package"
