#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The service driven from another language, with nothing of ours but its description: the stubs are made from
# proto/ here and now. Debian's python3 is named in full, since another one on the PATH has no grpc.
set -euo pipefail
stubs=$TEST_TMPDIR/stubs
mkdir -p "$stubs"
/usr/bin/protoc -Iproto -I/usr/include --python_out="$stubs" --grpc_out="$stubs" \
  --plugin=protoc-gen-grpc=/usr/bin/grpc_python_plugin proto/residency.proto
PYTHONPATH=$stubs PYTHONDONTWRITEBYTECODE=1 exec /usr/bin/python3 tests/python_client.py -v
