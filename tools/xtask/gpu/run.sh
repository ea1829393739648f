#!/usr/bin/env bash
# The proof on this machine's GPU: tests, sanitizers, times beside a copy and beside other
# implementations, and steps of the Python package. Needs the CUDA driver and what any Linux has;
# compute-sanitizer, nvcc and a python3 with torch add the parts that need them, and a part that is
# not run is named.
#
# usage: run.sh [--small] [--out DIR] [--seconds N] [--only PART[,PART...]]
#   --small      quick tests and scaled-down sets: a trial of this script where the device is slow
#   --out DIR    where results.json, table.md and log.txt go; default: the folder results below the current one
#   --seconds N  time for everything together; default: 520. Parts share it, and each is stopped at its end
#   --only PARTS some of kernels,tests,times,others,python,offload,sanitizers; default: all
#
# Status 0: tests, bits, sanitizers and the checks of the times passed, or could not be run and are named;
# 1: one failed or was stopped; 2: nothing could be run.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
small=0 out=$PWD/results total=520 all=kernels,tests,times,others,python,offload,sanitizers
only=$all
while [ $# -gt 0 ]; do
  case $1 in
    --small) small=1 ;;
    --out) out=${2:?--out: expected a folder, found nothing}; shift ;;
    --seconds) total=${2:?--seconds: expected a number, found nothing}; shift ;;
    --only) only=${2:?--only: expected parts, found nothing}; shift ;;
    *) echo "error: expected --small, --out DIR, --seconds N or --only PARTS, found $1" >&2; exit 2 ;;
  esac
  shift
done
case $total in ''|*[!0-9]*) echo "error: --seconds: expected a whole number, found $total" >&2; exit 2 ;; esac
for part in ${only//,/ }; do
  case ,$all, in
    *,"$part",*) ;;
    *) echo "error: --only: expected some of $all, found $part" >&2; exit 2 ;;
  esac
done
asked() { case ,$only, in *,"$1",*) ;; *) return 1 ;; esac }
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
log=$out/log.txt
: >"$log" || exit 2

# What the driver compiles from PTX is kept for the programs that follow, wherever the home folder
# lies.
export CUDA_CACHE_PATH=$work/cache CUDA_CACHE_MAXSIZE=4294967296
# Small enough for every sanitizer, and still every rule, with tables in arguments, resident and as
# a graph.
quick=(a_graph_replays_the_whole_tail_with_the_bits_of_plain_steps)
# Kernels broken on purpose are sources for the emulated driver's compiler.
skips=(--skip mutants)

left() { echo $((total - SECONDS)); }
least() { [ "$1" -lt "$2" ] && echo "$1" || echo "$2"; }
# Runs a command for at most so many seconds, its output to the log.
limited() {
  local seconds=$1
  shift
  [ "$seconds" -ge 1 ] || return 124
  echo "== $* (at most $seconds s)" >>"$log"
  timeout -k 5 "$seconds" "$@" >>"$log" 2>&1
}
quoted() {
  local text=$1
  text=${text//\\/\\\\} text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\t'/ }
  printf '"%s"' "$text"
}
joined() { local IFS=,; echo "$*"; }
program() { echo "$work/bin/$1"; }
say() { echo "[$SECONDS s] $*"; }

failed=() not_run=()
status_of() {
  case $1 in
    0) echo passed ;;
    124 | 137) echo "stopped after its time" ;;
    *) echo "failed with status $1" ;;
  esac
}

unpack() {
  mkdir "$work/bin" || exit 2
  if command -v xz >/dev/null; then
    xz -dc "$here/bin.tar.xz"
  else
    python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' \
      "$here/bin.tar.xz"
  fi | tar -x -f - -C "$work/bin" || exit 2
  if ! "$(program device)" --list >>"$log" 2>&1; then
    echo "error: the programs do not start here: $(tail -n 1 "$log")" >&2
    echo "they need the CUDA driver (libcuda.so.1, in LD_LIBRARY_PATH if it lies apart), and $(cat "$here/NEEDS")" >&2
    exit 2
  fi
}

# A step of every kernel from machine code, where there is some for this device, and from PTX, which
# the driver compiles entry by entry.
run_kernels() {
  say "one step of every kernel, as loaded here, and from PTX"
  local begun=$SECONDS status
  limited "$(least "$(left)" 75)" "$(program device)" --warm all
  status=$?
  warm_seconds=$((SECONDS - begun))
  [ $status -eq 0 ] || failed+=("loading the kernels $(status_of $status)")
  begun=$SECONDS
  CUDA_FORCE_PTX_JIT=1 limited "$(least "$(left)" 75)" "$(program device)" --warm all
  status=$?
  warm_ptx_seconds=$((SECONDS - begun))
  [ $status -eq 0 ] || failed+=("loading the kernels from PTX $(status_of $status)")
}

suites=()
run_tests() {
  local name status begun result forced end=$((SECONDS + $(least "$(left)" 170)))
  for name in $(cd "$work/bin" && ls) resident-from-ptx; do
    [ "$name" = device ] && continue
    local filter=("${skips[@]}")
    forced=${CUDA_FORCE_PTX_JIT:-0}
    # Devices that there is machine code for run PTX nowhere else.
    [ "$name" = resident-from-ptx ] && filter=(--exact "${quick[@]}") forced=1
    if [ $small -eq 1 ]; then
      case $name in
        resident) filter=(--exact "${quick[@]}") ;;
        emulated | normed | laws) continue ;;
        faults) filter=(refused) ;;
      esac
    fi
    say "tests: $name"
    begun=$SECONDS
    local before
    before=$(wc -l <"$log")
    CUDA_FORCE_PTX_JIT=$forced limited $((end - SECONDS)) "$(program "${name%-from-ptx}")" "${filter[@]}"
    status=$?
    result=$(tail -n "+$before" "$log" | grep '^test result' | tail -n 1)
    [ $status -eq 0 ] || failed+=("tests of $name: $(status_of $status)")
    # A program that ran nothing has shown nothing.
    case $result in *" 0 passed"*) [ "$name" = fusestep_cuda ] || failed+=("tests of $name: none was run") ;; esac
    suites+=("{\"program\":$(quoted "$name"),\"status\":$(quoted "$(status_of $status)"),\"seconds\":$((SECONDS - begun)),\"result\":$(quoted "$result")}")
    suite_rows+="| $name | $(status_of $status) | $((SECONDS - begun)) | $result |"$'\n'
  done
}

run_times() {
  local options=() status seconds
  # The other half is for the times of others and the sanitizers. No line is begun behind this; one
  # that was may end.
  seconds=$(($(left) - 30))
  asked others || asked sanitizers && seconds=$(($(left) / 2 - 30))
  seconds=$(least "$seconds" 230)
  [ "$seconds" -ge 1 ] || seconds=1
  [ $small -eq 1 ] && options=(--scale 4000 --steps 1 --rounds 1 --sets 10000x64,1000x1024,norm_1e9)
  say "times"
  limited $((seconds + 30)) "$(program device)" --shapes "$here/shapes" --seconds "$seconds" \
    --json "$work/device.json" --table "$work/device.md" ${options[@]+"${options[@]}"}
  status=$?
  [ $status -eq 0 ] || failed+=("times: $(status_of $status)")
}

run_others() {
  local options=() status seconds
  if ! command -v python3 >/dev/null; then
    not_run+=("times of others: there is no python3")
    return
  fi
  seconds=$(($(left) - 15))
  asked sanitizers && seconds=$(($(left) / 2 - 15))
  seconds=$(least "$seconds" 70)
  [ "$seconds" -ge 1 ] || seconds=1
  [ $small -eq 1 ] && options=(--scale 4000 --steps 1 --rounds 1)
  say "times of others"
  limited $((seconds + 15)) python3 "$here/device_torch.py" --shapes "$here/shapes" --seconds "$seconds" \
    --json "$work/torch.json" --table "$work/torch.md" ${options[@]+"${options[@]}"}
  status=$?
  case $status in
    0) ;;
    3) not_run+=("times of others: $(tail -n 1 "$log" | sed "s/^not run: //")") ;;
    # They are the yardstick, not what is to be proven.
    *) not_run+=("times of others, the rest of them: $(status_of $status)") ;;
  esac
}

# Unpacks the wheel, which is a zip file; nothing of the machine's Python is changed.
wheel() {
  [ -d "$work/package" ] || python3 -m zipfile -e "$here"/fusestep-*.whl "$work/package" >>"$log" 2>&1
}

# Models on the GPU whose optimizer is on the host: bits of masters on the device, and iterations
# beside others' offload.
run_offload() {
  local options=() status seconds
  if ! command -v python3 >/dev/null; then
    not_run+=("offload: there is no python3")
    return
  fi
  seconds=$(($(left) - 15))
  asked sanitizers && seconds=$(($(left) / 2 - 15))
  seconds=$(least "$seconds" 105)
  [ "$seconds" -ge 1 ] || seconds=1
  [ $small -eq 1 ] && options=(--layers 1 --width 64 --context 8 --rounds 1)
  say "offload"
  wheel
  PYTHONPATH=$work/package limited $((seconds + 15)) python3 "$here/device_offload.py" --seconds "$seconds" \
    --json "$work/offload.json" --table "$work/offload.md" ${options[@]+"${options[@]}"}
  status=$?
  case $status in
    0) ;;
    3) not_run+=("offload: $(tail -n 1 "$log" | sed "s/^not run: //")") ;;
    *) failed+=("offload: $(status_of $status)") ;;
  esac
}

# The Python package on PyTorch's own tensors: bits of the CPU, and times beside PyTorch's steps.
run_python() {
  local options=() status seconds package=$work/package
  if ! command -v python3 >/dev/null; then
    not_run+=("the Python package: there is no python3")
    return
  fi
  seconds=$(($(left) - 15))
  asked sanitizers && seconds=$(($(left) / 2 - 15))
  asked offload && seconds=$((seconds * 2 / 3))
  seconds=$(least "$seconds" 225)
  [ "$seconds" -ge 1 ] || seconds=1
  [ $small -eq 1 ] && options=(--scale 100 --rounds 1)
  say "the Python package"
  wheel
  PYTHONPATH=$package limited $((seconds + 15)) python3 "$here/device_python.py" --shapes "$here/shapes" \
    --seconds "$seconds" --json "$work/python.json" --table "$work/python.md" ${options[@]+"${options[@]}"}
  status=$?
  case $status in
    0) ;;
    3) not_run+=("the Python package: $(tail -n 1 "$log" | sed "s/^not run: //")") ;;
    *) failed+=("the Python package: $(status_of $status)") ;;
  esac
}

checked=()
run_sanitizers() {
  local tool sanitizer='' place status begun remaining=4 result
  for place in "$(command -v compute-sanitizer)" /usr/local/cuda/bin/compute-sanitizer /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
    [ -z "$sanitizer" ] && [ -n "$place" ] && [ -x "$place" ] && sanitizer=$place
  done
  for tool in memcheck racecheck initcheck synccheck; do
    if [ -z "$sanitizer" ]; then
      not_run+=("$tool: compute-sanitizer is neither on the PATH nor in /usr/local/cuda")
      sanitizer_rows+="| $tool | not run | | |"$'\n'
      continue
    fi
    say "sanitizer: $tool"
    begun=$SECONDS
    local before
    before=$(wc -l <"$log")
    # Calls that are refused on purpose are no errors of the kernels.
    limited $(($(left) / remaining)) "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 86 \
      "$(program resident)" --test-threads 1 --exact "${quick[@]}"
    status=$?
    remaining=$((remaining - 1))
    result=$(tail -n "+$before" "$log" | grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' | tail -n 1)
    [ $status -eq 0 ] || failed+=("$tool: $(status_of $status)")
    checked+=("{\"tool\":\"$tool\",\"status\":$(quoted "$(status_of $status)"),\"seconds\":$((SECONDS - begun)),\"result\":$(quoted "$result")}")
    sanitizer_rows+="| $tool | $(status_of $status) | $((SECONDS - begun)) | $result |"$'\n'
  done
}

content() { if [ -s "$1" ]; then cat "$1"; else echo null; fi; }
quoted_all() {
  local item items=()
  for item in "$@"; do items+=("$(quoted "$item")"); done
  [ $# -eq 0 ] || joined "${items[@]}"
}
report() {
  {
    echo "{\"date\":$(quoted "$(date -u +%Y-%m-%dT%H:%M:%SZ)"),\"gpu\":$(quoted "$gpu"),\"small\":$small,\"seconds\":$SECONDS,\"warm_seconds\":$warm_seconds,\"warm_ptx_seconds\":$warm_ptx_seconds,"
    echo "\"failed\":[$(quoted_all ${failed[@]+"${failed[@]}"})],\"not_run\":[$(quoted_all ${not_run[@]+"${not_run[@]}"})],"
    echo "\"suite\":[$(joined ${suites[@]+"${suites[@]}"})],\"sanitizer\":[$(joined ${checked[@]+"${checked[@]}"})],"
    echo "\"device\":$(content "$work/device.json"),\"others\":$(content "$work/torch.json"),\"python\":$(content "$work/python.json"),\"offload\":$(content "$work/offload.json")}"
  } >"$out/results.json"
  {
    printf '# %s, %s, %s s\n' "$gpu" "$(date -u +%Y-%m-%d)" "$SECONDS"
    [ $small -eq 0 ] || printf '\nA trial with small sets and few tests: it proves nothing about a device.\n'
    printf '\nEvery kernel loaded and run once: %s s, from PTX %s s\n' "$warm_seconds" "$warm_ptx_seconds"
    printf '\n| tests | status | s | result |\n|---|---|---|---|\n%s' "$suite_rows"
    printf '\n| sanitizer | status | s | result |\n|---|---|---|---|\n%s' "$sanitizer_rows"
    local table item
    for table in device torch python offload; do
      [ ! -s "$work/$table.md" ] || { echo; cat "$work/$table.md"; }
    done
    for item in ${not_run[@]+"${not_run[@]}"}; do printf '\nnot run: %s\n' "$item"; done
    for item in ${failed[@]+"${failed[@]}"}; do printf '\nFAILED: %s\n' "$item"; done
  } >"$out/table.md"
}

suite_rows='' sanitizer_rows='' warm_seconds=0 warm_ptx_seconds=0
unpack
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
gpu=${gpu:-a device without nvidia-smi}
for part in ${all//,/ }; do
  if asked "$part"; then "run_$part"; else not_run+=("$part: not asked for"); fi
done
report
cat "$out/table.md"
echo "written: $out/results.json, $out/table.md, $out/log.txt"
[ ${#failed[@]} -eq 0 ]
