"""Transformer-style MLPs: configuration, weights, and an engine that runs one set of weights three ways.

`load_engine`, `Engine`, `BackendStatus`, `fuse`, `unfuse` and `FuseReport` import PyTorch when they are first used; the
rest never does.
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
    from models.fusion import FuseReport, fuse, unfuse

__all__ = [
    "BackendError",
    "BackendStatus",
    "BackendUnavailableError",
    "ConfigError",
    "Engine",
    "FFNConfig",
    "FuseReport",
    "ImportSourceError",
    "InitConfig",
    "InputError",
    "MLPError",
    "ModelConfig",
    "ModelError",
    "NormConfig",
    "UnknownBackendError",
    "WeightsError",
    "fuse",
    "load_engine",
    "unfuse",
]

_LATE = {
    "BackendStatus": "models.engine",
    "Engine": "models.engine",
    "FuseReport": "models.fusion",
    "fuse": "models.fusion",
    "load_engine": "models.engine",
    "unfuse": "models.fusion",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return __all__
