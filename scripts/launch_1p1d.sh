#!/usr/bin/env bash
# One prefiller, one decoder and the proxy on this machine, until Ctrl-C: `pdproxy up` in .venv/.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
scripts=$(CDPATH='' cd -- "$here" && pwd -P)

exec "$scripts/install" engine -- python -m pdproxy up --work-dir "${scripts%/*}/.demo" "$@"
