"""The routes by which nodes join and leave: the table of nodes answers them."""

from elastic_driver.features.joining import driver
from elastic_driver.runtime.status_routes import RoutePart, Serving

ROUTES = driver.ROUTES


def parts(serving: Serving) -> tuple[RoutePart, ...]:
    """Return what answers them; nothing where no nodes join."""
    return () if serving.nodes is None else (serving.nodes,)
