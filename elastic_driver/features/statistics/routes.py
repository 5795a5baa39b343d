"""The route that shows how the job has trained in the last hour."""

import msgspec
from aiohttp import web
from msgspec import Struct

from elastic_driver.runtime.machine_api import DriverPort
from elastic_driver.runtime.status_routes import RoutePart, Serving
from elastic_driver.token_roles import WATCHERS
from elastic_driver.words.progress import Amount, History
from rendezvous.routes import JSON, Problem, Route, mount


class HistorySince(Struct, frozen=True):
    """The time after which a reader wants the history, in unix seconds."""

    since: Amount = 0.0


class HistoryRoute:
    """The handler of the route."""

    def __init__(self, driver: DriverPort) -> None:
        self._driver = driver

    def add_to(self, app: web.Application) -> None:
        """Mount the route."""
        mount(app, ROUTES, self)

    async def get_history(self, request: web.Request) -> web.Response:
        """Answer with step, speed and world size of the last hour."""
        text = request.query.get("since") or "0"
        try:
            since = msgspec.convert({"since": text}, HistorySince, strict=False).since
        except msgspec.ValidationError:
            problem = f"since={text[:40]!r} is not a time in unix seconds"
            raise Problem(422, "invalid", problem, "since=0") from None
        body = msgspec.json.encode(self._driver.history(since))
        return web.Response(body=body, content_type=JSON)


ROUTES = (
    Route("GET", "/v1/history", WATCHERS, HistoryRoute.get_history, History, query=HistorySince),
)


def parts(serving: Serving) -> tuple[RoutePart, ...]:
    """Return what answers the route."""
    return (HistoryRoute(serving.driver),)
