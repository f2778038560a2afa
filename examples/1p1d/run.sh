#!/usr/bin/env bash
# From a fresh clone to an answer: one prefiller, one decoder and the proxy on this machine, then one question to them.
set -euo pipefail
here=${BASH_SOURCE[0]%/*}
[[ $here != "${BASH_SOURCE[0]}" ]] || here=.
here=$(CDPATH='' cd -- "$here" && pwd -P)
root=${here%/examples/1p1d}

usage() {
  cat <<'USAGE'
usage: examples/1p1d/run.sh [--once] [--model DIR] [--port N] [--prompt TEXT]... [LAUNCHER OPTION...]

  --once         ask, print the answer, stop everything, and exit 0; without it, serve on until Ctrl-C
  --model DIR    a Hugging Face model folder; without it, a tiny random model is made in .demo/
  --port N       the proxy's port (9100)
  --prompt TEXT  what to ask; may be repeated
  --max-tokens N how long each answer may be (48)

Makes .venv/ when there is none. Logs of the three processes: .demo/logs/. More options: scripts/launch_1p1d.sh --help
USAGE
}

launch=() chat=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --prompt | --max-tokens)
      (($# > 1)) || { echo "run.sh: $1 needs a value" >&2; exit 2; }
      chat+=("$1=$2")
      shift 2
      ;;
    --prompt=* | --max-tokens=*) chat+=("$1"); shift ;;
    *) launch+=("$1"); shift ;;
  esac
done

# Each step becomes the next (exec), so that one process answers for everything and gets every signal.
# Pages of 64 tokens, so that the question travels in several of them.
exec "$root/scripts/install" engine demo -- \
  python -m pdproxy up --work-dir "$root/.demo" --log-dir "$root/.demo/logs" --chunk-size 64 \
  ${launch[@]+"${launch[@]}"} -- python "$here/chat.py" ${chat[@]+"${chat[@]}"}
