"""Has torch's library listen at chosen ports where it would take any free one.

Gloo listens at a port of the kernel's choice, and neither gloo nor torch has an option for it. The
kernel's range (`net.ipv4.ip_local_port_range`) belongs to the whole machine. So the library's
calls of `bind` come here: its table of imported functions (ELF's jump slots) has an entry for that
name, and `install` writes ours into it. A TCP socket that asks for port 0 gets a port from
ELASTIC_PORTS; every other call goes to the C library unchanged. That covers gloo's listeners of
all process groups, those of scripts included, and torch's RPC.

`libtorch_cpu.so` alone is changed, in this process alone. NCCL's sockets are NCCL's own.

This module uses the standard library only, on Linux with a 64-bit processor.
"""

import ctypes
import errno
import os
import random
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence

LIBRARY = "libtorch_cpu.so"
_JUMP_SLOTS = {"x86_64": 7, "aarch64": 1026}  # the kind of such an entry, in elf.h
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL = 2, 5, 6, 23  # in elf.h
_SYMBOL_SIZE = 24
_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, use_errno=True)
_kept: list[object] = []  # the functions that torch calls: they must never be freed


class UnsupportedError(Exception):
    """This torch, or this machine, does not let us; the message says why."""


class _LinkMap(ctypes.Structure):
    """The beginning of `struct link_map` in link.h."""

    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


def install(environ: Mapping[str, str]) -> None:
    """Have torch listen at the ports of ELASTIC_PORTS from now on; torch is loaded.

    Where that cannot be done, a line on stderr says so, and torch listens at ports of the kernel's
    choice.
    """
    if _kept:
        return
    given = environ.get("ELASTIC_PORTS", "")
    try:
        ports, option = _read(given)
        slots = jump_slots(_library(), b"bind")
        if not slots:
            raise UnsupportedError(f"{LIBRARY} has no entry for it")
        if not all(map(is_writable, slots)):  # it was linked with `-z relro -z now`
            raise UnsupportedError(f"the entry of {LIBRARY} for it cannot be changed")
    except (UnsupportedError, OSError, ValueError) as problem:
        _say(
            f"torch cannot be told to listen at the ports of --ports ({problem}): it takes those "
            "of net.ipv4.ip_local_port_range, which the firewall must let through, too"
        )
        return
    ours = bind_within(ports, lambda: _say(_none_left(option, environ)))
    _kept.append(ours)
    for slot in slots:
        entry = ctypes.c_size_t.from_address(slot)
        entry.value = ctypes.cast(ours, ctypes.c_void_p).value or entry.value


def bind_within(ports: Sequence[int], none_left: Callable[[], None]) -> "ctypes._FuncPointer":
    """Return a C function like `bind`, which gives a port of `ports` to sockets that want any.

    Workers of one host choose at the same time. So the order is random, and a port counts as free
    only where no other socket has it, although torch would allow that (SO_REUSEADDR: two sockets
    then have the port, and the second one cannot listen). If none is, a port is taken whose last
    connections are still ending.
    """
    real = _Bind(("bind", ctypes.CDLL(None, use_errno=True)))

    def bind(descriptor: int, address: int, length: int) -> int:
        name = ctypes.string_at(address, length)
        family = int.from_bytes(name[:2], sys.byteorder)
        if family not in (socket.AF_INET, socket.AF_INET6) or any(name[2:4]):
            return int(real(descriptor, address, length))
        blocking = os.get_blocking(descriptor)
        with socket.socket(fileno=os.dup(descriptor)) as own:
            os.set_blocking(descriptor, blocking)  # a default timeout of the script has changed it
            if own.type != socket.SOCK_STREAM:
                return int(real(descriptor, address, length))
            reuse = own.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
            for shared in dict.fromkeys((0, reuse)):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
                for port in random.SystemRandom().sample(ports, len(ports)):
                    named = name[:2] + struct.pack("!H", port) + name[4:]
                    buffer = ctypes.create_string_buffer(named, length)
                    if real(descriptor, ctypes.addressof(buffer), length) == 0:
                        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                        return 0
                    if ctypes.get_errno() != errno.EADDRINUSE:
                        return -1
        none_left()
        ctypes.set_errno(errno.EADDRINUSE)
        return -1

    return _Bind(bind)


def jump_slots(library: int, name: bytes) -> list[int]:
    """Return the addresses where a loaded library keeps the function `name` of another one.

    `library`: the handle of `dlopen`. Raises `UnsupportedError` on processors that are not known.
    """
    kind = _JUMP_SLOTS.get(os.uname().machine)
    if kind is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise UnsupportedError(f"{os.uname().machine} is not a processor that is known here")
    loaded = _LinkMap.from_address(library)
    entries: dict[int, int] = {}
    at = loaded.dynamic
    while (entry := struct.unpack("=QQ", ctypes.string_at(at, 16)))[0]:
        entries[entry[0]] = entry[1]
        at += 16
    if not {_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL} <= entries.keys():
        return []

    def place(tag: int) -> int:  # some C libraries leave it relative to the library's place
        return entries[tag] + (loaded.base if entries[tag] < loaded.base else 0)

    symbols, names = place(_DT_SYMTAB), place(_DT_STRTAB)
    table = ctypes.string_at(place(_DT_JMPREL), entries[_DT_PLTRELSZ])
    found = []
    for offset, info, _addend in struct.iter_unpack("=QQq", table):
        name_at = int.from_bytes(
            ctypes.string_at(symbols + _SYMBOL_SIZE * (info >> 32), 4), sys.byteorder
        )
        same = ctypes.string_at(names + name_at, len(name) + 1) == name + b"\0"
        if info & 0xFFFFFFFF == kind and same:
            found.append(loaded.base + offset)
    return found


def is_writable(address: int) -> bool:
    """Return whether this process may write to its memory there; elsewhere it would be killed."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            place, rights, *_ = line.split()
            low, high = (int(end, 16) for end in place.split("-"))
            if low <= address < high:
                return "w" in rights
    return False


def _library() -> int:
    folder = os.path.dirname(str(sys.modules["torch"].__file__))
    path = os.path.join(folder, "lib", LIBRARY)
    return int(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle)


def _read(given: str) -> tuple[tuple[int, ...], str]:
    """Return the ports of ELASTIC_PORTS, and the option --ports that they are of.

    The variable is `FIRST-LAST:LO-HI`: the ports for listeners, and the option.
    """
    own, _, option = given.partition(":")
    first, last = map(int, own.split("-"))
    if not 0 < first <= last < 65536:
        raise ValueError(f"ELASTIC_PORTS is {given[:40]!r}")
    return tuple(range(first, last + 1)), option


def _none_left(option: str, environ: Mapping[str, str]) -> str:
    rank, host = environ.get("RANK", "?"), environ.get("ELASTIC_HOSTNAME", "this host")
    return (
        f"no port of --ports {option} is free on {host} for gloo of rank {rank}; give a larger "
        "range (docs/firewalls.md says how many a host needs), or end what listens there (ss -ltnp)"
    )


def _say(sentence: str) -> None:
    os.write(2, f"elastic: {sentence}\n".encode())
