"""Swaps the feed-forward blocks of an existing PyTorch model for fused ones, in place, and back.

A block stays the object it is, with its parameters, its children and its names: only its class becomes one whose
`forward` is fused. So ``state_dict``, hooks on the block and ``isinstance`` go on as before, weights that are changed
are seen, and `unfuse` has nothing to restore but the class.

Blocks are recognised by the names of their children and by what they compute, never by importing whose they are: the
activation is told by its values, and a few rows are run through the block's own forward and the fused one.
"""

import inspect
import itertools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copyreg import _reconstructor  # type: ignore[attr-defined]
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from kernels import onednn
from kernels.onednn import PackedLinear
from models.config import Activation
from models.errors import BackendError
from models.mlp import ACTIVATIONS

Role = Literal["whole", "hidden", "output"]
Pair = tuple[Tensor, Tensor | None]  # a weight, (out, in), and its bias

OWN_FORWARD = (
    "a fused block runs its own forward while it is in training mode, under autocast, asked for a gradient, or has a "
    "hook on an inner layer: call eval(), and run it under torch.inference_mode()"
)
OTHER_ARGUMENTS = (
    "a fused block runs its own forward where it is called with other arguments than its forward has parameters: pass "
    "each of them once"
)
# The probe tells another formula, not another rounding: the rule of kernels/numerics.py is for the tests.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
_LOOKS_LIKE_ONE = re.compile(r"mlp|ffn|feed_?forward|dense_?act|intermediate|moe|experts", re.IGNORECASE)

_PYTORCH = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, slots=True)
class Form:
    """A feed-forward block, or a part of one, by the names of its children.

    Attributes:
        role: whole is ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate; hidden is ``act(up(x))``;
            output is ``norm(down(h) + x)``.
        up: also the gate where both are the halves of one matrix, gate first.
        act: where the activation is.
        norm: None for no norm.
    """

    role: Role
    up: str | None = None
    down: str | None = None
    act: str | None = None
    gate: str | None = None
    norm: str | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """The linear layers' names, each once."""
        return tuple(dict.fromkeys(it for it in (self.gate, self.up, self.down) if it is not None))

    @property
    def needed(self) -> tuple[str, ...]:
        """The attributes that a module of this form has."""
        return (*self.linears, *(it for it in (self.act, self.norm) if it is not None))


# To add one, add a row, and a module of it to tests/models/test_fusion.py.
FORMS = (
    Form("whole", gate="gate_proj", up="up_proj", down="down_proj", act="act_fn"),  # Llama, Mistral, Qwen, Gemma
    Form("whole", gate="gate_up_proj", up="gate_up_proj", down="down_proj", act="activation_fn"),  # Phi-3
    Form("whole", gate="wi_0", up="wi_1", down="wo", act="act"),  # T5 v1.1
    Form("whole", up="wi", down="wo", act="act"),  # T5
    Form("whole", up="c_fc", down="c_proj", act="act"),  # GPT-2
    Form("whole", up="fc1", down="fc2", act="activation_fn"),  # ViT, CLIP, SigLIP
    Form("whole", up="fc1", down="fc2", act="act"),  # timm
    Form("whole", up="lin1", down="lin2", act="activation"),  # DistilBERT
)
# BERT and its kin keep a block in two modules, side by side in a layer; an output alone may be the attention's.
PAIR = {
    "intermediate": Form("hidden", up="dense", act="intermediate_act_fn"),
    "output": Form("output", down="dense", norm="LayerNorm"),
}


@dataclass(frozen=True, slots=True)
class Swapped:
    """A block that is fused.

    Attributes:
        name: as in ``named_modules``.
        kind: the class it had.
        activation: None for an output.
        implementation: "onednn" or "triton".
        copied_bytes: of the weights that are held a second time, in the layout the kernels need.
    """

    name: str
    kind: str
    activation: str | None
    implementation: str
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A block that is not fused, and why: `reason` is one sentence without a full stop."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class FuseReport:
    """What `fuse` did: a line each where it is printed."""

    swapped: tuple[Swapped, ...]
    left_alone: tuple[LeftAlone, ...]

    @property
    def copied_bytes(self) -> int:
        """Of all the weights that are held a second time."""
        return sum(it.copied_bytes for it in self.swapped)

    def __str__(self) -> str:
        lines = [
            f"swapped {len(self.swapped)}, left alone {len(self.left_alone)}; "
            f"{self.copied_bytes / 2**20:.1f} MiB of weights are held a second time"
        ]
        lines += [
            f"  {it.name or 'the module'} ({it.kind}): {it.implementation}, {it.activation or 'with the residual'}, "
            f"{it.copied_bytes / 2**20:.1f} MiB"
            for it in self.swapped
        ]
        lines += [f"  {it.name or 'the module'} ({it.kind}): left alone, {it.reason}" for it in self.left_alone]
        return "\n".join(lines)


def fuse(module: nn.Module) -> FuseReport:
    """Swap every feed-forward block in `module`, itself included, for a fused one that shares its weights.

    On a CPU the activation, the gate and BERT's residual become oneDNN post-ops, on packed copies of the matrices; on a
    GPU they are Triton kernels on the weights as they are. Copies follow the weights: one that was changed in place, by
    ``load_state_dict`` for one, is packed anew at the next call. (In a model that was made under ``inference_mode``,
    PyTorch counts no changes in place, and they are not seen.)

    Results are those of the block's own forward, rounded less often. Where the fused form cannot give them (training
    mode, autocast, a gradient that is asked for, a hook on an inner layer, a call with fewer or more arguments than the
    forward has parameters), the block's own forward runs, with one warning a block. ``torch.compile`` takes fused
    blocks as one operator each; where it traces a block of which one of these is so, it takes the block's own forward,
    and no warning is given. A copy or a pickle of a fused model is one that is not fused.

    Args:
        module: on a CPU or a CUDA device, in float32, bfloat16 or float16, in ``eval()`` mode.

    Returns:
        The blocks that were swapped, and those that look like one and were left alone, each with the reason.

    Raises:
        TypeError: `module` is no ``torch.nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fuse: expected a torch.nn.Module, got {type(module).__name__}")
    swapped: list[Swapped] = []
    left_alone: list[LeftAlone] = []
    inside: list[str] = []
    unknown: list[tuple[str, nn.Module]] = []
    for name, block, form in _candidates(module):
        if any(name.startswith(it) for it in inside):
            continue
        if form is None and not isinstance(block, Fused):
            unknown.append((name, block))
            continue
        inside.append(f"{name}." if name else "")
        found = "it is fused already" if form is None or isinstance(block, Fused) else _fused(block, form)
        kind = type(block).__name__
        if isinstance(found, str):
            left_alone.append(LeftAlone(name, kind, found))
        else:
            kind = found.original.__name__
            activation = None if found.form.act is None else found.activation
            swapped.append(Swapped(name, kind, activation, found.implementation, found.copied_bytes))
    known = {id(it) for name in inside for it in module.get_submodule(name.rstrip(".")).parameters()}
    for name, block in unknown:
        # What only holds blocks that are listed by themselves is none.
        weights = [it for it in block.parameters() if it.ndim > 1 and id(it) not in known]
        if weights and (name or not inside):
            known |= {id(it) for it in weights}
            children = ", ".join(it for it, _ in block.named_children()) or "none"
            reason = f"its form is unknown: no known one has the children it has, {children}"
            if isinstance(block, _PYTORCH):
                reason = "its feed-forward block is no module of its own, but a part of the layer's forward"
            left_alone.append(LeftAlone(name, type(block).__name__, reason))
    return FuseReport(tuple(swapped), tuple(left_alone))


def unfuse(module: nn.Module) -> tuple[str, ...]:
    """Give every fused block in `module` its own class back, and let go of the copies of its weights.

    Returns:
        The names of the blocks; none where nothing was fused.
    """
    names = []
    for name, block in module.named_modules():
        if isinstance(block, Fused):
            fusion = block.__dict__.pop("_fusion")
            block.__class__ = fusion.original
            names.append(name)
    return tuple(names)


class Fused(nn.Module):
    """What a fused block's class has before its own: a `forward` that is fused."""

    _fusion: "Fusion"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the block's own forward does."""
        fusion = self._fusion
        inputs = args
        if kwargs:
            inputs = (*args, *(kwargs[it] for it in fusion.parameters[len(args) :] if it in kwargs))
        if not len(inputs) == len(fusion.parameters) == len(args) + len(kwargs):
            y = super().forward(*args, **kwargs)  # or its TypeError
            fusion.warn(OTHER_ARGUMENTS)
            return y
        if not fusion.is_for(self, inputs):
            return super().forward(*args, **kwargs)
        residual = inputs[1] if len(inputs) == 2 else None
        if torch.compiler.is_compiling():
            return torch.ops.mlp.feed_forward(inputs[0], residual, fusion.key, fusion.features)
        return fusion.run(self, inputs[0], residual)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != "_fusion"}
        return _reconstructor, (self._fusion.original, object, None), state


class Layers(ABC):
    """The linear layers of a block, as the kernels of one kind of device run them; rows are (N, in)."""

    implementation: ClassVar[str]
    copied_bytes: int

    @abstractmethod
    def __init__(self, gate: Pair | None, up: Pair | None, down: Pair | None, activation: Activation) -> None: ...

    @staticmethod
    @abstractmethod
    def unavailable_reason(dtype: torch.dtype) -> str | None:
        """Say in one sentence, without a full stop, why this cannot run; None where it can."""

    @abstractmethod
    def hidden(self, x: Tensor) -> Tensor:
        """Compute ``act(gate(x)) * up(x)``, or ``act(up(x))`` without a gate, or nothing where there is no up."""

    @abstractmethod
    def down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """Compute ``down(h)``, plus the residual where there is one, or nothing where there is no down."""


class OnCPU(Layers):
    """oneDNN post-ops on packed weights."""

    implementation = "onednn"

    def __init__(self, gate: Pair | None, up: Pair | None, down: Pair | None, activation: Activation) -> None:
        self._gate, self._up, self._down = (None if it is None else PackedLinear(*it) for it in (gate, up, down))
        self._activation = activation
        self.copied_bytes = sum(it.copied_bytes for it in (self._gate, self._up, self._down) if it is not None)

    @staticmethod
    def unavailable_reason(dtype: torch.dtype) -> str | None:
        """See `Layers`."""
        return onednn.unavailable(dtype)

    def hidden(self, x: Tensor) -> Tensor:
        """See `Layers`."""
        if self._up is None:
            return x
        act, gate = self._activation, self._gate
        return self._up(x, act) if gate is None else self._up.mul(x, gate(x, act))

    def down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """See `Layers`."""
        if self._down is None:
            return h
        return self._down(h) if residual is None else self._down.add(h, residual)


class OnCUDA(Layers):
    """Triton kernels on the weights as they are; only those that are stored as (in, out) are copied."""

    implementation = "triton"

    def __init__(self, gate: Pair | None, up: Pair | None, down: Pair | None, activation: Activation) -> None:
        from kernels.gated_linear import gated_linear
        from kernels.linear import linear

        self.copied_bytes = 0
        self._gate, self._up, self._down = (None if it is None else self._readable(it) for it in (gate, up, down))
        self._activation = activation
        self._linear, self._gated_linear = linear, gated_linear

    @staticmethod
    def unavailable_reason(dtype: torch.dtype) -> str | None:  # noqa: ARG004
        """See `Layers`."""
        from torch.utils._triton import has_triton

        return None if has_triton() else "the kernels need Triton, and none is found that works here"

    def _readable(self, pair: Pair) -> Pair:
        weight, bias = pair
        if weight.stride(-1) != 1:
            weight = weight.contiguous()
            self.copied_bytes += weight.nbytes
        return weight, bias

    def hidden(self, x: Tensor) -> Tensor:
        """See `Layers`."""
        if self._up is None:
            return x
        x = x.contiguous()
        if self._gate is None:
            return self._linear(x, *self._up, activation=self._activation)
        (gate, gate_bias), (up, up_bias) = self._gate, self._up
        return self._gated_linear(x, gate, up, gate_bias, up_bias, activation=self._activation)

    def down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """See `Layers`."""
        if self._down is None:
            return h
        return self._linear(h.contiguous(), *self._down, residual=None if residual is None else residual.contiguous())


LAYERS: dict[str, type[Layers]] = {"cpu": OnCPU, "cuda": OnCUDA}


class Fusion:
    """What a fused block carries: how it is run, and the layers made from its weights as they were last seen."""

    def __init__(self, block: nn.Module, form: Form, parameters: Sequence[str]) -> None:
        self.original = type(block)
        self.form = form
        self.parameters = tuple(parameters)
        self.key = next(_keys)
        self._has_warned = False
        self._remake(block)

    def is_for(self, block: nn.Module, inputs: Iterable[Any]) -> bool:
        """Tell whether the fused form gives what is asked for; else the block's own forward has to run."""
        is_asked = block.training
        tensors = list(inputs)
        for child in block._modules.values():
            if child is not None:
                is_asked = is_asked or bool(child.training or child._forward_hooks or child._forward_pre_hooks)
                tensors += child._parameters.values()
        if torch.is_grad_enabled():
            is_asked = is_asked or any(it.requires_grad for it in tensors if isinstance(it, Tensor))
        is_asked = is_asked or torch.is_autocast_enabled(self.device_type)
        if is_asked:
            self.warn(OWN_FORWARD)
        return not is_asked

    def warn(self, reason: str) -> None:
        """Say once why the block's own forward runs; nothing while ``torch.compile`` traces, which takes no warning."""
        if not self._has_warned and not torch.compiler.is_compiling():
            self._has_warned = True
            warnings.warn(f"{self.original.__name__}: {reason}", RuntimeWarning, stacklevel=4)

    def run(self, block: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the block, its weights as they are now."""
        if self._state(block) != self._seen or (self.form.act and getattr(block, self.form.act) is not self._act):
            self._remake(block)
        shape = (*x.shape[:-1], self.features)
        rows = x.reshape(-1, x.shape[-1])
        if residual is not None:
            residual = residual.reshape(-1, self.features)
        y = self._layers.down(self._layers.hidden(rows), residual).view(shape)
        norm = self.form.norm and block._modules[self.form.norm]
        return norm(y) if norm else y

    def _state(self, block: nn.Module) -> list[tuple[int, int]]:
        return [
            (it.data_ptr(), 0 if it.is_inference() else it._version)
            for name in self.form.linears
            for it in cast("nn.Module", block._modules[name])._parameters.values()
            if it is not None
        ]

    def _remake(self, block: nn.Module) -> None:
        reason = _unfit(block, self.form)
        if reason is not None:
            raise BackendError(
                f"{self.original.__name__}: it cannot be run fused any more, since {reason}; undo it with models.unfuse"
            )
        form, pairs = self.form, {name: _pair(block._modules[name]) for name in self.form.linears}
        gate, up, down = (None if it is None else pairs[it] for it in (form.gate, form.up, form.down))
        if gate is not None and form.gate == form.up:
            gate, up = _halves(gate)
        self._act = form.act and getattr(block, form.act)
        self.activation = _activation(self._act) or "relu"  # an output has none
        weight = next(iter(pairs.values()))[0]
        self.device_type = weight.device.type
        self.features = (down or up or (weight,))[0].shape[0]
        self._seen = self._state(block)
        self._layers = LAYERS[self.device_type](gate, up, down, self.activation)
        self.implementation = self._layers.implementation
        self.copied_bytes = self._layers.copied_bytes


_keys = itertools.count()
_blocks: WeakValueDictionary[int, Fused] = WeakValueDictionary()


@torch.library.custom_op("mlp::feed_forward", mutates_args=())
def _feed_forward(x: Tensor, residual: Tensor | None, key: int, features: int) -> Tensor:  # noqa: ARG001
    block = _blocks[key]
    return block._fusion.run(block, x, residual)


@_feed_forward.register_fake
def _(x: Tensor, residual: Tensor | None, key: int, features: int) -> Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], features))


@cache
def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{original.__name__}", (Fused, original), {"__module__": original.__module__})


def _candidates(module: nn.Module) -> list[tuple[str, nn.Module, Form | None]]:
    """List what is, or looks like, a feed-forward block, outer ones first, with its form where that is known."""
    found: dict[str, tuple[nn.Module, Form | None]] = {}
    for name, block in module.named_modules():
        if name in found:
            continue
        form = _matching(block, _sequence(block) if type(block) is nn.Sequential else FORMS)
        looks = isinstance(block, _PYTORCH) or _LOOKS_LIKE_ONE.search(type(block).__name__)
        if form is not None or looks or isinstance(block, Fused):
            found[name] = block, form
        pair = {part: _matching(getattr(block, part, None), (it,)) for part, it in PAIR.items()}
        if all(pair.values()):
            for part, form in pair.items():
                found[f"{name}.{part}".lstrip(".")] = getattr(block, part), form
    return [(name, *it) for name, it in found.items()]


def _sequence(block: nn.Module) -> Sequence[Form]:
    """Return the form of a linear layer, an activation and a linear layer, with or without dropout, in sequence."""
    children = [(name, it) for name, it in block.named_children() if not isinstance(it, nn.Dropout)]
    if len(children) != 3 or not (isinstance(children[0][1], nn.Linear) and isinstance(children[2][1], nn.Linear)):
        return ()
    return (Form("whole", up=children[0][0], act=children[1][0], down=children[2][0]),)


def _matching(block: object, forms: Iterable[Form]) -> Form | None:
    return next((it for it in forms if all(getattr(block, name, None) is not None for name in it.needed)), None)


def _fused(block: nn.Module, form: Form) -> Fusion | str:
    """Fuse one block; return why not where it cannot be."""
    if any(it.training for it in block.modules()):
        return "it is in training mode: call eval() first"
    if "forward" in block.__dict__:
        return "its forward was replaced on the object, as accelerate does"
    reason = _unfit(block, form)
    if reason is not None:
        return reason
    parameters = list(inspect.signature(type(block).forward).parameters)[1:]
    expected = 2 if form.role == "output" else 1
    if len(parameters) != expected:
        return f"its forward takes {', '.join(parameters)}: expected {expected} of them"
    fusion = Fusion(block, form, parameters)
    reason = _probe(block, fusion)
    if reason is not None:
        return reason
    try:
        original = type(block)
        block.__class__ = _fused_class(cast("Any", original))
    except TypeError as error:
        return f"its class cannot be swapped ({error})"
    fused = cast("Fused", block)
    object.__setattr__(fused, "_fusion", fusion)
    _blocks[fusion.key] = fused
    return fusion


def _unfit(block: nn.Module, form: Form) -> str | None:
    """Say why the layers cannot be fused as they are now; None where they can."""
    kinds: dict[str, Tensor] = {}
    for name in form.linears:
        layer = getattr(block, name)
        if type(layer) is not nn.Linear and not _is_conv1d(layer):
            return f"{name} is {_named(layer)}, not torch.nn.Linear: quantised, wrapped or of another kind"
        for key, it in layer._parameters.items():
            if it is not None:
                if type(it.data) is not Tensor:
                    return f"{name}.{key} is {_named(it.data)}, not a plain tensor: quantised or distributed"
                kinds[f"{name}.{key}"] = it
    for child_name, child in block.named_children():
        if child._forward_hooks or child._forward_pre_hooks or "forward" in child.__dict__:
            return f"{child_name} has a forward hook, which would not run"
    places = {(it.device, it.dtype) for it in kinds.values()}
    if len(places) != 1:
        found = ", ".join(f"{name} is {it.dtype} on {it.device}" for name, it in kinds.items())
        return f"its weights are not of one type on one device: {found}"
    device, dtype = places.pop()
    if device.type not in LAYERS:
        return f"its weights are on {device}: there are kernels for {', '.join(LAYERS)}"
    if dtype not in _TOLERANCES:
        return f"its weights are {dtype}: there are kernels for {', '.join(map(str, _TOLERANCES))}"
    act = form.act and getattr(block, form.act)
    if act is not None and _activation(act) is None:
        return f"its activation, {_named(act)}, is none of {', '.join(ACTIVATIONS)}"
    return LAYERS[device.type].unavailable_reason(dtype)


def _probe(block: nn.Module, fusion: Fusion) -> str | None:
    """Compare both forwards on rows of three sizes: a block may have the names and compute something else."""
    form = fusion.form
    layers = [block._modules[it] for it in form.linears]
    widths = [_pair(layers[0])[0].shape[1]]
    weight = _pair(layers[0])[0]
    if form.role == "output":
        widths.append(fusion.features)
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[0.1], [1.0], [8.0]])
    inputs = [(scales * torch.randn(3, it, generator=generator)).to(weight) for it in widths]
    with torch.no_grad():
        try:
            own = block.forward(*(it.clone() for it in inputs))
        except Exception as error:
            return f"its own forward fails on three rows of noise with {type(error).__name__}"
        fused = fusion.run(block, inputs[0], inputs[1] if len(inputs) == 2 else None)
    if not isinstance(own, Tensor) or own.shape != fused.shape or own.dtype != fused.dtype:
        return "its forward returns something else than the block's result"
    apart = (own.float() - fused.float()).abs().amax(-1)
    if not bool((apart <= _TOLERANCES[own.dtype] * own.float().abs().amax(-1)).all()):
        return "its forward computes something else than its children's names and its activation tell"
    return None


def _activation(act: Any) -> Activation | None:
    """Tell an activation by its values: erf's and tanh's GELU are 5e-4 apart."""
    if not callable(act) or (isinstance(act, nn.Module) and any(True for _ in act.parameters())):
        return None
    x = torch.linspace(-8, 8, 513)
    try:
        with torch.no_grad():
            y = act(x.clone())
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return next((name for name, it in ACTIVATIONS.items() if torch.allclose(y, it(x), rtol=0, atol=1e-5)), None)


def _pair(layer: nn.Module | None) -> Pair:
    """Return weight and bias of a linear layer, the weight as (out, in)."""
    weight, bias = cast("Tensor", layer.weight), cast("Tensor | None", layer.bias)  # type: ignore[union-attr]
    return (weight.detach().T if _is_conv1d(layer) else weight.detach()), None if bias is None else bias.detach()


def _halves(pair: Pair) -> tuple[Pair, Pair]:
    weights = pair[0].chunk(2)
    biases = (None, None) if pair[1] is None else pair[1].chunk(2)
    return (weights[0], biases[0]), (weights[1], biases[1])


def _is_conv1d(layer: object) -> bool:
    """Tell GPT-2's linear layer, which keeps its weight as (in, out)."""
    return type(layer).__name__ == "Conv1D" and isinstance(layer, nn.Module) and hasattr(layer, "nf")


def _named(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)
