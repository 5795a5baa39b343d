"""`elasticctl report --html`: the driver's page in one file, about a job that runs or is over.

The file has the page's own style and script, and the job as JSON. It loads nothing: its policy
allows the two by their digest, and no connection. What workers and hosts have written is only data.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver.errors import UsageError
from elastic_driver.features.page.live import event_row
from elastic_driver.features.page.routes import FOLDER
from elastic_driver.words.log_lines import read_line
from rendezvous.own_files import open_named

MOST_EVENTS = 20_000  # the newest; a page with more is slow
_STYLE = '<link rel="stylesheet" href="/assets/app.css">'
_SCRIPT = '<script defer src="/assets/app.js"></script>'
_ICON = '<link rel="icon" href="/assets/icon.svg">'


def write(into: Path, run_id: str, log: Path, story: dict[str, Any]) -> None:
    """Write the page of a run; `story`: see `report.document`. Raises UsageError for a bad path."""
    with log.open("rb") as lines:
        events = [event_row(line) for line in lines if read_line(line) is not None]
    text = page(run_id, story, events[-MOST_EVENTS:])
    try:
        with open(open_named(into), "wb") as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {into}: {error.strerror}; choose another -o") from None


def page(run_id: str, story: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """Return the HTML of the page."""
    style, script, whole = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("app.css", "app.js", "index.html")
    )
    script = script.replace("</script", "<\\/script")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data:; form-action 'none'; base-uri 'none'"
    )
    data = msgspec.json.encode(_data(run_id, story, events)).decode().replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    body = f'<script type="application/json" id="report">{data}</script>\n<script>{script}</script>'
    parts = {_ICON: head, _STYLE: f"<style>{style}</style>", _SCRIPT: body}
    for mark, part in parts.items():
        before, found, after = whole.partition(mark)
        assert found, f"{mark} is not in index.html"  # noqa: S101 - both are ours
        whole = before + part + after
    return whole


def _data(run_id: str, story: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page shows, in the form of the driver's messages."""
    worlds = story["worlds"]
    times = [w["t"] for w in worlds]
    sizes = [w["size"] for w in worlds]
    nothing = [None] * len(worlds)
    job = {
        "run_id": run_id,
        "state": story["state"],
        "reason": story["reason"],
        "size": sizes[-1] if sizes else 0,
        "round": story["rounds"],
        "step": story["step"],
        "goodput": story["goodput"],
        "counters": {"failures": story["failures"]},
        "host_count": 0,
        "member_count": 0,
    }
    history = {"t": times, "world_size": sizes, "step": nothing, "steps_per_s": nothing}
    history |= {"samples_per_s": nothing, "step_time": nothing}
    keys = {name: story[name] for name in ("state", "reason")}
    return {"job": job, "history": history, "events": events, **keys}


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
