"""The code of a run: a user's file is imported before methods are looked up, and what a run was made by is recorded."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..core.errors import ConfigError
from ..core.method import Method

PACKAGE = Path(__file__).parents[1]


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
    unloaded = [name for name in sorted(names) if name.isidentifier() and name not in sys.modules]
    installed = {name: spec.origin for name in unloaded if (spec := find_spec(name)) is not None}
    sys.path.append(str(folder))
    for name, before in installed.items():
        if (now := find_spec(name)) is not None and now.origin != before:
            sys.path.remove(str(folder))
            raise ConfigError(
                f"--load {path}: {now.origin} would hide the installed package {name}. Rename that file, or move "
                f"{path.name} to another folder."
            )


@cache
def digest(source: Path) -> str:
    """Of one file, or of all Python files of a package, as they were when first asked for: later edits do not run."""
    paths = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    found = hashlib.blake2b(digest_size=6)
    for path in paths:
        found.update(path.relative_to(source).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def code_of(method: Method) -> dict[str, str] | None:
    """Digests of the code behind a method, by module: all of this package, and every module outside it that holds the
    class of the method or of one of its parts, or a class these are derived from. Helpers that such a module imports
    are not looked at. None where a source cannot be read, as that of a class typed at a prompt."""
    ours = PACKAGE.name
    parts = (method, *(getattr(method, f.name) for f in fields(method)))
    names = sorted({cls.__module__ for part in parts for cls in type(part).__mro__})
    names = [name for name in names if name.partition(".")[0] not in (ours, *sys.stdlib_module_names)]
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    try:
        others = {name: digest(Path(file)) for name, file in files.items() if file}
        return {ours: digest(PACKAGE), **others} if len(others) == len(files) else None
    except OSError:
        return None


def joined(before: Mapping[str, str], now: Mapping[str, str] | None) -> dict[str, str] | None:
    """Digests of a run that goes on with the code it has now: "old+new", which no code has, where that is another."""
    if now is None:
        return None
    pairs = {name: (before.get(name, ""), now.get(name, "")) for name in {**before, **now}}
    return {name: old if old.rpartition("+")[2] == new else f"{old}+{new}" for name, (old, new) in pairs.items()}
