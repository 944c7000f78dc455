"""Where the real data sets are: not in the repository, and not on every machine."""

import os
from pathlib import Path

REAL = Path(os.environ.get("HEADWAY_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")
"""The folder of `HEADWAY_DATA_DIR`, or the one beside the checkout; it may not be there."""
