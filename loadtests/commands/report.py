"""`report`: makes the page and the charts of a comparison."""

import argparse

from loadtests.evidence import DOCUMENT, read
from loadtests.flags import path
from loadtests.output import require_directory
from loadtests.report.page import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("source", type=path, metavar="DIR_OR_JSON", help=f"a document, or the directory of {DOCUMENT}")
    parser.add_argument("--out", type=path, metavar="DIR", help="where to write; default: beside the document")


def run(options: argparse.Namespace) -> int:
    """Read the document, write the report, and print where it is.

    Raises:
        EvidenceError: there is no such document, or it has a run of a backend that it does not name.
        OSError: the directory cannot be made or written to.
    """
    document = options.source / DOCUMENT if options.source.is_dir() else options.source
    evidence = read(document)
    require_directory("--out" if options.out else "the report beside", options.out or document.parent)
    page, *_ = write_report(evidence, options.out or document.parent)
    print(page)
    return 0
