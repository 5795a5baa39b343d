"""Descriptions of a state, leaf by leaf, within the bounds of the messages that carry them."""

from collections.abc import Sequence
from hashlib import blake2b

from elastic_driver.words import wire_events as events
from elastic_driver.words.progress import MAX_DIGEST_CHARS

Leaf = tuple[str, str, str]  # name, digest, and value as text


def new_leaf_mark(name: str, digest: str, text: str) -> events.LeafMark:
    """Return the description of a leaf within the bounds of the message, in characters it takes."""
    short = name[: events.MAX_LEAF_NAME_CHARS], text[: events.MAX_LEAF_TEXT_CHARS]
    name, text = (each.encode(errors="replace").decode() for each in short)
    return events.LeafMark(name, digest[:MAX_DIGEST_CHARS], text)


def in_short(leaves: Sequence[Leaf], most: int) -> list[Leaf]:
    """Return leaves as at most so many; of more, those of an object or an attribute become one."""
    if len(leaves) <= most:
        return list(leaves)
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        words = leaf[0].split(".")
        is_setting = " " in leaf[0]  # of an optimizer's group, or a flag
        name = leaf[0] if is_setting else ".".join(words[: 2 if words[0] == "state" else 1])
        groups.setdefault(name, []).append(leaf)
    return [_as_one(name, inside) for name, inside in groups.items()][:most]


def _as_one(name: str, inside: Sequence[Leaf]) -> Leaf:
    if len(inside) == 1:
        return name, *inside[0][1:]
    root = blake2b(digest_size=8)
    for leaf, digest, _ in sorted(inside):
        root.update(f"{leaf} {digest} ".encode(errors="replace"))
    return name, root.hexdigest(), f"{len(inside)} tensors and values"
