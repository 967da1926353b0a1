#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The benchmark in its short form, on simulated cards: every arm runs, and one that breaks is seen. What it measures
# means nothing here. Debian's python3 is named in full, as another one on the PATH may be something else.
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 tests/bench/gpu_bench_test.py -v
