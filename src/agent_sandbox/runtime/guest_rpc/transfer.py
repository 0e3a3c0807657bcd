"""The messages with which the state of a session crosses between a guest and its supervisor, as questions of the guest.

They begin with a zero byte, so none of them is a question of a program, which is JSON. The supervisor answers them only while it saves or
resumes a session.
"""

from __future__ import annotations

FACTS = b"\0facts "  # when a session is saved, first: JSON
PIECE = b"\0piece "  # when a session is saved: the next piece of its content
GO_ON = b"on"  # the answer to both; any other one ends the saving
READ = b"\0read"  # when a session is resumed: the answer is the next piece of its content, and nothing at its end
REFUSED = b"\0refused "  # when a session is resumed: why it cannot be
LARGEST_PIECE = 1 << 20
