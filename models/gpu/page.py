"""The page that shows people what was found."""

from models.gpu.report import Report


def markdown(report: Report) -> str:
    """Return the findings as Markdown."""
    from models.conditions import described
    from models.profile import table

    lines = ["# Measured on a GPU", "", f"{described(report.found['conditions'])}.", ""]
    lines += ["| step | state | seconds |", "|---|---|---|"]
    lines += [f"| {step['step']} | {step['state']} | {step['seconds']} |" for step in report.steps]
    for document in report.found.get("bench", []):
        roof = document["roof"]
        (tflop_per_s,) = roof["product_tflop_per_s"].values()  # of the dtype that all of it is in
        lines += [
            "",
            f"## {document['conditions']['model']['name']}",
            "",
            f"Roof: copy {roof['copy_gb_per_s']} GB/s, large product {tflop_per_s} TFLOP/s; medians of "
            f"{document['conditions']['repetitions']} interleaved rounds, quartiles in brackets.",
            "",
            "| rows | backend | us | eager / it | GB/s | TFLOP/s | % of roof |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {it['rows']} | {it['backend']} | {it['median_us']:g} ({it['q1_us']:g} to {it['q3_us']:g}) "
            f"| {it['ratio']:.2f} ({it['ratio_q1']:.2f} to {it['ratio_q3']:.2f}) "
            f"| {it['gb_s']:g} | {it['tflop_s']:g} | {it['percent_of_roof']:.0f} |"
            for it in document["bench"]
        ]
        lines += [f"\n{name}: {note}." for name, note in document["notes"].items()]
    for document in report.found.get("transfer", []):
        lines += [
            "",
            f"## {document['conditions']['model']['name']}: from the host and back",
            "",
            f"A batch from bytes on the host to float32 on the host, {document['conditions']['batches']} in a row; "
            f"overlapped: up to {document['depth']} in the air, {document['pinned_bytes']} bytes of pinned memory.",
            "",
            "| rows | backend | way | us |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {it['rows']} | {it['backend']} | {it['way']} "
            f"| {it['median_us']:g} ({it['q1_us']:g} to {it['q3_us']:g}) |"
            for it in document["transfer"]
        ]
    folds = [it for it in report.found.get("tune", []) if "is_folded" in it]
    if folds:
        lines += [
            "",
            "## A norm folded into the gated layer, or apart",
            "",
            "| in x out | rows | folded us | apart us | taken |",
        ]
        lines += ["|---|---|---|---|---|"]
        lines += [
            f"| {it['in_features']}x{it['out_features']} | {it['rows_measured']} | {it['microseconds']:g} "
            f"| {it['separate_microseconds']:g} | {'folded' if it['is_folded'] else 'apart'} |"
            for it in folds
        ]
    if "operators" in report.found:
        lines += ["", "## Operators", "", f"Liger's MLP: {report.found['operators']['liger']}.", ""]
        lines += [
            "| operator | way | dtype | rows x in x out | caches | us | % of roof |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {it['op']} | {it['way']} | {it['dtype']} | {'x'.join(map(str, it['shape']))} "
            f"| {'cold' if it['cold'] else 'warm'} | {it['median_us']:g} ({it['low_us']:g} to {it['high_us']:g}) "
            f"| {it['roof_percent']:.0f} |"
            for it in report.found["operators"]["rows"]
        ]
    if "profile" in report.found:
        lines += ["", "## Profile", "", "```", *(table(each) for each in report.found["profile"]), "```"]
    return "\n".join(lines) + "\n"
