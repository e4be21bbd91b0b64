"""Transformer-style MLPs: configuration, weights, and an engine that runs one set of weights three ways.

`load_engine`, `Engine` and `BackendStatus` bring PyTorch along when they are first used, the rest never does.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from models.config import FFNConfig, InitConfig, ModelConfig, NormConfig
from models.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    ImportSourceError,
    InputError,
    MLPError,
    ModelError,
    UnknownBackendError,
    WeightsError,
)

if TYPE_CHECKING:
    from models.engine import BackendStatus, Engine, load_engine

__all__ = [
    "BackendError",
    "BackendStatus",
    "BackendUnavailableError",
    "ConfigError",
    "Engine",
    "FFNConfig",
    "ImportSourceError",
    "InitConfig",
    "InputError",
    "MLPError",
    "ModelConfig",
    "ModelError",
    "NormConfig",
    "UnknownBackendError",
    "WeightsError",
    "load_engine",
]

_ENGINE = frozenset({"BackendStatus", "Engine", "load_engine"})


def __getattr__(name: str) -> object:
    if name not in _ENGINE:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module("models.engine"), name)


def __dir__() -> list[str]:
    return __all__
