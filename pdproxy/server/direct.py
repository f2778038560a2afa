"""DirectRoutes finds the requests that go straight to a generation route, past the app's middleware and its routing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdproxy.server.routes import GenerationRoute


class DirectRoutes:
    """DirectRoutes takes every ``POST`` to exactly one of `routes`' paths. Where pages from elsewhere may ask (CORS),
    it does not take theirs, because their answers need headers that the middleware adds."""

    def __init__(self, routes: Mapping[str, GenerationRoute], *, may_be_asked_from_elsewhere: bool) -> None:
        self._routes = {path.encode(): route for path, route in routes.items()}
        self._looks_for_origin = may_be_asked_from_elsewhere

    def find(self, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> GenerationRoute | None:
        """Returns the route of a ``POST`` to `path`; None where it goes through the app. Header names are in lower
        case."""
        route = self._routes.get(path)
        if route is not None and self._looks_for_origin and any(name == b"origin" for name, _ in headers):
            return None
        return route
