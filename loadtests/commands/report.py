"""`report`: the page and the charts of what a comparison left behind."""

import argparse
from pathlib import Path

from loadtests.evidence import DOCUMENT, EvidenceError, read
from loadtests.report.page import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("source", type=Path, metavar="DIR_OR_JSON", help=f"a document, or the directory of {DOCUMENT}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: beside the document")


def run(options: argparse.Namespace) -> int:
    """Read the document, write the report, and print where it is.

    Raises:
        EvidenceError: there is no such document, or it has a run of a backend that it does not name.
        OSError: the directory cannot be made or written to.
    """
    path = options.source / DOCUMENT if options.source.is_dir() else options.source
    evidence = read(path)
    unnamed = sorted({run.backend for run in evidence.runs} - evidence.backends.keys())
    if unnamed or not evidence.backends:
        raise EvidenceError(f"{path}: expected runs of the backends {list(evidence.backends)}, got one of {unnamed}")
    page, *_ = write_report(evidence, options.out or path.parent)
    print(page)
    return 0
