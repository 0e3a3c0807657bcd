"""The Linux layer: one thin function per system call, and everything composed from them. The only folder that uses ctypes."""
