#!/usr/bin/env bash
# A built wheel on a machine without AVX-512 (an emulated Haswell): it imports, runs, and says AVX2.
# Needs qemu-user. Usage: tests/wheel_check.sh PYTHON WHEEL
set -euo pipefail
python=$1 wheel=$2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m pip install -q --disable-pip-version-check --no-deps --target "$place" "$wheel"
cat >"$place/check.py" <<'PY'
import sys

# The editable install's own finder would come first.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
import torch

import headwise
from headwise import native

assert headwise.__file__.startswith(sys.path[0]), headwise.__file__
x = torch.randn(1, 2, 70, 16)
got = headwise.attention(x, x, x, headwise.causal(), backend="native")
want = headwise.attention(x, x, x, headwise.causal(), backend="reference")
assert float((got - want).abs().max()) < 1e-5
print(headwise.__version__, native.isa(), native.supported())
assert native.isa() == "avx2", native.isa()
PY
ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 \
  qemu-x86_64 -cpu Haswell "$(readlink -f "$python")" -c "
import sys, site
sys.path[:0] = ['$place', *site.getsitepackages(), '$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')']
exec(open('$place/check.py').read())"
