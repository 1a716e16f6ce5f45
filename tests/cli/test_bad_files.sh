# Files that are wrong: exit code 3, and a sentence that names file and field. Nothing is written.
. "$(dirname "$0")/common.sh"
python3 "$here/make.py" . || exit 1

tab=$(printf '\t')
while IFS="$tab" read -r file words; do
    expect 3 run "$file" -o out.safetensors
    has err "$file"
    has err "$words"
    [ "$(wc -l <err)" = 1 ] || fail "$file: more than one sentence"
    [ -e out.safetensors ] && fail "$file: an output was written"
done <bad.txt
[ "$(wc -l <bad.txt)" -ge 25 ] || fail "bad.txt lost its rows"

expect 3 run no-such-file.safetensors
has err "no-such-file.safetensors"
mkdir folder.safetensors
expect 3 run folder.safetensors
has err "not a regular file"
expect 3 run --q bad_npy.npy --k k.npy --v v.npy
has err "bad_npy.npy: shape [1,2,5,8] of <f4 takes 320 bytes, but the file has 319"
expect 3 run --q q.npy --k k.npy
has err "v is missing"
expect 3 run --q f32.safetensors --k k.npy --v v.npy
has err "magic"
