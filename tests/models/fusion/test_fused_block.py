"""A fused block follows its weights, and runs its own forward where only that will do."""

import copy
import gc
import inspect
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, from_numpy, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from models import fuse, unfuse
from models.errors import BackendError
from models.fusion import fused_block
from models.fusion.fused_block import Fused
from tests.models.fusion.made_blocks import DIM, HIDDEN, MLP, ROWS, made, rows
from tests.models.fusion.stepping import between_lines

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


class Residual(nn.Module):
    """A model around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y


def test_weights_that_are_changed_are_seen(block: nn.Module) -> None:
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    fuse(block)
    before = block(rows())
    block.load_state_dict(other.state_dict())
    changed = block(rows())
    assert not torch.allclose(changed, before)
    torch.testing.assert_close(changed, other(rows()), rtol=1e-5, atol=1e-5)
    block.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(block(rows()), other(rows()), rtol=1e-5, atol=1e-5)


def test_weights_that_lie_where_old_ones_lay_are_seen(block: nn.Module) -> None:
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.data = from_numpy(parameter.numpy().copy())
    fuse(block)
    block(rows())
    for parameter in block.parameters():
        version, place = parameter._version, parameter.numpy()
        place *= 1.5
        parameter.data = from_numpy(place)
        assert (parameter._version, parameter.data_ptr()) == (version, place.ctypes.data)
    y = block(rows())
    unfuse(block)
    torch.testing.assert_close(y, block(rows()), rtol=1e-5, atol=1e-5)


def test_changed_weights_are_seen_by_a_thread_that_calls_while_another_lays_them_out(block: nn.Module) -> None:
    fuse(block)
    for place in itertools.count():
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.neg_()
        meanwhile: list[Tensor] = []

        def call(number: int, place: int = place, found: list[Tensor] = meanwhile) -> None:
            if number == place:
                found.append(block(rows()))

        with between_lines(fused_block, call):
            found = block(rows())
        y = copy.deepcopy(block)(rows())  # which is not fused
        for each in (found, *meanwhile):
            torch.testing.assert_close(each, y, rtol=1e-5, atol=1e-5)
        if not meanwhile:  # the call has fewer lines
            break
    assert place > 1


@pytest.mark.parametrize("is_fused_form", [True, False])
@pytest.mark.filterwarnings("ignore:.*runs its own forward:RuntimeWarning")
def test_a_call_goes_on_wherever_its_block_is_given_back(block: nn.Module, is_fused_form: bool) -> None:
    x = rows().requires_grad_(not is_fused_form)
    y = block(x)
    for place in itertools.count():
        fuse(block)

        def give_back(number: int, place: int = place) -> None:
            if number == place:
                unfuse(block)

        with between_lines(fused_block, give_back):
            torch.testing.assert_close(block(x), y, rtol=1e-5, atol=1e-5)
        if unfuse(block):  # the call has fewer lines
            break
    assert place > 1


def test_another_type_is_followed_or_refused(block: nn.Module) -> None:
    fuse(block)
    exact = block(rows())
    block.bfloat16()
    assert block(rows(torch.bfloat16)).dtype == torch.bfloat16
    torch.testing.assert_close(block(rows(torch.bfloat16)).float(), exact, rtol=0.1, atol=0.1)
    block.double()
    with pytest.raises(BackendError, match=r"cannot be run fused any more, since its weights are torch\.float64"):
        block(rows(torch.float64))
    unfuse(block)
    assert block(rows(torch.float64)).dtype == torch.float64


def test_gradients_are_those_of_the_own_forward(block: nn.Module) -> None:
    block.requires_grad_(True)
    block(rows()).sum().backward()
    before = [it.grad.clone() for it in block.parameters() if it.grad is not None]
    block.zero_grad()
    fuse(block)
    with pytest.warns(RuntimeWarning, match="asked for a gradient"):
        block(rows()).sum().backward()
    after = [it.grad for it in block.parameters() if it.grad is not None]
    assert len(after) == len(before) == len(list(block.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with warnings.catch_warnings():  # once a block is enough
        warnings.simplefilter("error")
        block(rows())


def test_tangents_and_transforms_are_those_of_the_own_forward(block: nn.Module) -> None:
    x, t = rows(), rows(torch.float32, ROWS, DIM)
    stacked = {name: torch.stack([it, 1.5 * it]) for name, it in block.named_parameters()}

    def tangent() -> Tensor:
        with forward_ad.dual_level():
            y = block(forward_ad.make_dual(x, t))  # type: ignore[no-untyped-call]
            found: Tensor = forward_ad.unpack_dual(y).tangent  # type: ignore[no-untyped-call]
            return found

    def results() -> list[Tensor]:
        of_both = torch.func.vmap(lambda weights: torch.func.functional_call(block, weights, (x,)))(stacked)
        return [tangent(), torch.func.jvp(block, (x,), (t,))[1], of_both]

    own = results()
    fuse(block)
    with pytest.warns(RuntimeWarning, match="forward-mode differentiation"):
        assert all(map(torch.equal, results(), own))


def test_training_mode_and_autocast_run_the_own_forward(block: nn.Module) -> None:
    fuse(block)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(RuntimeWarning, match="under autocast"):
        y = block(rows())
    unfuse(block)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block(rows()), y)
    fuse(block)
    for part in (it for it in block.modules() if isinstance(it, Fused)):
        part.training = True  # the block alone, as nobody does
    with pytest.warns(RuntimeWarning, match="in training mode"):
        block(rows())


def test_dropout_that_is_switched_on_drops() -> None:
    block = made("timm")
    fuse(block)
    block.get_submodule("drop").train()
    with pytest.warns(RuntimeWarning, match="in training mode"):
        assert (block(rows()) == 0).sum() > ROWS * DIM / 4


def test_an_activation_that_is_changed_is_seen() -> None:
    block, other = MLP().eval().requires_grad_(False), nn.ReLU().eval()
    fuse(block)
    block.act = other
    y = block(rows())
    unfuse(block)
    torch.testing.assert_close(block(rows()), y, rtol=1e-5, atol=1e-5)


def test_hooks_run(block: nn.Module) -> None:
    fuse(block)
    seen: list[str] = []
    inner = next(it for it in block.modules() if isinstance(it, nn.Linear))
    block.register_forward_hook(lambda *_: seen.append("block"))
    handle = inner.register_forward_hook(lambda *_: seen.append("inner"))
    with pytest.warns(RuntimeWarning, match="has an inner layer with a hook or with a forward that was replaced"):
        block(rows())
    assert seen == ["inner", "block"]
    handle.remove()
    block(rows())
    assert seen == ["inner", "block", "block"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaMLP", "BertIntermediate and BertOutput", "a sequence"])
def test_torch_compile_takes_it_whole_and_follows_it(name: str) -> None:
    torch._dynamo.reset()
    block = Residual(made(name)).eval()
    own = block(rows())
    fuse(block)
    compiled = torch.compile(block, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(rows()), block(rows()))
        assert compiled(rows(torch.float32, 3, 5, DIM)).shape == (3, 5, DIM)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(1.5)
        assert torch.equal(compiled(rows()), block(rows()))
        assert not torch.allclose(block(rows()), own)
        unfuse(block)
        torch.testing.assert_close(compiled(rows()), block(rows()), rtol=1e-5, atol=1e-5)


def test_a_copy_or_a_pickle_is_not_fused(block: nn.Module) -> None:
    y = block(rows())
    fuse(block)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):  # noqa: S301
        assert unfuse(twin) == ()
        assert torch.equal(twin(rows()), y)
    assert len(unfuse(block)) > 0


def test_a_fused_model_is_let_go_of() -> None:
    block = made("LlamaMLP")
    fuse(block)
    reference = weakref.ref(block)
    del block
    gc.collect()
    assert reference() is None


def test_empty_and_flat_rows_pass(block: nn.Module) -> None:
    flat, empty = block(rows()[0]), block(rows(torch.float32, 0, DIM))
    fuse(block)
    torch.testing.assert_close(block(rows()[0]), flat, rtol=1e-5, atol=1e-5)
    assert block(rows(torch.float32, 0, DIM)).shape == empty.shape
    strided = rows(torch.float32, DIM, ROWS).T
    torch.testing.assert_close(block(strided), block(strided.contiguous()), rtol=1e-5, atol=1e-5)


def test_inputs_may_be_named() -> None:
    block = made("BertIntermediate and BertOutput")
    fuse(block)
    output, h = block.get_submodule("output"), rows(torch.float32, ROWS, HIDDEN)
    assert torch.equal(output(h, rows()), output(input_tensor=rows(), hidden_states=h))
    with pytest.raises(TypeError, match="input_tensor"):
        output(h)


@pytest.mark.parametrize("extra", [{"foo": 1}, {"x": 1}], ids=["no parameter", "a parameter twice"])
def test_arguments_that_the_own_forward_refuses_are_refused(extra: dict[str, Any]) -> None:
    block = made("LlamaMLP")
    with pytest.raises(TypeError) as own:
        block(rows(), **extra)
    fuse(block)
    with pytest.raises(TypeError) as fused:
        block(rows(), **extra)
    assert str(fused.value) == str(own.value)


class Forgiving(MLP):
    """A block whose forward takes whatever it is given, and adds a second one up."""

    def forward(self, *tensors: Tensor) -> Tensor:
        return super().forward(tensors[0]) + sum(tensors[1:])


def test_a_call_with_more_arguments_runs_the_own_forward_and_warns_once() -> None:
    block, x = Forgiving().requires_grad_(False).eval(), rows()
    expected = block(x, x)
    assert len(fuse(block).swapped) == 1
    with pytest.warns(RuntimeWarning, match="Forgiving: a fused block runs its own forward where it is called with"):
        assert torch.equal(block(x, x), expected)
    with warnings.catch_warnings(action="error"):
        assert torch.equal(block(x, x), expected)


class Doubled(nn.Linear):
    """What an adapter may put in a linear layer's place, its weight being the old one."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as PyTorch names it
        return 2 * super().forward(input)


def test_a_layer_that_is_replaced_is_refused_though_its_weight_stays(block: nn.Module) -> None:
    fuse(block)
    part = next(it for it in block.modules() if isinstance(it, Fused))
    name, layer = next((name, it) for name, it in part.named_children() if isinstance(it, nn.Linear))
    other = Doubled(layer.in_features, layer.out_features).eval().requires_grad_(False)
    other.weight, other.bias = layer.weight, layer.bias
    part.register_module(name, other)
    with pytest.raises(BackendError, match=f"since {name} is Doubled, not torch.nn.Linear"):
        block(rows())
    unfuse(block)
    assert block(rows()).shape == (ROWS, DIM)


def test_a_layers_forward_that_is_replaced_on_the_object_runs() -> None:
    block = made("LlamaMLP")
    fuse(block)
    layer = block.get_submodule("up_proj")
    own = layer.forward
    layer.forward = lambda x: 2 * own(x)
    with pytest.warns(RuntimeWarning, match="has an inner layer with a hook or with a forward that was replaced"):
        y = block(rows())
    unfuse(block)
    assert torch.equal(block(rows()), y)


def test_a_forward_that_was_kept_still_works_after_the_block_is_given_back(block: nn.Module) -> None:
    y = block(rows())
    fuse(block)
    part = next(it for it in block.modules() if isinstance(it, Fused))
    kept = part.forward
    part.forward = lambda *inputs: kept(*inputs)  # type: ignore[method-assign]
    torch.testing.assert_close(block(rows()), y, rtol=1e-5, atol=1e-5)
    unfuse(block)
    assert torch.equal(block(rows()), y)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_trace_is_of_the_own_forward(block: nn.Module) -> None:
    y = block(rows())
    fuse(block)
    with pytest.warns(RuntimeWarning, match=r"traced by torch\.jit"):
        traced = torch.jit.trace(block, rows(), check_trace=False)  # type: ignore[no-untyped-call]
    assert torch.equal(traced(rows()), y)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_a_hook_on_all_modules_is_met_by_the_inner_layers(block: nn.Module, register: Callable[..., Any]) -> None:
    fuse(block)
    y = block(rows())
    seen: set[nn.Module] = set()
    handle = register(lambda module, *_: seen.add(module))
    try:
        with pytest.warns(RuntimeWarning, match="has an inner layer with a hook"):
            block(rows())
    finally:
        handle.remove()
    assert {it for it in block.modules() if isinstance(it, nn.Linear)} <= seen
    assert torch.equal(block(rows()), y)


def test_a_symbolic_trace_is_of_the_own_forward(block: nn.Module) -> None:
    y = block(rows())
    fuse(block)
    fused = [type(it) for it in block.modules()]
    with pytest.warns(RuntimeWarning, match=r"traced by torch\.jit or torch\.fx"):
        traced = torch.fx.symbolic_trace(block)
    assert not any(isinstance(it, Fused) for it in traced.modules())
    assert torch.equal(traced(rows()), y)
    assert [type(it) for it in block.modules()] == fused


def test_a_symbolic_trace_holds_a_block_inside_a_model_as_its_layers() -> None:
    model = Residual(made("LlamaMLP")).eval()
    y = model(rows())
    fuse(model)
    with pytest.warns(RuntimeWarning, match=r"torch\.fx"):
        traced = torch.fx.symbolic_trace(model)
    layers = {"block.gate_proj", "block.up_proj", "block.down_proj"}
    assert layers <= {it.target for it in traced.graph.nodes if it.op == "call_module"}
    assert torch.equal(traced(rows()), y)


def test_a_script_is_refused_and_leaves_the_model_as_it_is() -> None:
    model = Residual(made("LlamaMLP")).eval()
    fuse(model)
    for it in (model, model.block):
        with pytest.raises(BackendError, match=r"undo it with models\.unfuse, script the model, and fuse it again$"):
            torch.jit.script(it)
    assert isinstance(model.block, Fused)


def test_a_fused_forward_has_the_parameters_of_the_own_one(block: nn.Module) -> None:
    before = [inspect.signature(it.forward) for it in block.modules()]
    fuse(block)
    assert [inspect.signature(it.forward) for it in block.modules()] == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_export_is_of_the_own_forward_and_needs_the_model_no_more() -> None:
    model = Residual(made("LlamaMLP")).eval()
    y = model(rows())
    fuse(model)
    with torch.no_grad():
        exported = torch.export.export(model, (rows(),))
        assert not any("feed_forward" in str(it.target) for it in exported.graph.nodes)
        del model
        gc.collect()
        assert torch.equal(exported.module()(rows()), y)


def test_weights_that_blocks_share_stay_shared() -> None:
    first, second = made("LlamaMLP"), made("LlamaMLP")
    second.up_proj = first.up_proj
    second.get_submodule("gate_proj").weight = first.get_submodule("gate_proj").weight
    model = nn.Sequential(first, second, first)
    own = model(rows())
    assert [it.name for it in fuse(model).swapped] == ["0", "1"]
    torch.testing.assert_close(model(rows()), own, rtol=1e-4, atol=1e-4)
    first.get_submodule("up_proj").weight.mul_(1.5)  # type: ignore[operator]
    changed = model(rows())
    assert unfuse(model) == ("0", "1")
    torch.testing.assert_close(changed, model(rows()), rtol=1e-4, atol=1e-4)


def test_rows_of_another_type_or_place_are_refused_and_not_converted() -> None:
    block = made("LlamaMLP")
    fuse(block)
    with pytest.raises(TypeError, match=r"x must be torch\.float32 as the weight is, got torch\.bfloat16"):
        block(rows(torch.bfloat16))
    with pytest.raises(ValueError, match="x must be on the CPU, got meta"):
        block(torch.empty(3, DIM, device="meta"))
    block.to("meta")
    with pytest.raises(BackendError, match="since its weights are on meta"):
        block(torch.empty(3, DIM, device="meta"))
