"""The example that fuses a real model: its figures hold together."""

import pytest

from examples import fuse_minilm


@pytest.mark.slow
def test_it_measures_the_same_embeddings_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_minilm, "CASES", ((2, 8),))
    document = fuse_minilm.measure(repetitions=3)
    assert document["copied_bytes"] > 12 * 384 * 1536 * 4
    (row,) = document["fuse"]
    assert (row["sentences"], row["tokens"]) == (2, 8)
    assert row["cosine"] >= 0.99999
    assert row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
