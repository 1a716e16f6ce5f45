# Tensors from files, through the library, to files: values against Python's own arithmetic, in every dtype,
# rank, layout and with every option; all agree with the definition in float64.
. "$(dirname "$0")/common.sh"
python3 "$here/make.py" . || exit 1

for name in f32 f16 bf16 f64 forward flat three window blhd everything swapped packed blocks; do
    expect 0 run $name.safetensors --verify --json -o out_$name.safetensors
    cp out out_$name.json
done
python3 "$here/compare.py" . >out 2>err || fail "results differ from Python's"

# Routes, threads and dtypes by flag; a flag wins over the metadata.
for route in reference unfused fused; do
    expect 0 run f32.safetensors --route $route --threads 1 --verify
    has out "route $route"
done
expect 0 run f32.safetensors --dtype f64 --verify
has out "f64"
expect 0 run f32.safetensors --forward-only
grep -q backward out && fail "--forward-only ran a backward"
expect 0 run f32.safetensors --window none,none --scale 1 -o dense.safetensors
cmp -s dense.safetensors out_f32.safetensors && fail "--window none,none changes nothing"
for option in "--causal" "--window none,0"; do
    expect 0 run right.safetensors $option -o right_causal.safetensors
    cmp right_causal.safetensors out_f32.safetensors >out 2>err || fail "$option loses to window_right"
done
expect 4 run blocks.safetensors --route vector
has err "vector"

# Tables and words.
expect 0 run f32.safetensors flat.safetensors --table
[ "$(wc -l <out)" = 3 ] || fail "a table of two files has three lines"
has out "unfused extra"
has out "1x2/1x5x7x8"
expect 0 run f32.safetensors --repeat 3
has out "forward"

# .npy in and out.
expect 0 run --q q.npy --k k.npy --v v.npy --dout dout.npy --causal --scale 0.5 -o arrays/
expect 0 run f32.safetensors -o same/
for name in out lse dq dk dv; do
    cmp arrays/$name.npy same/$name.npy >out 2>err || fail "$name.npy differs between the two kinds of input"
done
expect 5 run bf16.safetensors -o arrays/
has err "npy has no bf16"
expect 5 run f32.safetensors -o missing/folder/x.safetensors
has err "cannot be written"
mkdir -p taken/out.npy
expect 5 run f32.safetensors -o taken
[ -z "$(find . -name '*.safetensors.*' -o -name '*.npy.*')" ] || fail "temporary files are left"
