#!/bin/sh
# What goes wrong around a run is one clear sentence and an exit code, and the last good checkpoint stays. TRAIN is
# flashback-train.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
    echo "FAILED: $1" >&2
    exit 1
}

# In a subshell: the program takes its place, so that a signal meets it.
train() {
    exec "$TRAIN" --layers 1 --width 32 --heads 2 --heads-kv 1 --head-dim 16 --context 32 --batch 2 --held-out-batches 1 \
        --sample 0 --plot none --quiet --out "$folder/none" "$@"
}

# refused CODE WORDS OPTION...: one sentence with those words, and that exit code.
refused() {
    code=$1 words=$2
    shift 2
    (train "$@") >"$folder/out" 2>"$folder/said"
    got=$?
    [ $got -eq "$code" ] || fail "$*: exit code $got, expected $code: $(cat "$folder/said")"
    [ "$(wc -l <"$folder/said")" -eq 1 ] || fail "$*: not one line: $(cat "$folder/said")"
    grep -q "^flashback-train: .*$words" "$folder/said" || fail "$*: no '$words' in: $(cat "$folder/said")"
}

: >"$folder/empty.txt"
head -c 100 README.md >"$folder/short.txt"
out="--out $folder/run"
refused 3 "nowhere.txt" --text "$folder/nowhere.txt"
refused 3 "empty" --text "$folder/empty.txt"
refused 3 "context" --text "$folder/short.txt" --context 4096
refused 2 "layers" --layers 0
refused 2 "rate" --rate fast
refused 2 "attention" --attention flash
refused 4 "heads" --heads 3 --heads-kv 2 --text README.md $out
refused 3 "checkpoint.safetensors" --resume --text README.md $out
refused 5 "/dev/null/run" --text README.md --out /dev/null/run

(train --text README.md $out --steps 5) >"$folder/said" 2>&1 || fail "a run of 5 steps: $(cat "$folder/said")"
file=$folder/run/checkpoint.safetensors
cp "$file" "$folder/good"
refused 2 "steps" --resume --text README.md $out --steps 5
refused 2 "already" --text README.md $out --steps 5
refused 2 "context" --resume --text README.md $out --steps 10 --context 64
refused 2 "seed" --resume --text README.md $out --steps 10 --seed 9
refused 2 "exclude" --resume --overwrite --text README.md $out
refused 2 "plot" --text README.md --out "$folder/other" --plot loss.pdf
refused 2 "empty" --text README.md --out ""
cmp "$folder/good" "$file" || fail "what was refused changed the checkpoint"

# The disk is full: files may have 20 blocks.
(
    ulimit -f 20
    refused 5 "checkpoint.safetensors" --resume --text README.md $out --steps 10
) || exit 1
cmp "$folder/good" "$file" || fail "a full disk changed the checkpoint"
[ "$(find "$folder/run" -name 'checkpoint*' | wc -l)" -eq 1 ] || fail "a full disk left a half checkpoint"

# A corrupt one is refused and stays as it is; the repaired one goes on.
head -c 5000 "$folder/good" >"$file"
cp "$file" "$folder/bad"
refused 3 "checkpoint.safetensors" --resume --text README.md $out --steps 10
cmp "$folder/bad" "$file" || fail "a corrupt checkpoint was changed"
cp "$folder/good" "$file"
(train --text README.md $out --resume --steps 10) >"$folder/said" 2>&1 || fail "to go on: $(cat "$folder/said")"

# A signal ends the run after a step, with a checkpoint.
train --text README.md --out "$folder/signal" --steps 1000000 >"$folder/said" 2>&1 &
child=$!
sleep 1
kill -INT $child
wait $child
[ $? -eq 130 ] || fail "a run that was interrupted: $(cat "$folder/said")"
grep -q "interrupted at step" "$folder/said" || fail "nothing is said of the interrupt: $(cat "$folder/said")"
[ -s "$folder/signal/checkpoint.safetensors" ] || fail "an interrupt left no checkpoint"
# Options that would do nothing.
for option in "--dtype bf16" --resume "--steps 7" "--out $folder/x"; do
    # shellcheck disable=SC2086 # a list of words
    "$TRAIN" --compare $option >"$folder/out" 2>"$folder/said"
    [ $? -eq 2 ] || fail "--compare $option: $(cat "$folder/said")"
done
echo "all refusals are as they should be"
