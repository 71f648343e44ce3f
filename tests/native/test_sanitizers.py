"""The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashfl.native import library

FLAGS = {
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"],
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}
SANITIZE = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast"]
SANITIZE += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def _where(file: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={file}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("name", library.instruction_sets())
def test_sanitizers_find_nothing_in_the_kernels(name: str, tmp_path: Path) -> None:
    folder, built = Path(library.__file__).parent, tmp_path / f"{name}.so"
    subprocess.run(["g++", *SANITIZE, *FLAGS[name], str(folder / f"{name}.cpp"), "-o", str(built)], check=True)
    # Sanitizers intercept C++ exceptions, so the C++ library must be there before Python loads torch.
    preload = [_where("libasan.so"), _where("libstdc++.so")]
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(preload), "FLASHFL_TEST_LIBRARY": str(built),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    tests = str(Path(__file__).with_name("test_operators.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=no", tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
