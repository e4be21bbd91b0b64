"""What to make of requests that the server refused."""

from collections.abc import Iterable

from loadtests.evidence import Run


def overloaded(runs: Iterable[Run], rows: int, most_rows: int | None, url: str | None) -> str | None:
    """Return, in a sentence, what to do about closed loops that the server had no room for; None without any.

    The server takes no bound of its queue below `most_rows`, what one request may hold, for each of its HTTP processes,
    of which it does not tell the number. The one at `url` runs already.
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
