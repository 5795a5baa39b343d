"""The driver's HTTP routes together: the rows of all modules, their rights, and their parts.

Each module has its rows beside its handlers (`rendezvous.routes`); a folder of
`elastic_driver.features` may bring its own in `routes.py`. Their handlers get what its
`parts(serving)` returns; without that, the `OpenRequests` of the driver. So a new route is a row in
the module that owns it. Every decision about the job is made in the driver's thread.
"""

from collections.abc import Mapping

from aiohttp import web

from elastic_driver import token_roles
from elastic_driver.features import chapters
from elastic_driver.rights import access_of
from elastic_driver.round_members import RoundMembers
from elastic_driver.runtime import (
    event_routes,
    log_routes,
    machine_api,
    openapi,
    output,
    status_routes,
)
from elastic_driver.runtime.driver_port import DriverPort
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.job_times import JobTimes
from rendezvous.access import Access
from rendezvous.routes import Post, Route, collect, short_ways
from rendezvous.store_routes import store_rows

_STORE = token_roles.TRAINERS | token_roles.AGENTS
ROUTES: tuple[Route, ...] = (
    *store_rows(_STORE, _STORE, _STORE | token_roles.NODES | token_roles.JOBS),
    *collect(
        (event_routes, status_routes, output, log_routes, openapi, *chapters("routes")),
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
        nodes: status_routes.Nodes | None = None,
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
        serving = status_routes.Serving(driver, log, self.status, nodes)
        self._parts: list[status_routes.RoutePart] = [self.events, self.status]
        self._parts += [part for part in (lines, logs) if part is not None]
        self._parts += [openapi.OpenApi(ROUTES), self.requests]
        for chapter in chapters("routes"):
            if hasattr(chapter, "parts"):
                self._parts += chapter.parts(serving)

    @property
    def posts(self) -> Mapping[str, Post]:
        """What answers POSTs the short way."""
        of_requests = short_ways(machine_api.rows(), self.requests)
        return {**short_ways(event_routes.ROUTES, self.events), **of_requests}

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        for part in self._parts:
            part.add_to(app)
