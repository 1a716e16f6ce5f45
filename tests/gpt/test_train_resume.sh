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

killed=0
while [ $killed -lt $KILLS ]; do
    resume=""
    [ -e "$folder/parts/checkpoint.safetensors" ] && resume=--resume
    train --out "$folder/parts" $resume >"$folder/said" 2>&1 &
    child=$!
    sleep "0.$(printf %03d "$(random)")"
    if ! kill -9 $child 2>/dev/null; then
        # It had ended by itself: well, or for a reason that is a fault.
        wait $child || fail "after $killed kills: $(cat "$folder/said")"
        echo "the run ended before it was killed $KILLS times; begun anew after $killed"
        cmp -s "$folder/whole/checkpoint.safetensors" "$folder/parts/checkpoint.safetensors" ||
            fail "after $killed kills the checkpoint differs"
        rm -rf "$folder/parts"
    else
        wait $child 2>/dev/null
    fi
    killed=$((killed + 1))
done
resume=""
[ -e "$folder/parts/checkpoint.safetensors" ] && resume=--resume
(train --out "$folder/parts" $resume) >"$folder/said" 2>&1 || fail "the last part: $(cat "$folder/said")"

cmp "$folder/whole/checkpoint.safetensors" "$folder/parts/checkpoint.safetensors" || fail "the checkpoints differ"
losses "$folder/whole" >"$folder/a"
losses "$folder/parts" >"$folder/b"
cmp "$folder/a" "$folder/b" || fail "the losses differ"
[ "$(wc -l <"$folder/a")" -ge 700 ] || fail "the log lacks steps"
echo "killed $KILLS times; checkpoint and losses are those of the run that was left alone"
