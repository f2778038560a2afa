#!/usr/bin/env bash
# x prefillers and y decoders of one kind of engine and the proxy on this machine, until Ctrl-C:
#   scripts/launch_xpyd.sh --engine vllm_nixl --prefillers 2 --decoders 2 --model DIR --python VENV/bin/python
# `pdproxy up` in .venv/ does it; --help lists the options.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
scripts=$(CDPATH='' cd -- "$here" && pwd -P)

# Engines of other projects have environments of their own (--python), so that .venv/ needs no torch for them.
extras=(engine)
for word in "$@"; do
  case $word in
    --) break ;;
    --python | --python=*) extras=(demo) ;;
  esac
done

exec "$scripts/install" "${extras[@]}" -- python -m pdproxy up --work-dir "${scripts%/*}/.demo" "$@"
