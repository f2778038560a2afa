#!/usr/bin/env bash
# vLLM with its MooncakeConnector on GPUs: one prefiller, one decoder and the proxy, until Ctrl-C.
#   launch.sh --python VENV/bin/python --model DIR [--devices 0,1] [--prefillers X] [--decoders Y] [OPTION...]
# Options given here come after those below; --help lists them all.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
here=$(CDPATH='' cd -- "$here" && pwd -P)

# For so long, instead of 480 s, a decoder keeps blocks for KV that a prefiller never had, and a prefiller keeps KV that
# nobody fetches. The proxy is told of it too.
seconds=${VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT:-60}
export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=$seconds

exec "${here%/examples/1p1d/mooncake}/scripts/launch_xpyd.sh" --engine mooncake \
  --proxy-args "--engine-lease-s $seconds" "$@"
