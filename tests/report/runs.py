"""Runs with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edited(source: Path, folder: Path, change: Callable[[Any], Any] = lambda header: header, rounds: int = 0) -> Path:
    """A copy of a run with another header, or cut off after some of its rounds."""
    shutil.copytree(source, folder)
    lines = (source / "results.jsonl").read_text().splitlines()
    kept = [line for line in lines[1:] if not rounds or json.loads(line).get("round", rounds) < rounds]
    text = "\n".join([json.dumps(change(json.loads(lines[0]))), *kept]) + "\n"
    (folder / "results.jsonl").write_text(text)
    return folder
