"""The example that fuses a real model: its figures hold together."""

from typing import Any

import pytest
import torch
from torch.backends import mkldnn


@pytest.mark.slow
def test_it_measures_the_same_embeddings_twice(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from examples import fuse_minilm  # seconds, which every process that collects tests would pay

    embed, said, compiled = fuse_minilm.embed, list[str](), list[int]()

    def watched(*args: Any) -> torch.Tensor:
        said.append(capfd.readouterr().out)
        embedding = embed(*args)
        compiled.append(capfd.readouterr().out.count("create:cache_miss"))
        return embedding

    monkeypatch.setattr(fuse_minilm, "CASES", ((2, 8),))
    monkeypatch.setattr(fuse_minilm, "UNMET", range(65, 71, 2))
    monkeypatch.setattr(fuse_minilm, "embed", watched)
    with mkldnn.verbose(mkldnn.VERBOSE_ON_CREATION):  # type: ignore[no-untyped-call]
        document = fuse_minilm.measure(repetitions=3)
    assert "swapped 12, left alone 0;" in said[0]  # two parts in each of six layers
    assert document["copied_bytes"] > 12 * 384 * 1536 * 4
    (row,) = document["fuse"]
    assert (row["sentences"], row["tokens"]) == (2, 8)
    assert row["cosine"] >= 0.99999
    assert [*row] == ["sentences", "tokens", "plain_ms", "fused_ms", "ratio_q1", "ratio", "ratio_q3", "cosine"]
    assert row["plain_ms"] > 0
    assert row["fused_ms"] > 0

    # Each pass at a known count, then two at a new one: of that, the fused model's two products are compiled at first,
    # and the plain one's GELU.
    fused, plain = [0, 2, 0], [0, 1, 0]
    assert compiled[2:20] == fused + plain + plain + fused + fused + plain
    unmet = document["unmet"]
    assert (unmet["token_counts"], unmet["least_tokens"], unmet["most_tokens"]) == (3, 65, 69)
    for each in (unmet["first"], unmet["again"]):
        assert 0 < each["ratio_q1"] <= each["ratio"] <= each["ratio_q3"]
