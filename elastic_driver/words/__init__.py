"""What crosses a process, and numbers and names as they stand in sentences. Pure."""


def printable(text: str) -> str:
    """Return text that does not control a terminal: other people's words may be in it.

    Newlines and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def counted(number: int, noun: str, many: str = "") -> str:
    """Return `1 worker` or `1,200 workers`; `many`: the plural, where it does not end with s."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"
