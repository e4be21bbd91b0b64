"""What to make of requests that the server refused."""

from collections.abc import Iterable

from loadtests.evidence import Run


def full_queue(runs: Iterable[Run], rows: int) -> str | None:
    """Return, in a sentence, what to do about closed loops that found the server's queue full; None without any."""
    users = [run.users for run in runs if run.users and run.errors.get("overloaded")]
    if not users:
        return None
    return (
        f"closed loops were refused: the server's queue holds fewer than the {max(users) * rows} rows that "
        f"{max(users)} users send at once; -- --max-queue-rows {max(users) * rows} lets them wait"
    )
