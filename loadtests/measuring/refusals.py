"""Explains requests that the server refused."""

from collections.abc import Iterable

from loadtests.evidence import Run


def overloaded(runs: Iterable[Run], rows: int, most_rows: int | None, url: str | None) -> str | None:
    """Return, in a sentence, what to do about closed loops that the server had no room for; None if there were none.

    The server accepts no queue bound below `most_rows`, the most rows of a request, times its number of HTTP processes,
    which it does not report. The server at `url` is already running.
    """
    users = max((run.users for run in runs if run.users and run.errors.get("overloaded")), default=0)
    if not users:
        return None
    flag = f"--max-queue-rows {max(users * rows, most_rows or 1)}"
    how = f"-- {flag} at least lets them wait" if url is None else f"start it with {flag} at least, and they wait"
    return (
        f"closed loops were refused: the server had no room for what {users} users send at once, {users * rows} rows; "
        f"{how}, where --max-connections lets as many in"
    )
