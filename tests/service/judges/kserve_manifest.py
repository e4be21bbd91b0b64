"""Holds a manifest to KServe's own types: `kserve_manifest.py FILE KIND`, in the environment of its client.

The classes of its client are generated from the types that its resource definitions are made from, and know each
field's name and type, and which ones there have to be.
"""

import re
import sys
from pathlib import Path
from typing import Any

import kserve
import yaml

PRIMITIVES = {"str": str, "int": int, "bool": bool, "float": float}


def faults(value: Any, kind: str, place: str) -> list[str]:
    """Name every field that a type does not have, every one it misses, and every value of another type."""
    if found := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{place}: expected a list, got {value!r}"]
        return [it for index, each in enumerate(value) for it in faults(each, found[1], f"{place}[{index}]")]
    if found := re.fullmatch(r"dict\(str, (.*)\)", kind):
        if not isinstance(value, dict):
            return [f"{place}: expected an object, got {value!r}"]
        return [it for key, each in value.items() for it in faults(each, found[1], f"{place}.{key}")]
    if kind in PRIMITIVES:
        is_one = type(value) is PRIMITIVES[kind]
        return [] if is_one else [f"{place}: expected {kind}, got {value!r}"]
    owner = getattr(kserve, kind, None)
    if owner is None:
        return []  # one of Kubernetes' own, which tests/test_operating.py holds to its schema
    if not isinstance(value, dict):
        return [f"{place}: expected {kind}, got {value!r}"]
    names = {theirs: ours for ours, theirs in owner.attribute_map.items()}
    said = [f"{place}.{key}: {kind} has no such field" for key in value if key not in names]
    for key, each in value.items():
        if key in names:
            said += faults(each, owner.openapi_types[names[key]], f"{place}.{key}")
    try:  # what a type cannot be without, its class asks for
        owner(**{names[key]: each for key, each in value.items() if key in names})
    except ValueError as error:
        said.append(f"{place}: {error}")
    return said


if __name__ == "__main__":
    file, kind = sys.argv[1:]
    found = [it for each in yaml.safe_load_all(Path(file).read_text()) for it in faults(each, kind, kind)]
    print(*found, sep="\n")
    sys.exit(bool(found))
