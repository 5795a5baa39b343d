"""The types of fields that several kinds of messages have, with their bounds. Pure data."""

from typing import Annotated

from msgspec import Meta

Host = Annotated[str, Meta(min_length=1, max_length=253)]
WorkerId = Annotated[str, Meta(min_length=1, max_length=300)]
Text = Annotated[str, Meta(max_length=65536)]
LongText = Annotated[str, Meta(max_length=1 << 20)]  # its reader keeps a part
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
