"""The model as every peer holds it: same weights, backend and threads, told by the environment.

Each server beside this file is a program of its own, `python -m loadtests.peers.programs.NAME`, run by the environment
that its package is installed in. It answers `POST /predict`: `{"inputs": [[...], ...]}` with `{"outputs": [[...],
...]}`, or, where `PEER_WIRE` is `binary`, rows of little-endian float32 with the same.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from models import load_engine

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a peer is told."""

    model: str
    backend: str
    wire: str  # json | binary
    port: int
    threads: int
    rows: int  # of each request, for the warm-up

    @classmethod
    def from_environment(cls) -> Self:
        """Read the variables `PEER_MODEL`, `PEER_BACKEND`, `PEER_WIRE`, `PEER_PORT`, `PEER_THREADS`, `PEER_ROWS`."""
        told = {name: os.environ[f"PEER_{name.upper()}"] for name in cls.__slots__}
        return cls(
            told["model"], told["backend"], told["wire"], int(told["port"]), int(told["threads"]), int(told["rows"])
        )

    @property
    def is_binary(self) -> bool:
        """True where rows travel as bytes."""
        return self.wire == "binary"


class Model:
    """An engine with one backend, warm for up to `max_requests` requests at once."""

    def __init__(self, setting: Setting, max_requests: int = 1) -> None:
        self._backend = setting.backend
        self._engine = load_engine(setting.model, backends=(setting.backend,), threads=setting.threads)
        self._engine.warm_up(max_requests * setting.rows)
        self.width = self._engine.config.width_in

    def outputs(self, rows: Rows) -> Rows:
        """Run rows (n, width) at once."""
        return self._engine.run(torch.from_numpy(rows), self._backend).numpy()

    def batch(self, requests: Sequence[Rows]) -> list[Rows]:
        """Run the rows of several requests at once, and share the outputs out."""
        outputs = self.outputs(np.concatenate(requests))
        shares, start = [], 0
        for each in requests:
            shares.append(outputs[start : start + len(each)])
            start += len(each)
        return shares

    def from_bytes(self, body: bytes) -> Rows:
        """Read the rows of a binary body."""
        return np.frombuffer(body, "<f4").reshape(-1, self.width)


def from_json(body: bytes) -> Rows:
    """Read the rows of a JSON body with orjson."""
    return np.asarray(orjson.loads(body)["inputs"], np.float32)


def to_json(outputs: Rows) -> bytes:
    """Write a JSON reply with orjson, straight from the array."""
    return orjson.dumps({"outputs": np.ascontiguousarray(outputs)}, option=orjson.OPT_SERIALIZE_NUMPY)
