#!/usr/bin/env bash
# vLLM with LMCache on GPUs: one prefiller, one decoder and the proxy, until Ctrl-C.
#   launch.sh --python VENV/bin/python --model DIR [--devices 0,1] [--prefillers X] [--decoders Y] [OPTION...]
# Options given here come after those below and so beat them; --help lists them all.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
here=$(CDPATH='' cd -- "$here" && pwd -P)

# Both legs get what the client sent, chat as chat, and the decoder says the first word.
exec "${here%/examples/1p1d/lmcache}/scripts/launch_xpyd.sh" --engine lmcache --pd-buffer-size 2GiB --chunk-size 256 \
  --proxy-args "--first-token decoder" "$@"
