"""Shared by all tests: which event loop a test runs on.

Tests under ``unit`` and ``property`` run on virtual time, where a hang fails at once and an
unfinished task fails the test; mark one ``real_time`` to opt out. All others run on a real loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
import pytest_asyncio

from orchestrator.testing import FakeWorld, VirtualLoop, assert_no_leaked_tasks

_VIRTUAL = ("unit", "property")


def _on_virtual_time(item: pytest.Item) -> bool:
    place = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return place in _VIRTUAL and item.get_closest_marker("real_time") is None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time: a unit test that runs on a real event loop")
    config.addinivalue_line("markers", "provokes: a test that breaks a protocol on purpose")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if _on_virtual_time(item):
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}


@pytest_asyncio.fixture
async def _owned_tasks() -> AsyncIterator[None]:
    yield
    assert_no_leaked_tasks()


@pytest.fixture(autouse=True)
def _no_leaked_tasks(request: pytest.FixtureRequest) -> Iterator[None]:
    item = request.node
    if pytest_asyncio.is_async_test(item) and _on_virtual_time(item):
        request.getfixturevalue("_owned_tasks")
    yield


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[FakeWorld]:
    """A world whose test strikes with every fault it made, leaves no rendezvous open and
    breaks no protocol (unless it is marked ``provokes``: then it must).
    """
    world = FakeWorld()
    yield world
    assert not world.faults.unused, f"faults that never struck: {world.faults.unused}"
    assert not world.channels, f"rendezvous left open: {sorted(world.channels)}"
    provokes = request.node.get_closest_marker("provokes") is not None
    assert bool(world.violations) is provokes, world.violations
