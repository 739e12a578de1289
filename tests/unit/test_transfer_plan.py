"""Load plans of models with loaders of every kind: what is recorded, replayed and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from actors.transfer import vllm_model
from actors.transfer.digest import digest_all, parts_of, whole
from actors.transfer.layout import Layout, dtype_name
from actors.transfer.plan import LoadPlan, NoPlan, Unfit, must_fit
from actors.transfer.planned import Planned
from actors.transfer.region import Region
from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[dict[str, nn.Parameter], str, torch.Tensor], None]


class Model(nn.Module):
    """Parameters of the given shapes, loaded by ``loader``."""

    def __init__(self, loader: Loader, dtype: torch.dtype = torch.float32, **shapes: Any) -> None:
        super().__init__()
        self.loader = loader
        self.seen: set[str] = set()
        self.parts: list[str] = []
        for name, shape in shapes.items():
            value = torch.rand(shape).to(dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.seen.add(name)
            self.parts.append(name)
            self.count = len(self.parts)
            self.loader(dict(self.named_parameters()), name, tensor)


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(n, dtype_name(t.dtype), tuple(t.shape), t.nbytes) for n, t in tensors.items()
    ]


def checkpoint(dtype: torch.dtype = torch.float32, **shapes: Any) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in model.named_parameters(remove_duplicate=False)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(t.view(torch.uint8), other[n].view(torch.uint8)) for n, t in one.items()
    )


def qkv(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    place = {"q": (0, 8), "k": (8, 2), "v": (10, 2)}
    params["qkv"].data.narrow(0, *place[name]).copy_(tensor)


def plain(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor)


def rows_of_rank_1(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    size = params[name].shape[0]
    params[name].data.copy_(tensor.narrow(0, size, size))


def columns_of_rank_1(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    size = params[name].shape[1]
    params[name].data[:] = tensor[:, size : 2 * size]


def transposed(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor.t().contiguous())


def experts(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    """Fused gate and up of all experts, transposed, as some checkpoints have them."""
    gate, up = tensor.transpose(1, 2).contiguous().chunk(2, dim=1)
    for expert in range(3):
        params["w13"].data[expert, :4].copy_(gate[expert])
        params["w13"].data[expert, 4:].copy_(up[expert])


def interleaved(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params["w"].data[:, 0 if name == "even" else 1 :: 2].copy_(tensor)


def padded(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name][: tensor.shape[0]].data.copy_(tensor)
    params[name][tensor.shape[0] :].data.fill_(0)


def cast_first(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor.to(params[name].dtype).clone()[:])


def moved(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor.detach().to("cpu").view(-1).reshape(params[name].shape))


def scalar(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor.reshape(1))


BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
KINDS: dict[str, tuple[Loader, dict[str, Any], dict[str, Any], torch.dtype, torch.dtype]] = {
    "fused": (qkv, {"qkv": (12, 4)}, {"q": (8, 4), "k": (2, 4), "v": (2, 4)}, F32, F32),
    "rows": (rows_of_rank_1, {"w": (3, 4)}, {"w": (6, 4)}, F32, F32),
    "columns": (columns_of_rank_1, {"w": (3, 4)}, {"w": (3, 8)}, F32, F32),
    "transposed": (transposed, {"w": (3, 4)}, {"w": (4, 3)}, F32, F32),
    "experts": (experts, {"w13": (3, 8, 5)}, {"gate_up": (3, 5, 8)}, F32, F32),
    "interleaved": (interleaved, {"w": (3, 6)}, {"even": (3, 3), "odd": (3, 3)}, F32, F32),
    "rounding": (plain, {"w": (3, 4)}, {"w": (3, 4)}, F32, BF16),
    "rounding first": (cast_first, {"w": (3, 4)}, {"w": (3, 4)}, F32, BF16),
    "widening": (cast_first, {"w": (3, 4)}, {"w": (3, 4)}, BF16, F32),
    "moved": (moved, {"w": (3, 4)}, {"w": (12,)}, F32, F32),
    "scalar": (scalar, {"w": (1,)}, {"w": ()}, F32, F32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_replay_is_what_the_loader_does(kind: str) -> None:
    loader, shapes, names, wire, dtype = KINDS[kind]
    model, loaded = Model(loader, dtype, **shapes), Model(loader, dtype, **shapes)
    a, b = checkpoint(wire, **names), checkpoint(wire, **names)
    model.load_weights(a.items())
    plan = LoadPlan.record(model, specs_of(a))
    bound = plan.bind(b)
    bound.run()
    loaded.load_weights(b.items())
    assert same(bits(model), bits(loaded))
    b["late"] = torch.zeros(1)
    for tensor in b.values():
        tensor.mul_(2)
    bound.run()
    loaded.load_weights((n, t) for n, t in b.items() if n != "late")
    assert same(bits(model), bits(loaded)), "sources are resolved once and read on every run"
    assert bool(plan.lossy) is kind.startswith("rounding")
    assert [copy.whole for copy in plan.copies] == [
        kind not in ("rows", "columns", "transposed", "experts")
    ] * len(plan.copies)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("rounding")])
def test_the_live_weights_digest_as_the_checkpoint(kind: str) -> None:
    loader, shapes, names, wire, dtype = KINDS[kind]
    model, weights = Model(loader, dtype, **shapes), checkpoint(wire, **names)
    model.load_weights(weights.items())
    full = {n: tuple(t.shape) for n, t in weights.items()}
    held = parts_of(LoadPlan.record(model, specs_of(weights)).live(), full)
    if kind in ("rows", "columns"):
        other = {n: t.chunk(2, dim=("rows", "columns").index(kind))[0] for n, t in weights.items()}
        region = Region(0, tuple(other["w"].shape), weights["w"].stride())
        answers = {0: parts_of([("w", region, other["w"])], full), 1: held}
    else:
        answers = {0: held}
    assert whole("e", full, answers) == digest_all(weights.items())


def test_recording_changes_nothing() -> None:
    model = Model(qkv, qkv=(12, 4))
    weights = checkpoint(q=(8, 4), k=(2, 4), v=(2, 4))
    before, attributes = bits(model), dict(vars(model))
    model.qkv.mark = ["kept"]
    LoadPlan.record(model, specs_of(weights))
    assert same(bits(model), before)
    assert vars(model) == attributes and model.seen == set() and model.parts == []
    assert vars(model.qkv) == {"mark": ["kept"]}
    assert not hasattr(model, "count")


def test_padding_counts_as_covered_and_is_left_alone() -> None:
    model = Model(padded, w=(5, 2))
    weights = checkpoint(w=(3, 2))
    model.load_weights(weights.items())
    model.w.data[3:] = 7
    LoadPlan.record(model, specs_of(weights)).bind(weights).run()
    assert torch.equal(model.w[:3], weights["w"]) and model.w[3:].eq(7).all()


def test_tied_parameters_are_covered_by_one_name() -> None:
    model = Model(plain, embed=(4, 2))
    model.head = nn.Parameter(model.embed.data, requires_grad=False)
    plan = LoadPlan.record(model, specs_of(checkpoint(embed=(4, 2))))
    assert len(plan.copies) == 1
    with pytest.raises(NoPlan, match=r"^embed gets 8 elements twice, from embed, head$"):
        LoadPlan.record(model, specs_of(checkpoint(embed=(4, 2), head=(4, 2))))


def test_tensors_of_which_nothing_is_taken_are_listed() -> None:
    def some(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
        if name in params:
            plain(params, name, tensor)

    plan = LoadPlan.record(Model(some, w=(2,)), specs_of(checkpoint(w=(2,), rotary=(3,))))
    assert plan.unused == ("rotary",)
    assert plan.copies[0].source == Region(0, (2,), (1,))


def scaled(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_((tensor * 2).t().contiguous().t())


def added(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.add_(tensor)


def normalised(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor / tensor.norm().item())


def changed_source(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    tensor += 1
    params[name].data.copy_(tensor)


def changed_copy(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    own = tensor.clone()
    own[0] = 0
    params[name].data.copy_(own)


def from_elsewhere(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(torch.ones(tensor.shape))


def reinterpreted(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor.view(torch.int32))


def repeated(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor[:1])


def replaced(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data = torch.zeros(tensor.shape)


def rounded(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor.to(torch.bfloat16))


def filled_then_copied(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.zero_()
    params[name].data[1:].copy_(tensor[1:])


def twice(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data.copy_(tensor)
    params[name].data[:, :1].copy_(tensor[:, :1])


def half(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data[:, :1].copy_(tensor[:, :1])


def first_rows(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data[:2].copy_(tensor[:2])


def by_index(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    params[name].data[torch.tensor([0, 1, 2])] = tensor.to("cpu")


def refused(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    raise ValueError(f"no parameter\nnamed {name!r} " + "x" * 1000)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (scaled, r"w: w is loaded from what aten\.mul\.Tensor computes of w"),
        (added, r"w: aten\.add_\.Tensor changes w"),
        (normalised, r"w: load_weights raised RuntimeError: .*meta"),
        (changed_source, r"w: aten\.add_\.Tensor changes it"),
        (changed_copy, r"w: aten\.\w+\.\w+ changes it"),
        (from_elsewhere, "w: w is loaded from no checkpoint tensor"),
        (reinterpreted, "w: w is loaded from other bits"),
        (repeated, r"w: \(1, 3\) is repeated to fill \(3, 3\) of w"),
        (replaced, "w: load_weights gives it other memory"),
        (rounded, "w: its cast float32 to bfloat16 to float32 rounds on the way"),
        (filled_then_copied, "w gets 6 elements twice, from a fill, w"),
        (twice, "w gets 3 elements twice, from w"),
        (half, "w gets 3 of 9 elements"),
        (first_rows, "w gets 6 of 9 elements"),
        (by_index, r"w: aten\.index_put_\.default changes w"),
        (refused, "w: load_weights raised ValueError: no parameter named 'w' x+"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_plain_copy_is_refused_and_leaves_no_trace(loader: Loader, reason: str) -> None:
    model = Model(loader, w=(3, 3))
    before, pointer = bits(model), model.w.data_ptr()
    with pytest.raises(NoPlan, match=f"^{reason}") as caught:
        LoadPlan.record(model, specs_of(checkpoint(w=(3, 3))))
    assert same(bits(model), before) and model.w.data_ptr() == pointer
    assert not model.seen and not hasattr(model, "count")
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 400


def test_a_parameter_made_anew_is_refused_and_put_back() -> None:
    def load(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
        model.w = nn.Parameter(torch.zeros(2), requires_grad=False)

    model = Model(load, w=(2,))
    own = model.w
    with pytest.raises(NoPlan, match="w: load_weights makes a new tensor of it"):
        LoadPlan.record(model, specs_of(checkpoint(w=(2,))))
    assert model.w is own


def test_parameters_without_a_tensor_are_named() -> None:
    with pytest.raises(NoPlan, match="2 parameters get nothing: b, c"):
        LoadPlan.record(Model(plain, a=(2,), b=(2,), c=(1,)), specs_of(checkpoint(a=(2,))))


def test_all_that_does_not_fit_is_named_at_once() -> None:
    model = Model(plain, a=(2,), b=(2,), c=(1,), d=(4,))
    wrong = checkpoint(a=(2,), b=(3,), x=(1,), y=(1,), d=(4,))
    with pytest.raises(Unfit) as caught:
        LoadPlan.record(model, specs_of(wrong))
    said = str(caught.value)
    for words in (
        "b: (3,) does not go into (2,) of b",
        "x: load_weights raised KeyError",
        "y: load_weights",
    ):
        assert words in said
    assert said.endswith("2 parameters get nothing: b, c")
    many = checkpoint(**{f"x{i}": (1,) for i in range(100)})
    with pytest.raises(Unfit) as caught:
        LoadPlan.record(model, specs_of(many))
    assert str(caught.value).count("raised KeyError") == 5 and len(str(caught.value)) <= 1000


def test_what_does_not_fit_is_refused_also_where_another_is_no_plain_copy() -> None:
    def load(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
        params[name].data.copy_(tensor.exp() if name == "c" else tensor)

    model = Model(load, a=(2,), c=(2,))
    for wrong in (checkpoint(x=(1,), a=(2,), c=(2,)), checkpoint(a=(3,), c=(2,))):
        with pytest.raises(Unfit, match=f"^{next(iter(wrong))}: "):
            LoadPlan.record(model, specs_of(wrong))
        with pytest.raises(Unfit):
            must_fit(model, specs_of(wrong))
    must_fit(model, specs_of(checkpoint(a=(2,), c=(2,))))


def test_a_loader_that_takes_all_before_it_raises_blames_no_other() -> None:
    class Eager(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(list(weights))

    tried = {"bad": (1,), "a": (2,), "b": (2,)}
    with pytest.raises(Unfit) as caught:
        LoadPlan.record(Eager(plain, a=(2,), b=(2,)), specs_of(checkpoint(**tried)))
    assert str(caught.value) == "b: load_weights raised KeyError: 'bad'"


def test_tied_tensors_are_found_under_the_checkpoints_names() -> None:
    class Mapper:
        def apply_dict(self, values: dict[str, str]) -> dict[str, str]:
            return {f"language.{name}": value for name, value in values.items()}

    model = nn.Module()
    model.language = Model(plain, embed=(4, 2))
    model.language.head = model.language.embed
    assert vllm_model.tied_names(model, ["embed", "head"]) == {}
    model.hf_to_vllm_mapper = Mapper()
    assert vllm_model.tied_names(model, ["embed", "head"]) == {"head": "embed"}
    assert vllm_model.tied_names(model, ["embed"]) == vllm_model.tied_names(model, ["head"]) == {}


def test_a_repacked_weight_is_refused() -> None:
    model = Model(plain, w=(2, 2), packed=(0,))
    with pytest.raises(NoPlan, match="packed is empty: its weight was re-packed"):
        LoadPlan.record(model, specs_of(checkpoint(w=(2, 2))))


def test_buffers_in_the_checkpoint_are_loaded_too() -> None:
    def load(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
        (model.mean if name == "mean" else params[name]).data.copy_(tensor)

    model = Model(load, w=(2,))
    model.register_buffer("mean", torch.zeros(3))
    weights = checkpoint(w=(2,), mean=(3,))
    LoadPlan.record(model, specs_of(weights)).bind(weights).run()
    assert torch.equal(model.mean, weights["mean"])
    LoadPlan.record(model, specs_of(checkpoint(w=(2,))))


def test_one_storage_may_hold_several_parameters() -> None:
    flat = torch.zeros(10)
    model = Model(plain)
    model.a = nn.Parameter(flat[:4].view(2, 2), requires_grad=False)
    model.b = nn.Parameter(flat[4:], requires_grad=False)
    weights = checkpoint(a=(2, 2), b=(6,))
    LoadPlan.record(model, specs_of(weights)).bind(weights).run()
    assert torch.equal(flat, torch.cat([weights["a"].view(-1), weights["b"]]))
    with pytest.raises(NoPlan, match="1 parameters get nothing: b"):
        LoadPlan.record(model, specs_of(checkpoint(a=(2, 2))))


def test_sources_that_do_not_fit_are_named() -> None:
    weights = checkpoint(w=(2, 3))
    plan = LoadPlan.record(Model(plain, w=(2, 3)), specs_of(weights))
    bad = [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 2).t()]
    for tensor in bad:
        with pytest.raises(TransferError, match="tensor 'w' does not fit the plan"):
            plan.bind({"w": tensor})
    with pytest.raises(TransferError, match="'w' of the plan is not among the sources"):
        plan.bind({})


def test_a_plan_knows_when_parameters_moved() -> None:
    model = Model(plain, w=(2,))
    plan = LoadPlan.record(model, specs_of(checkpoint(w=(2,))))
    assert plan.fits()
    model.w.data = model.w.data.clone()
    assert not plan.fits()
    model.w = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert LoadPlan.record(model, plan.specs).parameters != plan.parameters
    assert not plan.fits()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Planned, Layout]:
    """A model of one parameter without a vLLM around it, and its plan."""
    monkeypatch.setattr(vllm_model, "derived_weights", lambda model: iter(()))
    model = Model(plain, w=(2,))
    return model, Planned(model), Layout.of(specs_of(checkpoint(w=(2,))))


def test_a_plan_is_used_once_proven_and_not_when_parameters_have_moved(
    planned: tuple[Model, Planned, Layout],
) -> None:
    model, found, layout = planned
    found.record(layout)
    assert found.wants_proof and found.proven is None
    found.prove({"w": model.w.data.clone()})
    assert not found.wants_proof and found.proven is not None
    assert "1 copies, proven" in found.describe()
    model.w.data = model.w.data.clone()
    assert found.proven is None
    with pytest.raises(TransferError, match="not where the update was put"):
        found.parts()
    found.record(layout)
    assert found.wants_proof


def test_a_reload_that_contradicts_the_plan_is_no_success(
    planned: tuple[Model, Planned, Layout],
) -> None:
    model, found, layout = planned
    found.record(layout)
    with pytest.raises(TransferError, match=r"left w otherwise than it came \(1 such tensors\)"):
        found.prove({"w": model.w.data.flip(0)})
    assert found.proven is None and found.wants_proof
    with pytest.raises(TransferError, match="could not be compared with what came: KeyError"):
        found.prove({})
    found.prove({"w": model.w.data.clone()})
    assert found.proven is not None


def test_tensors_that_do_not_fit_are_refused_and_lora_has_no_plan(
    planned: tuple[Model, Planned, Layout],
) -> None:
    model, found, layout = planned
    for wrong in (checkpoint(w=(2,), v=(1,)), checkpoint(v=(2,))):
        with pytest.raises(ChannelError, match="do not fit the engine's model"):
            found.record(Layout.of(specs_of(wrong)))
    lora = Planned(model, "the engine serves LoRA adapters")
    lora.record(layout)
    assert not lora.wants_proof and "LoRA" in lora.describe()


def test_mixed_dtypes_and_slices_run_in_few_batches() -> None:
    model = Model(plain, a=(2, 3), b=(4,))
    model.c = nn.Parameter(torch.zeros(3, dtype=BF16), requires_grad=False)
    weights = checkpoint(a=(2, 3), b=(4,), c=(3,))
    bound = LoadPlan.record(model, specs_of(weights)).bind(weights)
    assert len(bound._batches) == 2
    bound.run()
    assert torch.equal(model.c, weights["c"].to(BF16)) and torch.equal(model.a, weights["a"])
