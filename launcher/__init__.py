"""The commands `elasticrun` and `elasticctl`, and the agents they start on hosts."""

DISTRIBUTION = "elastic-driver"


def version() -> str:
    """Return the installed version; `unknown` in a folder that was never installed."""
    from importlib import metadata  # noqa: PLC0415 - it takes 10 ms, which most commands can save

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
