"""How a measurement names the command it came from. Imports nothing of this package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence


def command_line(words: Sequence[str]) -> str:
    """The command as it was given, absolute paths shortened to their last part."""
    return shlex.join(re.sub(r"(^|=)/(?:[^/]+/)*", r"\1", word) for word in words)
