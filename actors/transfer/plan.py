"""What vLLM's ``load_weights`` copies, recorded once and replayed for every later update.

``record`` feeds the model's own loader with checkpoint tensors that have a shape and no memory,
and notes each copy into a parameter instead of making it. The loader decides all: names, fused
parameters, slices of this worker, experts. If it does anything that a copy of a part of a
checkpoint tensor is not, or does not fill every parameter exactly once, there is no plan, and
the caller must use vLLM's layerwise reload. The live weights are not touched.

Weights that vLLM derives from the loaded ones are not seen here: ask
``vllm_model.derived_weights`` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from orchestrator.errors import TransferError
from orchestrator.types import TensorSpec

from . import runs
from .coverage import coverage_of
from .layout import dtype_name, dtype_of
from .recorder import Copy, NoPlan, Recorder, Unfit, shortened, unchanged
from .region import Region
from .runs import Pair, Runs

__all__ = ["Bound", "Copy", "LoadPlan", "NoPlan", "Region", "Unfit", "must_fit"]


_TOLD = 5
"""Tensors that are named when a checkpoint does not fit; more would be a wall of text."""
_LETTERS = 1000


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The copies that load a checkpoint of ``specs`` into this worker's parameters."""

    specs: tuple[TensorSpec, ...]
    copies: tuple[Copy, ...]
    """In the loader's order. No two write to the same element."""
    unused: tuple[str, ...]
    """Tensors of which this worker takes nothing: tied ones, experts and layers of others."""
    lossy: tuple[str, ...]
    """Tensors that the model holds rounded: no digest of what it holds can be compared."""
    parameters: tuple[tuple[torch.nn.Module, str, int], ...]
    """Each parameter when the plan was recorded: its module, its name there, its address."""

    @classmethod
    def record(cls, model: torch.nn.Module, specs: Sequence[TensorSpec]) -> LoadPlan:
        """Record what ``model.load_weights`` does with tensors of ``specs``.

        NoPlan, saying why, if that is not a set of copies that fills every parameter once; Unfit
        if names or shapes are missing, unexpected or not the model's.
        """
        for name, parameter in model.named_parameters():
            if parameter.numel() == 0:
                raise NoPlan(f"{name} is empty: its weight was re-packed")
            if parameter.is_meta:
                raise NoPlan(f"{name} is on the meta device: the model is not loaded")
        recorder, wrong = _recorded(model, specs)
        if wrong:
            raise NoPlan(wrong)
        copies = tuple(recorder.copies)
        used = {copy.name for copy in copies}
        return cls(
            specs=tuple(specs),
            copies=copies,
            unused=tuple(spec.name for spec in specs if spec.name not in used),
            lossy=tuple(dict.fromkeys(copy.name for copy in copies if copy.lossy)),
            parameters=tuple(_addresses(model)),
        )

    @property
    def widens(self) -> bool:
        """The model holds some tensors in more bits than the checkpoint."""
        return any(copy.target.dtype != copy.dtype for copy in self.copies)

    def fits(self) -> bool:
        """Whether the model's parameters are still where they were. Record anew if not.

        Microseconds: it is asked inside the pause.
        """
        for module, name, address in self.parameters:
            parameter = module._parameters.get(name)
            if parameter is None or parameter.data_ptr() != address:
                return False
        return True

    def bind(self, sources: Mapping[str, torch.Tensor]) -> Bound:
        """Resolve the plan for ``sources``: contiguous checkpoint tensors by name.

        They may be on any device that ``copy_`` reads. Their memory is read whenever the result
        runs. TransferError for a tensor that is missing or not as its spec says.
        """
        specs = {spec.name: spec for spec in self.specs}
        for name in dict.fromkeys(copy.name for copy in self.copies):
            _check(specs[name], sources.get(name))
        return Bound((copy.target, copy.source.of(sources[copy.name])) for copy in self.copies)

    def live(self) -> Iterator[tuple[str, Region, torch.Tensor]]:
        """What the model holds now: name, region of the checkpoint tensor, and its elements.

        For the digest: in the checkpoint's dtype, widened elements narrowed back in a copy. Not
        of ``lossy`` tensors.
        """
        lossy = frozenset(self.lossy)
        for copy in self.copies:
            if copy.name not in lossy:
                yield copy.name, copy.source, copy.target.to(copy.dtype)


def must_fit(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> None:
    """Unfit if ``model`` cannot load all of itself from ``specs``. Silent where nobody can tell.

    The model may be on the meta device.
    """
    try:
        _recorded(model, specs)
    except Unfit:
        raise
    except NoPlan:
        return


def _recorded(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> tuple[Recorder, str]:
    """What ``model.load_weights`` writes, and what is wrong with that, in words."""
    left, problems = list(specs), list[str]()
    while True:
        recorder = Recorder(model, left)
        try:
            with unchanged(model):
                recorder.run()
        except Unfit as error:
            # The others are tried without it, so that all that is wrong is told: unless the loader
            # had taken them all before it raised, and blames none.
            problems.append(str(error))
            others = [spec for spec in left if spec.name != recorder.current]
            blamed = len(others) < len(left) and left[-1].name != recorder.current
            if not blamed or len(problems) == _TOLD:
                break
            left = others
            continue
        except NoPlan:
            if not problems:
                raise
            break
        covered = coverage_of(model, recorder.writes)
        if covered.missing:
            problems += filter(None, (covered.missing, covered.wrong))
        break
    if problems:
        limit = _LETTERS // len(problems)
        raise Unfit("; ".join(shortened(problem, limit) for problem in problems), _LETTERS)
    return recorder, covered.wrong


class Bound:
    """A plan with its sources. Not for two threads at once."""

    def __init__(self, pairs: Iterator[Pair]) -> None:
        # One kernel takes tensors of one pair of dtypes and devices with equal strides; a single
        # other one in the list would make torch copy all of them one by one.
        batches: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        plain: dict[torch.device, list[Pair]] = {}
        for target, source in pairs:
            if runs.usable(target.device) and runs.fits(target, source):
                plain.setdefault(target.device, []).append((target, source))
                continue
            alike = target.is_contiguous() and source.is_contiguous()
            if alike:
                target, source = target.view(-1), source.view(-1)
            key = (alike, target.dtype, target.device, source.dtype, source.device)
            targets, sources = batches.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)
        self._batches = tuple(batches.values())
        self._runs = [Runs(found) for found in plain.values()]

    @torch.no_grad()
    def run(self) -> None:
        """Copy. On a GPU: enqueued on the current stream, not waited for."""
        for found in self._runs:
            found.run()
        for targets, sources in self._batches:
            torch._foreach_copy_(targets, sources)


def _addresses(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, int]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter.data_ptr()


def _check(spec: TensorSpec, source: torch.Tensor | None) -> None:
    if source is None:
        raise TransferError(f"tensor {spec.name!r} of the plan is not among the sources")
    if (
        tuple(source.shape) != spec.shape
        or source.dtype != dtype_of(spec.dtype)
        or not source.is_contiguous()
    ):
        raise TransferError(
            f"tensor {spec.name!r} does not fit the plan: {dtype_name(source.dtype)} "
            f"{tuple(source.shape)}, contiguous={source.is_contiguous()}; the plan is for "
            f"contiguous {spec.dtype} {spec.shape}"
        )
