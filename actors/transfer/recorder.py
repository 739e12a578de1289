"""Runs a model's ``load_weights`` and notes the copies into its parameters, making none."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.types import TensorSpec

from . import vllm_model
from .layout import dtype_name, dtype_of
from .region import Region

_aten = torch.ops.aten
_SHAPES = re.compile(r"\b(sizes?|shapes?|dimensions?|exceeds|out of range)\b")
"""What torch says of a tensor that is not as large as it should be."""
_SAME_ELEMENTS = frozenset({_aten._to_copy.default, _aten.clone.default})
_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})


def shortened(text: str, limit: int) -> str:
    """``text``, cut to ``limit`` letters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


class NoPlan(Exception):
    """The weights cannot be loaded by plain copies; the text, one line, says why."""

    def __init__(self, reason: str, limit: int = 400) -> None:
        super().__init__(shortened(" ".join(reason.split()), limit))


class Unfit(NoPlan):
    """No loader could load these tensors: names or shapes are not the model's."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements ``source`` of checkpoint tensor ``name`` go to ``target``, which may cast them."""

    name: str
    source: Region
    dtype: torch.dtype
    """Of the checkpoint tensor."""
    whole: bool
    """``source`` is all of the tensor, in its order."""
    target: torch.Tensor
    """View into a parameter, of ``source``'s size."""

    @property
    def lossy(self) -> bool:
        """Whether the target cannot hold every value of the source's dtype."""
        return not _exact(self.dtype, self.target.dtype)


@dataclass(frozen=True, slots=True)
class _Source:
    """One checkpoint tensor, in the last of ``dtypes``, the others being what it was before."""

    spec: TensorSpec
    tensor: torch.Tensor
    """Meta: shape, no memory."""
    dtypes: tuple[torch.dtype, ...]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Feeds ``model.load_weights``; afterwards ``copies`` and ``writes`` say what it did."""

    def __init__(self, model: torch.nn.Module, specs: Sequence[TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._specs = model, specs
        self.current = "no tensor yet"
        """The tensor that the loader got last."""
        self._sources: dict[int, _Source] = {}
        self._casts: dict[tuple[int, torch.dtype], _Source] = {}
        self._computed: dict[int, tuple[torch.Tensor, str]] = {}
        self._held: dict[int, str] = {}
        for path, module in model.named_modules():
            groups = (vars(module), module._buffers, module._parameters)
            for name, value in (item for group in groups for item in group.items()):
                if isinstance(value, torch.Tensor):
                    self._held[_storage(value)] = f"{path}.{name}".lstrip(".")
        self.copies: list[Copy] = []
        self.writes: list[tuple[str, torch.Tensor]] = []
        """What was written and by what: copies, and fills with a constant."""

    def run(self) -> None:
        """Record (NoPlan)."""
        try:
            with vllm_model.loading_context(), torch.no_grad(), self:
                self._model.load_weights(self._feed())  # type: ignore[operator]
        except NoPlan:
            raise
        except (KeyError, AssertionError, ValueError) as error:
            # What vLLM's loaders say of a name or a shape that they do not know.
            raise Unfit(self._raised(error)) from error
        except Exception as error:
            words = str(error)
            misshaped = "meta" not in words and _SHAPES.search(words)
            raise (Unfit if misshaped else NoPlan)(self._raised(error)) from error

    def _raised(self, error: Exception) -> str:
        return f"{self.current}: load_weights raised {type(error).__name__}: {error}"

    def _feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs:
            self.current = spec.name
            dtype = dtype_of(spec.dtype)
            tensor = torch.empty(spec.shape, dtype=dtype, device="meta")
            self._sources[_storage(tensor)] = _Source(spec, tensor, (dtype,))
            yield spec.name, tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and _storage(args[0]) in self._held:
            self._copied(args[0], args[1])
            return args[0]
        if func in _FILLS and _storage(args[0]) in self._held:
            self._written("a fill", args[0])
            return args[0]
        if func in _SAME_ELEMENTS and (source := self._sources.get(_storage(args[0]))):
            # Also a move to a device: nothing is anywhere yet.
            return self._seen_as(source, args[0], kwargs.get("dtype") or args[0].dtype)
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._mutated(func, args[at] if at < len(args) else kwargs.get(argument.name))
        result = func(*args, **kwargs)
        self._derived(func, args, kwargs, result)
        return result

    def _copied(self, target: torch.Tensor, value: torch.Tensor) -> None:
        source = self._sources.get(_storage(value))
        if source is None:
            why = self._computed.get(_storage(value), (None, "no checkpoint tensor"))[1]
            raise NoPlan(f"{self.current}: {self._name(target)} is loaded from {why}")
        name = source.spec.name
        if value.dtype != source.dtypes[-1] or value.is_conj() or value.is_neg():
            raise NoPlan(f"{name}: {self._name(target)} is loaded from other bits of it")
        if value.numel() != target.numel():
            shapes = tuple(value.shape), f"{tuple(target.shape)} of {self._name(target)}"
            if not _expands(value.shape, target.shape):
                raise Unfit(f"{name}: {shapes[0]} does not go into {shapes[1]}")
            raise NoPlan(f"{name}: {shapes[0]} is repeated to fill {shapes[1]}")
        if target.numel() == 0:
            return
        if rounds := _rounds_on_the_way((*source.dtypes, target.dtype)):
            raise NoPlan(f"{name}: its cast {rounds} rounds on the way")
        value = value.expand(target.shape)
        region = Region(int(value.storage_offset()), tuple(value.shape), value.stride())
        self.copies.append(
            Copy(
                name=name,
                source=region,
                dtype=source.dtypes[0],
                whole=region.contiguous and region.elements == source.tensor.numel(),
                target=self._written(name, target),
            )
        )

    def _written(self, by: str, target: torch.Tensor) -> torch.Tensor:
        plain = target.detach().as_subclass(torch.Tensor)
        if any(
            n > 1 and stride == 0 for n, stride in zip(plain.shape, plain.stride(), strict=True)
        ):
            raise NoPlan(
                f"{self.current}: {self._name(target)} is written through an expanded view"
            )
        if plain.numel():
            self.writes.append((by, plain))
        return plain

    def _seen_as(self, source: _Source, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``value``, a view of ``source``, as the same view of the source in ``dtype``."""
        if value.dtype != source.dtypes[-1]:
            raise NoPlan(f"{source.spec.name}: the loader uses other bits of it")
        if dtype != value.dtype:
            key = (_storage(value), dtype)
            if key not in self._casts:
                cast = torch.empty(source.spec.shape, dtype=dtype, device="meta")
                self._casts[key] = _Source(source.spec, cast, (*source.dtypes, dtype))
                self._sources[_storage(cast)] = self._casts[key]
            source = self._casts[key]
        return source.tensor.as_strided(value.shape, value.stride(), value.storage_offset())

    def _mutated(self, func: Any, values: Any) -> None:
        for value in _tensors(values):
            storage = _storage(value)
            if storage in self._held:
                raise NoPlan(f"{self.current}: {func} changes {self._name(value)}")
            if storage in self._sources:
                raise NoPlan(f"{self._sources[storage].spec.name}: {func} changes it")

    def _derived(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember what was computed from checkpoint tensors, to name it if it is loaded."""
        origin = None
        for value in _tensors((args, kwargs)):
            storage = _storage(value)
            if storage in self._sources:
                origin = f"what {func} computes of {self._sources[storage].spec.name}"
            elif storage in self._computed:
                origin = self._computed[storage][1]
        if origin is not None:
            for value in _tensors(result):
                if _storage(value) not in self._sources and _storage(value) not in self._held:
                    self._computed[_storage(value)] = (value, origin)

    def _name(self, tensor: torch.Tensor) -> str:
        return self._held.get(_storage(tensor), "a tensor of the model")


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put back what the block replaced: parameters' memory, attributes of them and of modules.

    NoPlan if a parameter or its memory was replaced: that is no copy.
    """
    owners: list[tuple[str, Any]] = [*model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    memory = [(name, tensor, tensor.data) for name, tensor in tensors]
    saved = [(owner, _Saved(vars(owner))) for _, owner in [*owners, *tensors]]
    before = dict(tensors)
    try:
        yield
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if before.pop(name, None) is not tensor:
                raise NoPlan(f"{name}: load_weights makes a new tensor of it")
        for name, tensor, data in memory:
            if name in before or not _same_memory(tensor, data):
                raise NoPlan(f"{name}: load_weights gives it other memory")
    finally:
        for _, tensor, data in memory:
            if not _same_memory(tensor, data):
                tensor.data = data
        for owner, attributes in saved:
            attributes.restore(vars(owner))


class _Saved:
    """A dict as it was, and what its plain containers held."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)
        self._contents = {
            key: value.copy() for key, value in items.items() if type(value) in (dict, list, set)
        }

    def restore(self, items: dict[str, Any]) -> None:
        for key in items.keys() - self._items.keys():
            del items[key]
        for key, value in self._items.items():
            if items.get(key, self) is not value:
                items[key] = value
            # In place and only if need be: others may hold the container.
            if key in self._contents and not _same_contents(value, self._contents[key]):
                value.clear()
                (value.extend if type(value) is list else value.update)(self._contents[key])


def _same_contents(one: Any, other: Any) -> bool:
    if type(one) is set:
        return bool(one == other)
    a, b = (list(x.items()) if type(x) is dict else [(None, i) for i in x] for x in (one, other))
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(k == j and v is w for (k, v), (j, w) in pairs)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        _storage(one) == _storage(other)
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )


def _expands(shape: torch.Size, into: torch.Size) -> bool:
    """Whether ``copy_`` would take it."""
    try:
        return bool(torch.broadcast_shapes(shape, into) == into)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the tensor's memory, while somebody holds it. 0: it has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _rounds_on_the_way(dtypes: Sequence[torch.dtype]) -> str:
    """The chain of casts in words if one cast from first to last gives other bits, else empty."""
    chain = [dtype for i, dtype in enumerate(dtypes) if i == 0 or dtype != dtypes[i - 1]]
    if all(_exact(a, b) for a, b in itertools.pairwise(chain[:-1])):
        return ""
    return " to ".join(map(dtype_name, chain))


def _exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``."""
    if narrow == wide:
        return True
    if narrow.is_floating_point and wide.is_floating_point:
        a, b = torch.finfo(narrow), torch.finfo(wide)
        smallest = (a.tiny * a.eps, b.tiny * b.eps)
        return b.eps <= a.eps and b.max >= a.max and smallest[1] <= smallest[0]
    if _is_integer(narrow) and _is_integer(wide):
        c, d = torch.iinfo(narrow), torch.iinfo(wide)
        return d.min <= c.min and c.max <= d.max
    return False


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
