"""The counts of every suite, and the page that shows them.

`python tests/conformance/publish.py` writes the table of docs/conformance.md anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "conformance.md"
BEGIN, END = "<!-- counts -->\n", "<!-- end of counts -->\n"


def wanted() -> str:
    """The page with the counts of the cases as they stand."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    try:
        import test_onnx_operators
        import test_torch_function
        import test_torch_layer_masks
        import test_torch_layer_sizes
    finally:
        del sys.path[:2]
    from ledger import table

    suites = (
        test_onnx_operators.ATTENTION,
        test_onnx_operators.ROTARY,
        test_torch_layer_masks.SUITE,
        test_torch_layer_sizes.SUITE,
        test_torch_function.SUITE,
    )
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table(suites)}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(wanted(), "utf-8")
