"""`report`: the page and the charts of what a comparison left behind."""

import argparse
from pathlib import Path

from loadtests.evidence import read
from loadtests.report import write_report

DOCUMENT = "compare.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("source", type=Path, metavar="DIR_OR_JSON", help=f"a document, or the directory of {DOCUMENT}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: beside the document")


def run(options: argparse.Namespace) -> int:
    """Read the document, write the report, and print where it is.

    Raises:
        EvidenceError: there is no such document.
        OSError: the directory cannot be made or written to.
    """
    path = options.source / DOCUMENT if options.source.is_dir() else options.source
    page, *_ = write_report(read(path), options.out or path.parent)
    print(page)
    return 0
