"""Which code a run was made by."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

from ..core.method import Method

PACKAGE = Path(__file__).parents[1]


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
