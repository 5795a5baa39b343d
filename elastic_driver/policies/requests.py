"""Requests over HTTP that a machine answers.

A request comes to its machine as an event with a ticket; the machine decides a `Reply` with the
same ticket, at once or later. `runtime.machine_api` keeps the connections.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from elastic_driver.core.decisions import CausedDecision


class Rejection(Struct, frozen=True):
    """The reply to a request that came to nothing: a code for programs, why, and what to try."""

    code: str
    message: str
    hint: str = ""


class Reply(CausedDecision, frozen=True, tag="reply"):
    """Answer the request with this ticket; a document of None is an answer without content."""

    ticket: int
    document: Struct | None
    reason: str = "it was requested"


class RequestDropped(Struct, frozen=True, tag="request_dropped"):
    """The client of this request has gone: nobody reads an answer."""

    machine: Literal["shards", "tf"]
    ticket: int
