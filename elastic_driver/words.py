"""Numbers and names as they stand in sentences."""


def counted(number: int, noun: str, many: str = "") -> str:
    """Return `1 worker` or `1,200 workers`; `many`: the plural, where it does not end with s."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"
