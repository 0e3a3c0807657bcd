"""What sort of content it is: text or not, and which of the commonest formats. A remark for people; nothing hangs on it."""

from __future__ import annotations

_MAGIC = (
    (b"\x7fELF", "ELF program"),
    (b"MZ", "Windows program"),
    (b"\xcf\xfa\xed\xfe", "Mach-O program"),
    (b"\0asm", "WebAssembly module"),
    (b"\x89PNG\r\n\x1a\n", "PNG image"),
    (b"\xff\xd8\xff", "JPEG image"),
    (b"GIF8", "GIF image"),
    (b"\0\0\x01\0", "icon"),
    (b"%PDF-", "PDF document"),
    (b"PK\x03\x04", "ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\0", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"7z\xbc\xaf\x27\x1c", "7z archive"),
    (b"!<arch>\n", "archive or Debian package"),
    (b"SQLite format 3\0", "SQLite database"),
    (b"\xca\xfe\xba\xbe", "Java class or Mach-O program"),
    (b"OggS", "Ogg media"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"wOF2", "WOFF2 font"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
_INSIDE = ((257, b"ustar", "tar archive"), (8, b"WEBP", "WebP image"), (4, b"ftyp", "MP4 media"))
_PLAIN = bytes(byte for byte in range(256) if byte >= 0x20 and byte != 0x7F) + b"\t\n\r\f"


def is_binary(content: bytes) -> bool:
    """Whether it is mostly no text. A few odd bytes, or a NUL, do not hide a text: more than a fifth must be controls or no UTF-8.

    UTF-8 without a NUL is text, whatever else is in it.
    """
    odd = len(content.translate(None, _PLAIN))
    broken = 0
    if not content.isascii():
        text = content.decode(errors="surrogateescape")
        broken = len(text) - len(text.encode(errors="ignore").decode())
    return (odd + broken) * 5 > len(content) and (broken > 0 or b"\0" in content)


def sort_of(start: bytes) -> str:
    """The format whose mark the content begins with; "data" if it is none of the commonest."""
    for mark, sort in _MAGIC:
        if start.startswith(mark):
            return sort
    return next((sort for offset, mark, sort in _INSIDE if start[offset : offset + len(mark)] == mark), "data")
