"""Closed loop: locust's users, each of which sends one request after another."""

from typing import TYPE_CHECKING, Any

from locust import User, constant, task

if TYPE_CHECKING:
    from loadtests.generator.driver import Driver


class ClosedLoopUser(User):
    """One caller that never pauses; the load in progress says what it sends."""

    wait_time = constant(0)
    environment: Any

    @task
    def ask(self) -> None:
        """Send one request; wait where there is no load."""
        driver: Driver = self.environment.driver
        driver.ask()
