"""Run every test of this folder with each compiled library that this machine can use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashfl.native import library


def libraries() -> list[Path]:
    """The compiled libraries. FLASHFL_TEST_LIBRARY names another one, such as a build with sanitizers."""
    if "FLASHFL_TEST_LIBRARY" in os.environ:
        return [Path(os.environ["FLASHFL_TEST_LIBRARY"])]
    return [path for name in library.instruction_sets() if (path := library.find(name)) is not None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not libraries():
        for item in items:
            if "native" in item.fixturenames:  # type: ignore[attr-defined]
                item.add_marker(pytest.mark.skip(reason=library.status()))


@pytest.fixture(params=[path.name.split(".")[0].lstrip("_") for path in libraries()] or ["none"], scope="module")
def native(request: pytest.FixtureRequest) -> object:
    """One compiled library in place of the one that is chosen by itself."""
    path = next(p for p in libraries() if p.name.split(".")[0].lstrip("_") == request.param)
    loaded = library.Library(path)
    choose: Callable[[], library.Library] = lambda: loaded  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "kernels", choose)
        yield loaded
