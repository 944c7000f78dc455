"""How much random tests try: a part in the usual run, all of it with `HEADWAY_THOROUGH=1`."""

import os

IS_THOROUGH = os.environ.get("HEADWAY_THOROUGH") == "1"


def amount(usual: int, thorough: int) -> int:
    return thorough if IS_THOROUGH else usual
