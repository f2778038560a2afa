#!/usr/bin/env bash
# vLLM with pdproxy's own connector without a GPU: one prefiller, one decoder and the proxy, until Ctrl-C.
#   launch_cpu.sh --python VENV/bin/python --model DIR [--prefillers X] [--decoders Y] [OPTION...]
# Options given here come after those below and so beat them, --engine-args add up; --help lists them all.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
here=$(CDPATH='' cd -- "$here" && pwd -P)

# GiB of KV cache for each engine; vLLM would plan with most of the machine's memory, for each of them.
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}

# On a CPU a block has a multiple of 32 tokens, and there is nothing to compile.
exec "${here%/examples/1p1d/vllm_transfer}/scripts/launch_xpyd.sh" --engine vllm_transfer --device cpu \
  --dtype float32 --chunk-size 32 --engine-args "--enforce-eager --max-num-seqs 8" \
  --kv-transfer-config '{"kv_load_failure_policy": "fail"}' "$@"
