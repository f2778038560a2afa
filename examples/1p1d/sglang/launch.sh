#!/usr/bin/env bash
# SGLang on GPUs: one prefiller, one decoder and the proxy, until Ctrl-C.
#   launch.sh --python VENV/bin/python --model DIR [--devices 0,1] [--prefillers X] [--decoders Y] [OPTION...]
# Options given here come after those below; --help lists them all.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
here=$(CDPATH='' cd -- "$here" && pwd -P)

exec "${here%/examples/1p1d/sglang}/scripts/launch_xpyd.sh" --engine sglang "$@"
