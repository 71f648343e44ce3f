"""A Python file of one's own, imported before methods are looked up."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ..core.errors import ConfigError


def load_file(path: Path) -> None:
    """Import a file by its name, from its folder, as worker processes do again; it registers methods and rules."""
    file = path.resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"--load {path}: there is no such Python file")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:  # whatever a stranger's code does
        raise ConfigError(f"--load {path}: it cannot be imported ({type(error).__name__}: {error})") from error
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise ConfigError(f"--load {path}: another module is called {file.stem} too; give the file another name")
