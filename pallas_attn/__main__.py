"""`python -m pallas_attn`: the same as the command `pallas-attn`."""

import sys

from pallas_attn.cli import main

if __name__ == "__main__":
    sys.exit(main())
