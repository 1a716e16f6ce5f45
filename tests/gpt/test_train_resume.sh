#!/bin/sh
# A run that is killed at random moments, again and again, ends with the same losses and the same checkpoint, to the
# bit, as one that is left alone. TRAIN is flashback-train.
set -u
KILLS=50
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
OMP_NUM_THREADS=1
OPENBLAS_NUM_THREADS=1
export OMP_NUM_THREADS OPENBLAS_NUM_THREADS

fail() {
    echo "FAILED: $1" >&2
    exit 1
}

# A small model of all that a layer may have. In a subshell: the program takes its place, so that a kill meets it.
train() {
    exec "$TRAIN" --text README.md --text docs --layers 2 --width 32 --heads 2 --heads-kv 1 --head-dim 16 --window 8 --sinks \
        --softcap 20 --untied --context 32 --batch 2 --accumulate 2 --steps 700 --save-every 3 --held-out-every 50 \
        --held-out-batches 1 --sample 0 --plot none --threads 1 --quiet "$@"
}

# What a log says of the losses.
losses() {
    sed 's/,"tokens_per_s".*/}/' "$1/log.jsonl"
}

# A number from 0 to 255.
random() {
    od -An -N1 -tu1 /dev/urandom | tr -d ' '
}

(train --out "$folder/whole") >"$folder/said" 2>&1 || fail "the run that is left alone: $(cat "$folder/said")"

# What the log's last line says of steps; 0 if there is none.
last_step() {
    step=$(tail -n 1 "$folder/parts/log.jsonl" 2>/dev/null | sed -n 's/^{"step":\([0-9]*\).*/\1/p')
    echo "${step:-0}"
}

# A run of one step takes a while to begin: kills come from then on.
start=$(date +%s%N)
(train --out "$folder/one" --steps 1) >"$folder/said" 2>&1 || fail "a run of one step: $(cat "$folder/said")"
begin=$((($(date +%s%N) - start) / 1000000))

killed=0
amid=0
resume=""
while [ $killed -lt $KILLS ]; do
    [ -e "$folder/parts/checkpoint.safetensors" ] && resume=--resume
    before=$(last_step)
    # shellcheck disable=SC2086 # empty, or one word
    train --out "$folder/parts" $resume >"$folder/said" 2>&1 &
    child=$!
    milliseconds=$((begin * $(random) / 128))
    sleep "$((milliseconds / 1000)).$(printf %03d $((milliseconds % 1000)))"
    kill -9 $child 2>/dev/null
    wait $child 2>/dev/null
    [ "$(last_step)" -gt "$before" ] && [ "$(last_step)" -lt 700 ] && amid=$((amid + 1))
    killed=$((killed + 1))
    # One that has ended begins anew: it has nothing left to be killed in.
    if [ "$(last_step)" -ge 700 ]; then
        rm -rf "$folder/parts"
        resume=""
    fi
done
[ $amid -ge 10 ] || fail "only $amid of $KILLS kills met a run between its first step and its last"
[ -e "$folder/parts/checkpoint.safetensors" ] && resume=--resume
# shellcheck disable=SC2086
(train --out "$folder/parts" $resume) >"$folder/said" 2>&1 || fail "the last part: $(cat "$folder/said")"
[ "$(find "$folder/parts" -name 'checkpoint*' | wc -l)" -eq 1 ] || fail "half checkpoints were left behind"

cmp "$folder/whole/checkpoint.safetensors" "$folder/parts/checkpoint.safetensors" || fail "the checkpoints differ"
losses "$folder/whole" >"$folder/a"
losses "$folder/parts" >"$folder/b"
cmp "$folder/a" "$folder/b" || fail "the losses differ"
[ "$(wc -l <"$folder/a")" -ge 700 ] || fail "the log lacks steps"
echo "killed $KILLS times, $amid of them amid steps; checkpoint and losses are those of the run that was left alone"
