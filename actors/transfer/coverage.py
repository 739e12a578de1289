"""Whether recorded writes fill every parameter exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Writes = Sequence[tuple[str, torch.Tensor]]
"""What wrote, and the view it wrote to."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the writes leave out or write twice, in words; empty where nothing."""

    missing: str
    """Parameters that get nothing at all, or too little for vLLM's own reload."""
    wrong: str
    """Parameters of which only padding gets nothing, or that get a part twice."""


def coverage_of(model: torch.nn.Module, writes: Writes) -> Coverage:
    """How ``writes`` cover ``model``.

    Tied parameters count once. Of buffers only those are asked for that are written at all.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for by, view in writes:
        by_storage.setdefault(_storage(view), []).append((by, view))
    nothing: list[str] = []
    partly: list[str] = []
    wrong: list[str] = []
    seen: set[object] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        into = by_storage.get(_storage(tensor), [])
        key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key in seen or (not into and not isinstance(tensor, torch.nn.Parameter)):
            continue
        seen.add(key)
        if any(view.element_size() != tensor.element_size() for _, view in into):
            wrong.append(f"{name} is written in another element size")
            continue
        missing, doubled = _count(tensor.detach(), [view for _, view in into])
        if missing == tensor.numel():
            nothing.append(name)
        elif missing:
            got = tensor.numel() - missing
            # vLLM's mark on weights that are padded and whose loaders leave the padding alone.
            enough = got >= getattr(tensor, "weight_loader_numel", tensor.numel())
            (wrong if enough else partly).append(f"{name} gets {got} of {tensor.numel()} elements")
        if doubled:
            writers = dict.fromkeys(by for by, _ in into)
            wrong.append(f"{name} gets {doubled} elements twice, from {_some(writers)}")
    if nothing:
        partly.insert(0, f"{len(nothing)} parameters get nothing: {_some(nothing)}")
    return Coverage("; ".join(partly), "; ".join(wrong))


def _count(tensor: torch.Tensor, views: list[torch.Tensor]) -> tuple[int, int]:
    """Elements of ``tensor`` that no view covers, and that several do."""
    if all(view.is_contiguous() for view in (tensor, *views)):
        return _count_runs(tensor, views)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    counts = torch.zeros(elements, dtype=torch.int16)
    for view in views:
        counts.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
    own = counts.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return int((own == 0).sum()), int((own > 1).sum())


def _count_runs(tensor: torch.Tensor, views: list[torch.Tensor]) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    last = first + tensor.numel()
    covered_to, missing, doubled_to, doubled = first, 0, first, 0
    for start, end in sorted(
        (max(first, start), min(last, start + view.numel()))
        for start, view in ((int(view.storage_offset()), view) for view in views)
    ):
        if end <= start:
            continue
        missing += max(0, start - covered_to)
        again = min(end, covered_to)
        doubled += max(0, again - max(start, doubled_to))
        doubled_to = max(doubled_to, again)
        covered_to = max(covered_to, end)
    return missing + last - covered_to, doubled


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _some(names: Iterable[str], limit: int = 8) -> str:
    ordered = list(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
