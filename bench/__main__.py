"""`python -m bench` runs the throughput bench."""

import sys

from bench.throughput import main

sys.exit(main())
