#!/usr/bin/env bash
# vLLM with pdproxy's own connector on GPUs: one prefiller, one decoder and the proxy, until Ctrl-C.
#   launch_gpu.sh --python VENV/bin/python --model DIR [--devices 0,1] [--prefillers X] [--decoders Y] [OPTION...]
# Options given here come after those below and so beat them; --help lists them all.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
here=$(CDPATH='' cd -- "$here" && pwd -P)

# KV that was lost is an error, so that a request is tried again elsewhere; "recompute" has the decoder read the prompt.
exec "${here%/examples/1p1d/vllm_transfer}/scripts/launch_xpyd.sh" --engine vllm_transfer --device cuda \
  --kv-transfer-config '{"kv_load_failure_policy": "fail"}' "$@"
