"""Why a block cannot be fused: its layers, its weights, its activation."""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.dtypes import DTYPES
from models.config import Activation
from models.fusion.layers import LAYERS
from models.fusion.linear import is_conv1d
from models.fusion.patterns import Pattern
from models.mlp import ACTIVATIONS

REPLACED = "forward was replaced on the object, as accelerate does"


def unfit_reason(block: nn.Module, pattern: Pattern) -> str | None:
    """Say why the layers cannot be fused as they are now; None where they can."""
    kinds: dict[str, Tensor] = {}
    for name in pattern.linears:
        layer = getattr(block, name)
        if type(layer) is not nn.Linear and not is_conv1d(layer):
            return f"{name} is {named(layer)}, not torch.nn.Linear: quantised, wrapped or of another kind"
        for key, it in layer._parameters.items():
            if it is not None:
                if type(it.data) is not Tensor:
                    return f"{name}.{key} is {named(it.data)}, not a plain tensor: quantised or distributed"
                kinds[f"{name}.{key}"] = it
    for child_name, child in block.named_children():
        if child._forward_hooks or child._forward_pre_hooks:
            return f"{child_name} has a forward hook, which would not run"
        if "forward" in child.__dict__:
            return f"{child_name}'s {REPLACED}"
    places = {(it.device, it.dtype) for it in kinds.values()}
    if len(places) != 1:
        found = ", ".join(f"{name} is {it.dtype} on {it.device}" for name, it in kinds.items())
        return f"its weights are not of one type on one device: {found}"
    device, dtype = places.pop()
    if device.type not in LAYERS:
        return f"its weights are on {device}: there are kernels for {', '.join(LAYERS)}"
    if dtype not in DTYPES.values():
        return f"its weights are {dtype}: there are kernels for {', '.join(map(str, DTYPES.values()))}"
    act = pattern.act and getattr(block, pattern.act)
    if act is not None and activation_of(act) is None:
        return f"its activation, {named(act)}, is none of {', '.join(ACTIVATIONS)}"
    return LAYERS[device.type].unavailable_reason(dtype)


def activation_of(act: Any) -> Activation | None:
    """Identify an activation by its values: the erf and tanh GELU differ by 5e-4, and a clipped one differs far out."""
    if not callable(act) or (isinstance(act, nn.Module) and any(True for _ in act.parameters())):
        return None
    x = torch.cat([torch.linspace(-8, 8, 513), torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])])
    try:
        with torch.no_grad():
            y = act(x.clone())
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return next((name for name, it in ACTIVATIONS.items() if torch.allclose(y, it(x), rtol=0, atol=1e-5)), None)


def named(value: object) -> str:
    """Return the name of a function or a class, or of the class of anything else."""
    return getattr(value, "__name__", type(value).__name__)
