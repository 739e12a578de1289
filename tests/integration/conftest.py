"""Lets the tests of this folder use the session's real engine."""

from __future__ import annotations

import pytest

from tests import real_engine


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(real_engine):
        config.pluginmanager.register(real_engine, "real-engine")
