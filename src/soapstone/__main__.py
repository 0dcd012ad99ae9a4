"""`python -m soapstone` is the `soapstone` command."""

import sys

from soapstone.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
