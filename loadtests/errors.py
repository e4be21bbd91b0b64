"""The root of what a measurement may fail with; `python -m loadtests` prints it as one line and ends with status 2."""


class LoadTestError(Exception):
    """A measurement that cannot be made or continued; the message says what to do."""


# What reading a document may fail with that somebody else wrote, whatever it holds in the place of what is looked for.
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
