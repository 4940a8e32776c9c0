"""Replays decisions recorded from vLLM's own schedulers, and names the first one that differs.

    python scripts/replay_oracle.py tests/data/oracles/*.json

Records of vLLM 0.2.5 go through preset `vllm`, those of V1 (0.32) through `vllm_v1`. Exits with 1 if a
decision differs, with 2 if a file is no record.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from jaxllm.errors import ConfigError
from jaxllm.research.bench.oracles import first_difference


def main(argv: list[str] | None = None) -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=pathlib.Path, nargs="+", metavar="TRACE")
    args = parser.parse_args(argv)
    status = 0
    for path in args.traces:
        try:
            found = first_difference(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        print(f"{path}: {'the same decisions' if found is None else found}")
        status = status or int(found is not None)
    return status


if __name__ == "__main__":
    sys.exit(main())
