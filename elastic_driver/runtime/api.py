"""The driver's HTTP routes together: the rows of all modules, their rights, and their parts.

Each module has its rows beside its handlers (`rendezvous.routes`); a folder of
`elastic_driver.features` may bring its own in `routes.py`, whose handlers get the `OpenRequests` of
the driver. So a new route is a row in the module that owns it. Every decision about the job is made
in the driver's thread.
"""

from collections.abc import Mapping

from aiohttp import web

from elastic_driver import token_roles
from elastic_driver.features import chapters
from elastic_driver.features.joining import driver as joined
from elastic_driver.runtime import (
    event_routes,
    live,
    log_routes,
    machine_api,
    openapi,
    output,
    page_routes,
    status_routes,
)
from elastic_driver.runtime.driver_port import DriverPort
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.job_times import JobTimes
from elastic_driver.token_roles import RoundMembers, access_of
from rendezvous.access import Access
from rendezvous.routes import Post, Route, collect, short_ways
from rendezvous.store_routes import store_rows

_STORE = token_roles.TRAINERS | token_roles.AGENTS
ROUTES: tuple[Route, ...] = (
    *store_rows(_STORE, _STORE, _STORE | token_roles.NODES | token_roles.JOBS),
    *collect(
        (
            event_routes,
            status_routes,
            live,
            output,
            log_routes,
            page_routes,
            openapi,
            joined,
            *chapters("routes"),
        )
    ),
)


def job_access(rounds: RoundMembers | None = None) -> Access:
    """Return what a server of a job or of a Brain checks; `rounds`: who may write which round.

    Without it, no worker is a member of any round.
    """
    return access_of(ROUTES, rounds)


class DriverRoutes:
    """What answers the routes."""

    def __init__(
        self,
        driver: DriverPort,
        log: EventLog,
        nodes: joined.JoinedNodes | None = None,
        lines: output.AgentsOutput | None = None,
        *,
        logs: log_routes.LogRoutes | None = None,
        times: JobTimes | None = None,
    ) -> None:
        self.rounds = RoundMembers()
        self.requests = machine_api.OpenRequests(driver.post, self.rounds)
        self.status = status_routes.StatusRoutes(
            driver, log, JobTimes() if times is None else times
        )
        self.events = event_routes.EventRoutes(driver, self.status.status)
        self._parts = (
            self.events,
            self.status,
            live.Live(self.status.status, driver.history, log, self.status.one_stream),
            lines,
            logs,
            page_routes.PageRoutes(),
            openapi.OpenApi(ROUTES),
            nodes,
            self.requests,
        )

    @property
    def posts(self) -> Mapping[str, Post]:
        """What answers POSTs the short way."""
        of_requests = collect(chapters("routes"))
        of_events = short_ways(event_routes.ROUTES, self.events)
        return {**of_events, **short_ways(of_requests, self.requests)}

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        for part in self._parts:
            if part is not None:
                part.add_to(app)
