"""HOW, ON LINUX?  The only folder with ctypes: one thin function per system call, and what is composed from them."""
