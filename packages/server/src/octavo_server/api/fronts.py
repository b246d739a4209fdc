"""What a front does for the whole server, and how it asks the others: there may be several."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo_core.wire import SchedulerStats
from octavo_server.http_counts import HTTPCounts
from octavo_server.metrics import ServingMetrics
from octavo_server.metrics_report import add_report

if TYPE_CHECKING:
    from octavo_server.api.context import ServerContext
    from octavo_server.api.peer_requests import PeerDesk
    from octavo_server.hub_link import HubLink


class ServerTotals:
    """What the whole server has counted.

    Attributes:
        metrics: About requests.
        http: About HTTP requests.
        stats: The engine's load.
        is_shared: Several processes have counted this.
    """

    def __init__(
        self,
        metrics: ServingMetrics,
        http: HTTPCounts,
        stats: SchedulerStats,
        *,
        is_shared: bool = False,
    ) -> None:
        self.metrics = metrics
        self.http = http
        self.stats = stats
        self.is_shared = is_shared


class Fronts(Protocol):
    """All fronts of one server, as seen from one of them."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Have each front do `method` of `answer_call`, and return what they answer."""
        ...

    async def totals(self) -> ServerTotals:
        """Return what all fronts have counted."""
        ...

    def new_response_id(self) -> str:
        """Return an id of the Responses API, by which each front knows where the answer is."""
        ...

    async def forward(self, request: Request, response_id: str, body: bytes) -> Response | None:
        """Let the front answer that has a stored response; None if that is this one."""
        ...


class OneFront:
    """The usual case: no other fronts."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Do it here."""
        return [answer_call(self._context, method, list(args))]

    async def totals(self) -> ServerTotals:
        """Return what this front counts, as it goes on counting."""
        client = self._context.client
        return ServerTotals(client.metrics, self._context.http, client.stats)

    def new_response_id(self) -> str:
        """Return a new id."""
        return f"resp_{uuid.uuid4().hex}"

    async def forward(self, request: Request, response_id: str, body: bytes) -> Response | None:
        """Return None: what is not here is nowhere."""
        return None


class SeveralFronts:
    """One of the fronts behind a hub.

    Args:
        link: The way to the hub, and by it to the other fronts.
        desk: Passes requests on to them.
        num_fronts: How many there are.
    """

    def __init__(self, link: HubLink, desk: PeerDesk, num_fronts: int) -> None:
        self._link = link
        self._desk = desk
        self._num_fronts = num_fronts

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Have the hub ask everyone."""
        return await self._link.call_fronts(method, *args)

    async def totals(self) -> ServerTotals:
        """Add up what everyone has counted."""
        found = await self._link.collect_metrics()
        metrics, http = ServingMetrics(), HTTPCounts()
        add_report(metrics, http, found.metrics)
        return ServerTotals(metrics, http, found.stats, is_shared=True)

    def new_response_id(self) -> str:
        """Return a new id, whose first two digits are this front's index."""
        return f"resp_{self._link.index:02x}{uuid.uuid4().hex[2:]}"

    async def forward(self, request: Request, response_id: str, body: bytes) -> Response | None:
        """Let the front answer that the id names, if it is another one."""
        digits = response_id.removeprefix("resp_")[:2]
        try:
            home = int(digits, 16)
        except ValueError:
            return None
        if home == self._link.index or not 0 <= home < self._num_fronts:
            return None
        return await self._desk.forward(request, home, body)


def answer_call(context: ServerContext, method: str, args: list[Any]) -> Any:
    """Do on this front what concerns the whole server.

    Args:
        method: ``set_sleep_level`` (0 to 2, or None), ``abort_requests`` (ids, or None for all),
            ``num_in_flight`` or ``num_open``.

    Returns:
        Something that msgpack can carry.
    """
    match method, args:
        case "set_sleep_level", [int() | None as level]:
            context.sleep_level = level
            return None
        case "abort_requests", [request_ids]:
            return context.client.abort_requests(_as_set(request_ids))
        case "num_in_flight", []:
            return context.client.num_in_flight
        case "num_open", []:
            return context.num_open
        case _:
            raise ValueError(f"fronts have no function {method!r} with these arguments")


def _as_set(request_ids: Collection[str] | None) -> set[str] | None:
    return None if request_ids is None else set(request_ids)
