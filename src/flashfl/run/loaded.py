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
        raise ConfigError(f"--load {path}: it is not a Python file that exists")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:  # custom code may raise anything
        raise ConfigError(f"--load {path}: importing it failed ({type(error).__name__}: {error})") from error
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise ConfigError(f"--load {path}: another module is also called {file.stem}; rename the file")
