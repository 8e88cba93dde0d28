#!/bin/bash
# kvloop as processes on two GPUs of one host: store, P on GPU 0, D on GPU 1, a router without and one with
# DIRECT. Dummy weights: only times mean anything.
#
#   measure.sh smoke SHAPE_FOLDER OUT_FOLDER
#   measure.sh sweep SHAPE_FOLDER OUT_FOLDER [options of kvloop bench sweep]
#   measure.sh hot SHAPE_FOLDER OUT_FOLDER [options]      the same, P with its prefix cache: leg off-hot
#   measure.sh streams SHAPE_FOLDER OUT_FOLDER            what such turns do to streams that run beside them
#   measure.sh load SHAPE_FOLDER OUT_FOLDER [options of kvloop bench load]      agents in an open loop, P with its
#                                              prefix cache, routers as they come: without reuse, then with it
#   measure.sh smoke,sweep,streams SHAPE_FOLDER OUT_FOLDER [options]      on one fleet, one after another;
#                                              hot and load want a fleet of their own
#
# Python with kvloop and vLLM comes first in PATH or PYTHONPATH. SHAPE_FOLDER has a config.json.
# BLOCK_SIZE, MAX_MODEL_LEN and SECONDS_AT_MOST may be set; TRACE=1 writes every part's traces, too; GPUS=0,0 has
# P and D share a GPU, GPUS=0,1:2,3 with UP_ARGS="--tensor-parallel-size 2" gives each two; MAX_SEQS; MORE_ARGS is
# JSON of further engine arguments, UP_ARGS further options of kvloop up, PORT the first router's; DRY=1 has simulated
# engines, to try the script where no GPU is.
set -u
case ,$1, in
  ,hot, | ,load,) ;;
  *,hot,* | *,load,*)
    echo "$1: hot and load have P keep a prefix cache, and load has routers choose: play each by itself" >&2
    exit 2
    ;;
esac
what=$1 shape=$2 out=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd)
work=$(mktemp -d)
port=${PORT:-50050}
router=127.0.0.1:$port direct=127.0.0.1:$((port + 10))
run=(python3 -m kvloop.cli.main)

# UCX reaches the GPUs through libnvidia-ml. NVLink multicast stays off: it is not needed.
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/x86_64-linux-gnu; do
  if [ -e "$folder/libnvidia-ml.so.1" ]; then
    export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    break
  fi
done
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1

python3 "$here/shape.py" "$shape" "$work/model" || exit 1
vocabulary=$(python3 -c "import json, sys; print(json.load(open(sys.argv[1]))['vocab_size'])" "$shape/config.json")
cache=false
[ "$what" = hot ] || [ "$what" = load ] && cache=true
traced() { [ -n "${TRACE:-}" ] && echo "trace_file: $out/$1.jsonl"; }
gpus=${GPUS:-0,1}
case $gpus in
  *:*) of_prefill=${gpus%:*} of_decode=${gpus#*:} ;;
  *) of_prefill=${gpus%,*} of_decode=${gpus#*,} ;;
esac
{ echo "visible_devices: \"$of_prefill\""; echo "enable_prefix_caching: $cache"; traced trace-prefill; } >"$work/prefill.yaml"
{ echo "visible_devices: \"$of_decode\""; traced trace-decode; } >"$work/decode.yaml"
# The legs' ways, whatever is the cheapest here; DIRECT has a router of its own.
{ echo "max_attempts: 2"; [ "$what" = load ] || printf 'direct: false\nby_cost: false\n'; traced trace-router; } >"$work/router.yaml"
graphs='{"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 128, 192, 256, 512]}'
arguments=$(python3 -c 'import json, sys; print(json.dumps({"load_format": "dummy",
  "compilation_config": json.loads(sys.argv[1])} | json.loads(sys.argv[2])))' "$graphs" "${MORE_ARGS:-{\}}") || exit 1
engine=(--model "$work/model" --served-model-name "$(basename "$shape")" --device cuda --dtype bfloat16
  --max-num-seqs "${MAX_SEQS:-16}" --extra-engine-args "$arguments")
if [ -n "${DRY:-}" ]; then
  engine=(--engine simulated --model qwen3-32b-h200) vocabulary=32000
  sed -i /visible_devices/d "$work/prefill.yaml" "$work/decode.yaml"
fi
"${run[@]}" up --listen "127.0.0.1:$port" --logs "$work/logs" \
  --prefill-config "$work/prefill.yaml" --decode-config "$work/decode.yaml" \
  --router-config "$work/router.yaml" --gateways 0 \
  --block-size "${BLOCK_SIZE:-128}" --max-model-len "${MAX_MODEL_LEN:-32768}" "${engine[@]}" ${UP_ARGS:-} \
  >"$out/up.log" 2>&1 &
up=$! second=
finish() {
  [ -n "$second" ] && kill "$second" 2>/dev/null
  kill "$up" 2>/dev/null
  wait
  # The routers' settings hold the fleet's secret; they stay behind.
  cp "$work"/logs/*.log "$work"/logs/prefill-0.yaml "$work"/logs/decode-0.yaml "$out"/ 2>/dev/null
  rm -rf "$work"
}
trap finish EXIT

until [ -e "$work/logs/router-0.ready" ]; do
  if ! kill -0 "$up" 2>/dev/null; then
    cat "$out/up.log"
    exit 1
  fi
  sleep 0.5
done
echo "the fleet is up after $SECONDS s"

python3 - "$work/logs" "$direct" >"$work/direct.yaml" <<'P'
import pathlib, sys, yaml
values = yaml.safe_load((pathlib.Path(sys.argv[1]) / "router-0.yaml").read_text())
values |= {"listen": sys.argv[2], "direct": True}
if "trace_file" in values:
    values["trace_file"] = values["trace_file"].replace("trace-router", "trace-router-direct")
print(yaml.safe_dump(values))
P
"${run[@]}" serve router --config "$work/direct.yaml" --ready-file "$work/direct.ready" >"$work/logs/router-direct.log" 2>&1 &
second=$!
until [ -e "$work/direct.ready" ]; do
  kill -0 "$second" 2>/dev/null || exit 1
  sleep 0.1
done
endpoint() { python3 -c "import json, sys; print(json.load(open(sys.argv[1]))['endpoint'])" "$work/logs/$1.ready"; }

code=0
for step in ${what//,/ }; do
case $step in
  smoke)
    "${run[@]}" doctor --config "$work/logs/router-0.yaml" --router "$router" >"$out/doctor.txt" 2>&1
    python3 "$here/smoke.py" "$router" "$direct" "$(endpoint prefill-0)" "$(endpoint decode-0)" \
      "$vocabulary" "$out/smoke.json"
    ;;
  sweep)
    # Interrupted, it keeps what was measured.
    timeout -s INT "${SECONDS_AT_MOST:-400}" "${run[@]}" bench sweep \
      --router "$router" --router-direct "$direct" --vocabulary "$vocabulary" \
      --prefill-worker "$(endpoint prefill-0)" --legs off-cold,readback,direct --out "$out" "$@"
    ;;
  hot)
    timeout -s INT "${SECONDS_AT_MOST:-400}" "${run[@]}" bench sweep \
      --router-hot "$router" --vocabulary "$vocabulary" --prefill-worker "$(endpoint prefill-0)" \
      --legs off-hot --out "$out" "$@"
    ;;
  load)
    # The same sessions of other tokens: neither finds the other's in a cache. One name, for kvloop bench compare.
    python3 "$here/watch.py" "$(endpoint prefill-0)" "$(endpoint decode-0)" "$out/pools.jsonl" &
    watching=$!
    for leg in off:--no-reuse on:--reuse; do
      timeout -s INT "${SECONDS_AT_MOST:-150}" "${run[@]}" bench load agentic --router "$router" --name load \
        "${leg#*:}" --vocabulary "$((vocabulary -= 1))" --out "$out/load-${leg%:*}" "$@"
    done
    kill "$watching"
    ;;
  streams)
    python3 "$here/streams.py" "$router" "$direct" "$vocabulary" "$out/streams.json"
    ;;
esac
ended=$?
[ $ended = 0 ] || code=$ended
echo "$step ended with $ended after $SECONDS s"
done
exit $code
