"""python -m flashback_attention: what this library is on this machine, as `flashback info` says it."""

from . import info

print(info(), end="")
