"""What a block becomes: a class of its own with a fused forward, and what that forward runs on."""

import itertools
import warnings
from collections.abc import Iterable, Sequence
from copyreg import _reconstructor  # type: ignore[attr-defined]
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from models.errors import BackendError
from models.fusion.eligibility import activation_of, unfit_reason
from models.fusion.layers import LAYERS
from models.fusion.linear import halves, pair_of
from models.fusion.patterns import Pattern

OWN_FORWARD = (
    "a fused block runs its own forward while it is in training mode, under autocast, asked for a gradient, under "
    "torch.func's transforms or forward-mode differentiation, traced by torch.jit or torch.fx, or has an inner layer "
    "with a hook or with a forward that was replaced on the object: call eval(), and run it under "
    "torch.inference_mode()"
)
OTHER_ARGUMENTS = (
    "a fused block runs its own forward where it is called with other arguments than its forward has parameters: pass "
    "each of them once"
)


class Fused(nn.Module):
    """The mixin that a fused block's class has before the block's own class: a fused `forward`."""

    _fusion: "Fusion"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the block's own forward does."""
        fusion = self.__dict__.get("_fusion")
        if fusion is None:  # kept by who replaced the object's forward, and called after `unfuse`
            return type(self).forward(self, *args, **kwargs)
        inputs = args
        if kwargs:
            inputs = (*args, *(kwargs[it] for it in fusion.parameters[len(args) :] if it in kwargs))
        if not len(inputs) == len(fusion.parameters) == len(args) + len(kwargs):
            y = fusion.original.forward(self, *args, **kwargs)  # or its TypeError
            fusion.warn(OTHER_ARGUMENTS)
            return y
        if not fusion.is_for(self, inputs):
            # Not by `super()`, which fails where another thread has given the block back since.
            return fusion.original.forward(self, *args, **kwargs)
        residual = inputs[1] if len(inputs) == 2 else None
        if torch.compiler.is_compiling():
            return torch.ops.mlp.feed_forward(inputs[0], residual, fusion.key, fusion.features)
        return fusion.run(self, inputs[0], residual)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which would put whatever this returned in the block's place in the model."""
        raise BackendError(
            f"{self._fusion.original.__name__}: torch.jit.script takes no fused block: undo it with models.unfuse, "
            "script the model, and fuse it again"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != "_fusion"}
        return _reconstructor, (self._fusion.original, object, None), state


class Fusion:
    """What a fused block carries: how to run it, and the layers made from its weights when they were last seen."""

    def __init__(self, block: nn.Module, pattern: Pattern, parameters: Sequence[str]) -> None:
        self.original = type(block)
        self.pattern = pattern
        self.parameters = tuple(parameters)
        self.key = next(_keys)
        self._has_warned = False
        self._remake(block)

    def is_for(self, block: nn.Module, inputs: Iterable[Any]) -> bool:
        """Tell whether the fused form can do what is asked; if not, the block's own forward has to run."""
        is_asked = block.training or bool(_global_forward_hooks or _global_forward_pre_hooks)
        tensors = list(inputs)
        for child in block._modules.values():
            if child is not None:
                is_asked = is_asked or bool(child.training or child._forward_hooks or child._forward_pre_hooks)
                is_asked = is_asked or "forward" in child.__dict__  # replaced on the object, as accelerate does
                tensors += child._parameters.values()
        if torch.is_grad_enabled():
            is_asked = is_asked or any(it.requires_grad for it in tensors if isinstance(it, Tensor))
        is_asked = is_asked or torch.is_autocast_enabled(self.device_type) or is_transformed()
        is_asked = is_asked or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        # A number that stands for a block is no use outside this process, where an exported program may go.
        is_asked = is_asked or torch.compiler.is_exporting() or any(isinstance(it, torch.fx.Proxy) for it in inputs)
        if is_asked:
            self.warn(OWN_FORWARD)
        return not is_asked

    def warn(self, reason: str) -> None:
        """Say once why the block's own forward runs; nothing while ``torch.compile`` traces, which takes no warning."""
        if not self._has_warned and not torch.compiler.is_compiling():
            self._has_warned = True
            warnings.warn(f"{self.original.__name__}: {reason}", RuntimeWarning, stacklevel=5)

    def run(self, block: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the block, its weights as they are now."""
        if self._state(block) != self._seen or (self.pattern.act and getattr(block, self.pattern.act) is not self._act):
            self._remake(block)
        shape = (*x.shape[:-1], self.features)
        rows = x.reshape(-1, x.shape[-1])
        if residual is not None:
            residual = residual.reshape(-1, self.features)
        layers = self._layers  # another thread may replace them at any moment
        y = layers.down(layers.hidden(rows), residual).view(shape)
        norm = self.pattern.norm and block._modules[self.pattern.norm]
        return norm(y) if norm else y

    def _state(self, block: nn.Module) -> list[tuple[int, int, int, type[nn.Module]]]:
        return [
            (it.untyped_storage()._cdata, it.data_ptr(), 0 if it.is_inference() else it._version, type(layer))
            for layer, it in self._weights(block)
        ]

    def _weights(self, block: nn.Module) -> list[tuple[nn.Module, Tensor]]:
        layers = (cast("nn.Module", block._modules[name]) for name in self.pattern.linears)
        return [(layer, it) for layer in layers for it in layer._parameters.values() if it is not None]

    def _remake(self, block: nn.Module) -> None:
        reason = unfit_reason(block, self.pattern)
        if reason is not None:
            raise BackendError(
                f"{self.original.__name__}: it cannot be run fused any more, since {reason}; undo it with models.unfuse"
            )
        # New weights may lie where old ones lay; while it is referred to, no other storage has a storage's address.
        storages = [
            StorageWeakRef(it.untyped_storage())  # type: ignore[no-untyped-call]
            for _, it in self._weights(block)
        ]
        seen = self._state(block)
        pattern, pairs = self.pattern, {name: pair_of(block._modules[name]) for name in self.pattern.linears}
        gate, up, down = (None if it is None else pairs[it] for it in (pattern.gate, pattern.up, pattern.down))
        if gate is not None and pattern.gate == pattern.up:
            gate, up = halves(gate)
        act = pattern.act and getattr(block, pattern.act)
        self.activation = activation_of(act) or "relu"  # an output has none
        weight = next(iter(pairs.values()))[0]
        self.device_type = weight.device.type
        self.features = (down or up or (weight,))[0].shape[0]
        self._layers = LAYERS[self.device_type](gate, up, down, self.activation)
        self.implementation = self._layers.implementation
        self.copied_bytes = self._layers.copied_bytes
        # After the layers: another thread that calls meanwhile makes its own instead of taking the old ones.
        self._act, self._seen, self._storages = act, seen, storages


def is_transformed() -> bool:
    """Tell whether tensors carry more than numbers: a tangent, or a batch dimension or gradient of ``torch.func``."""
    return forward_ad._current_level >= 0 or maybe_current_level() is not None


_keys = itertools.count()
# By `Fusion.key`: a traced graph holds a number, where it cannot hold a module.
blocks: WeakValueDictionary[int, Fused] = WeakValueDictionary()


@torch.library.custom_op("mlp::feed_forward", mutates_args=())
def _feed_forward(x: Tensor, residual: Tensor | None, key: int, features: int) -> Tensor:  # noqa: ARG001
    block = blocks[key]
    return block._fusion.run(block, x, residual)


@_feed_forward.register_fake
def _(x: Tensor, residual: Tensor | None, key: int, features: int) -> Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], features))
