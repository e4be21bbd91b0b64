"""The example that fuses a real model: its figures hold together."""

import pytest


@pytest.mark.slow
def test_it_measures_the_same_embeddings_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples import fuse_minilm  # seconds, which every process that collects tests would pay

    monkeypatch.setattr(fuse_minilm, "CASES", ((2, 8),))
    document = fuse_minilm.measure(repetitions=3)
    assert capsys.readouterr().out.startswith("swapped 12, left alone 0;")  # two parts in each of six layers
    assert document["copied_bytes"] > 12 * 384 * 1536 * 4
    (row,) = document["fuse"]
    assert (row["sentences"], row["tokens"]) == (2, 8)
    assert row["cosine"] >= 0.99999
    assert [*row] == ["sentences", "tokens", "plain_ms", "fused_ms", "ratio_q1", "ratio", "ratio_q3", "cosine"]
    assert row["plain_ms"] > 0
    assert row["fused_ms"] > 0
