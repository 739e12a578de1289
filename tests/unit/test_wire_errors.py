"""Errors of workers as answers, and back."""

from __future__ import annotations

import pytest

from actors.transfer.wire_errors import WireError, answered, from_wire, must_be_well, wire_errors
from orchestrator.errors import ChannelError, TransferError


@wire_errors
def _fails(error: Exception) -> str:
    raise error


@answered
def _asked(error: Exception | None) -> object:
    return "well" if error is None else _fails(error)


@pytest.mark.parametrize("kind", [TransferError, ChannelError])
def test_an_error_of_ours_comes_back_as_it_was(kind: type[TransferError]) -> None:
    with pytest.raises(WireError) as caught:
        must_be_well(["well", _asked(kind("no w")), _asked(kind("nor v"))])
    back = from_wire(str(caught.value))
    assert type(back) is kind and str(back) == "no w"


def test_another_error_is_told_with_its_kind() -> None:
    with pytest.raises(WireError, match=r"^ValueError: boom$"):
        must_be_well([None, _asked(ValueError("boom"))])


def test_answers_are_answers() -> None:
    must_be_well([])
    must_be_well([_asked(None), None, True, {"error": "of somebody else"}])
    assert _asked(None) == "well"
