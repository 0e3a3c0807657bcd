"""The shapes of WASI preview 1, as far as they are looked into here. Numbers are the specification's."""

from __future__ import annotations

import struct

MODULE = "wasi_snapshot_preview1"

# What each function takes: i for a 32-bit number or address, l for a 64-bit number. All return an error number.
SIGNATURES = {
    "clock_res_get": "ii",
    "clock_time_get": "ili",
    "fd_close": "i",
    "fd_fdstat_get": "ii",
    "fd_filestat_get": "ii",
    "fd_filestat_set_times": "illi",
    "fd_read": "iiii",
    "fd_readdir": "iiili",
    "fd_renumber": "ii",
    "path_create_directory": "iii",
    "path_filestat_get": "iiiii",
    "path_filestat_set_times": "iiiilli",
    "path_link": "iiiiiii",
    "path_open": "iiiiillii",
    "path_remove_directory": "iii",
    "path_rename": "iiiiii",
    "path_symlink": "iiiii",
    "path_unlink_file": "iii",
    "poll_oneoff": "iiii",
    "random_get": "ii",
}

OK, BAD_FD, INVALID = 0, 8, 28  # __WASI_ERRNO_*
FOLLOW = 1  # a lookup flag
CREATE, TRUNCATE = 1, 8  # of the flags to open with
RIGHT_TO_WRITE = 1 << 6  # of a descriptor
DIRECTORY = 3  # a file type
REGULAR_FILE = 4
ACCESSED, ACCESSED_NOW, MODIFIED, MODIFIED_NOW = 1, 2, 4, 8  # which times to set

WORD = struct.Struct("<I")
LONG = struct.Struct("<Q")
VECTOR = struct.Struct("<II")  # where, how much
FILESTAT = struct.Struct("<QQB7xQQQQQ")  # device, number, type, links, size, accessed, modified, changed
DIRENT = struct.Struct("<QQIB3x")  # next cookie, number, length of the name, type; the name follows

CLOCK, READABLE = 0, 1  # what a subscription waits for; 2 is writable
SUBSCRIPTION = 48  # bytes
SUBSCRIBED_TO = struct.Struct("<QB7x")  # the caller's word, what for
TO_CLOCK = struct.Struct("<I4xQQH6x")  # which, when, precision, flags
TO_FD = struct.Struct("<I28x")
ABSOLUTE = 1  # the flag of a time that is a moment, not a distance
EVENT = struct.Struct("<QHB5xQH6x")  # the caller's word, error, what for, bytes there, flags


def unsigned(number: int) -> int:
    """An address or length, which arrives as a signed number."""
    return number & 0xFFFFFFFF
