"""What crosses a process; numbers, names and tables as people read them. Pure."""

from collections.abc import Container, Sequence


def printable(text: str) -> str:
    """Return text that does not control a terminal: other people's words may be in it.

    Newlines and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def counted(number: int, noun: str, many: str = "") -> str:
    """Return `1 worker` or `1,200 workers`; `many`: the plural, where it does not end with s."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the rows as lines with aligned columns, two spaces apart.

    Args:
        rows: cells; all rows have the same number of them.
        right: the columns that end at the same place; the others begin at the same place.

    Raises ValueError for rows of different lengths.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
