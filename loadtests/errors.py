"""The root of what a measurement may fail with; `python -m loadtests` prints it as one line and ends with status 2."""


class LoadTestError(Exception):
    """A measurement that cannot be made, or goes on no longer; the message says what to do."""
