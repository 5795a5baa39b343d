"""The version of this installation."""

from importlib import metadata

DISTRIBUTION = "elastic-driver"


def version() -> str:
    """Return the installed version; `unknown` in a folder that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def render_version() -> str:
    """Return the line of `--version`."""
    return f"elasticrun {version()}"
