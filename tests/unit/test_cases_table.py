"""The table of reported faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_table_of_cases_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "CASES.md").read_text())
    assert len(named) > 50
    rows = re.findall(r"^\| (\d+) \|", (TESTS / "CASES.md").read_text(), re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 38))
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(
            rf"^(async def {test}\(|def {test}\(|{test} = )",
            (TESTS / file).read_text() if (TESTS / file).exists() else "",
            re.MULTILINE,
        )
    ]
    assert missing == []
