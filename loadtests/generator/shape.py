"""A profile as a shape of locust: the number of users as the load goes on."""

from locust import LoadTestShape

from loadtests.generator.load_profile import Profile

MOST_A_SECOND = 100.0  # users that come or go; locust warns beyond it


class ProfileShape(LoadTestShape):
    """As many users as the profile says of the peak, and at least one; without an end of its own where it is held.

    The warm-up, before the profile's `seconds`, has as many as its first moment.
    """

    def __init__(
        self, profile: Profile, users: int, seconds: float, is_held: bool = False, warm_up_s: float = 0.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._profile = profile
        self._users = users
        self._seconds = seconds
        self._is_held = is_held
        self._warm_up_s = warm_up_s

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users now, and how fast it is reached; None once the time is up."""
        run_time_s: float = self.get_run_time()  # type: ignore[no-untyped-call]
        part = max(0.0, run_time_s - self._warm_up_s) / self._seconds
        if part >= 1 and not self._is_held:
            return None
        return max(1, round(self._users * self._profile(min(part, 1.0)))), min(float(self._users), MOST_A_SECOND)
