#!/usr/bin/env bash
# The first half hour on a GPU, in order: `bash benchmarks/gpu_first_hour.sh [FOLDER]`.
#
# Each step takes at most ten minutes and leaves FOLDER/NAME.log and FOLDER/NAME.json (benchmarks/results/gpu unless given).
# A step that has succeeded is not run again, so a session that was cut off goes on where it was. DRY=1 only lists them.
# PYTHON is the interpreter (.venv/bin/python, else python).
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
mkdir -p "$out"
failed=0

# step NAME MINUTES COMMAND…: what it printed goes to NAME.log; NAME.json says how it ended, and has its figures where the
# command did not write that file itself.
step() {
    local name=$1 minutes=$2
    shift 2
    if [ -n "${DRY:-}" ]; then
        echo "$name ($minutes min): $*"
        return
    fi
    if [ -f "$out/$name.done" ]; then
        echo "$name: done before"
        return
    fi
    echo "$name: at most $minutes minutes: $*"
    local start=$SECONDS status=0
    timeout --kill-after=20 "${minutes}m" "$@" >"$out/$name.log" 2>&1 || status=$?
    "$python" - "$out/$name" "$status" "$((SECONDS - start))" "$*" <<'PY'
import json, pathlib, sys
name, status, seconds, command = sys.argv[1:]
file = pathlib.Path(name + ".json")
report = json.loads(file.read_text("utf-8")) if file.exists() else {"log": pathlib.Path(name + ".log").read_text("utf-8", "replace")[-20000:]}
file.write_text(json.dumps({"command": command, "status": int(status), "seconds": int(seconds), "report": report.get("report", report)}, indent=1) + "\n", "utf-8")
PY
    if [ "$status" = 0 ]; then
        touch "$out/$name.done"
    else
        failed=1
        echo "$name: exit status $status after $((SECONDS - start)) s; the end of $out/$name.log:"
        tail -n 5 "$out/$name.log"
    fi
}

if [ -z "${DRY:-}" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: $python sees no GPU: install a CUDA build of torch, or name another interpreter in PYTHON" >&2
    exit 2
fi

engine=("$python" benchmarks/engine.py --device cuda --roofline)
step tests-kernels 8 "$python" -m pytest -q -m gpu tests/kernels -p no:cacheprovider
step tests-engine 8 "$python" -m pytest -q -m gpu tests --ignore=tests/kernels -p no:cacheprovider
step kernels 8 "$python" benchmarks/kernels.py --output "$out/kernels.json"
step llada-8b 9 "${engine[@]}" --shape llada-8b --graphs both --batch 1 8 64 --output "$out/llada-8b.json"
step sdar-4b 9 "${engine[@]}" --shape sdar-4b --graphs both --batch 1 64 128 --output "$out/sdar-4b.json"
step llada2-mini 9 "${engine[@]}" --shape llada2-mini --graphs both --batch 1 64 128 --output "$out/llada2-mini.json"
step dream-7b 9 "${engine[@]}" --shape dream-7b --graphs both --batch 1 8 64 --output "$out/dream-7b.json"
step waits 5 "${engine[@]}" --shape tiny --graphs off --batch 8 --sync-debug warn --output "$out/waits.json"
step host 4 "$python" benchmarks/host.py --output "$out/host.json"
step profile 5 "$python" benchmarks/profiled.py --shape llada-8b --output "$out/profile.json"
step train 9 "$python" benchmarks/train.py --shape large --precision bf16 --only ours-adamw-compiled --rounds 1 --output "$out/train.json"
if command -v compute-sanitizer >/dev/null || [ -n "${DRY:-}" ]; then
    step sanitizer 9 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -m gpu tests/kernels -k "rotation or captured or mixture or gate" -p no:cacheprovider
fi
exit $failed
