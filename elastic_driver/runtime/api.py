"""The driver's own HTTP routes, mounted on the rendezvous server behind its token check.

| route | answer |
|---|---|
| `POST /v1/events` | 202 once the journal has it; posts a `WireEvent` to the driver |
| `GET /v1/status` | the run and `job.status.JobStatus` as one JSON object |
| `GET /v1/history?since=T` | `words.progress.History` of the last hour, after T (unix seconds) |
| `GET /v1/openapi.json` | all routes and their messages, see `runtime.openapi` |
| `GET /v1/events?since=N` | `{"events": […], "last": n}`; with `text/event-stream` it goes on |
| `GET /v1/live` | the job as it changes, see `runtime.live` |
| `/`, `/assets/…`, `/login` … | the page, see `runtime.page_routes` |
| `GET /metrics` | the same picture for Prometheus, see `runtime.metrics` |
| `POST /v1/scale` | 202; `{"num_proc": N}` within the job's bounds |
| `POST /v1/plan` | 202; see `words.wire_events.PlanApplied`; 409 `stale_plan` |
| `POST /v1/hosts/{host}:drain` | 202; the host's workers leave in order; 404 for an unknown host |
| `POST /v1/hosts/{host}:undrain` | 202; it may be used again; 404, 409 `not_drained` |
| `POST /v1/stacks` | 202; every worker reports its stack: event `stacks_collected` |
| `POST /v1/stop` | 202; the job ends with status 143; a second request ends it at once |
| `/v1/shards/…`, `/v1/tf/…` | see `runtime.machine_api` |
| `/v1/nodes` | see `runtime.joined` |
| `POST /v1/output` | see `runtime.output` |
| `POST /v1/logs`, `GET /v1/logs` | see `runtime.log_routes` |

Every decision about the job is made in the driver's thread. Errors have the form of
`rendezvous.web`.
"""

from aiohttp import web

from elastic_driver import contract
from elastic_driver.round_members import RoundMembers
from elastic_driver.runtime import machine_api
from elastic_driver.runtime.driver_port import DriverPort
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.event_routes import EVENT_OF_PATH, EventRoutes, StopRequest
from elastic_driver.runtime.job_times import JobTimes
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.live import Live
from elastic_driver.runtime.log_routes import LogRoutes
from elastic_driver.runtime.openapi import OpenApi
from elastic_driver.runtime.output import AgentsOutput
from elastic_driver.runtime.page_routes import PageRoutes
from elastic_driver.runtime.status_routes import StatusRoutes


class DriverRoutes:
    """All of the routes above."""

    def __init__(
        self,
        driver: DriverPort,
        log: EventLog,
        joined: JoinedNodes | None = None,
        output: AgentsOutput | None = None,
        *,
        logs: LogRoutes | None = None,
        times: JobTimes | None = None,
    ) -> None:
        self.rounds = RoundMembers()
        self.requests = machine_api.OpenRequests(driver.post, self.rounds)
        self.status = StatusRoutes(driver, log, JobTimes() if times is None else times)
        self.events = EventRoutes(driver, self.status.status)
        live = Live(self.status.status, driver.history, log, self.status.one_stream)
        self._parts = joined, output, logs, live, PageRoutes()

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        self.status.add_to(app)
        self.events.add_to(app)
        machine_api.add_machine_routes(app, self.requests)
        OpenApi({**EVENT_OF_PATH, contract.STOP_PATH: StopRequest}).add_to(app)
        for part in self._parts:
            if part is not None:
                part.add_to(app)
