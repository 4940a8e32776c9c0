"""`python -m jaxllm`: the same as the command `jaxllm`."""

import sys

from jaxllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
