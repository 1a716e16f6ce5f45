# --help and --version of the program and of every verb; wrong usage gives exit code 2 and says what is wrong.
. "$(dirname "$0")/common.sh"

expect 0 --help
for verb in run check bench explain warm info; do
    has out "$verb"
done
expect 0 --version
grep -qE '^flashback [0-9]+\.[0-9]+\.[0-9]+$' out || fail "--version prints something else"
cp out version
for verb in run check bench explain warm info; do
    expect 0 $verb --help
    has out "flashback $verb"
    expect 0 $verb --version
    cmp -s out version || fail "$verb --version differs from --version"
    expect 2 $verb --no-such-option
    [ -s err ] || fail "$verb --no-such-option says nothing"
done

expect 2
has err "Usage"
expect 2 fly
has err "'fly' is not a verb"
expect 2 run
has err "which file"
expect 2 run x.txt
has err ".safetensors"
expect 2 run --q q.npy x.safetensors
has err "not both"
expect 2 run a.safetensors b.safetensors -o out.safetensors
has err "--output"
expect 2 run a.safetensors -o out.txt
has err "out.txt"
expect 2 run a.safetensors --json --table
expect 2 run a.safetensors --repeat 0
has err "--repeat is '0'"
expect 2 run a.safetensors --block 16,17
has err "multiples of 16"
for option in "--dtype f8" "--window 3" "--window 3,-1" "--scale nan" "--scale 1e999" "--softcap -1" \
    "--route fast" "--threads 0" "--layout hbld" "--position-offset x"; do
    expect 2 explain --shape 1,1,1,1,1,8 $option
    has err "${option%% *} is '${option#* }'"
done
expect 2 explain
has err "--shape"
expect 2 explain --shape 1,2,3
has err "--shape is '1,2,3'"
expect 2 explain --shape 1,1,1,1,1,8 --causal --window 3,2
has err "--causal"
expect 2 explain --shape 1,1,1,1,1,8 --with magic
has err "'magic'"
expect 2 bench --set nothing
has err "--set is 'nothing'"
expect 2 bench --set quick --shape 1,1,1,1,1,8
expect 2 bench --format xml
has err "--format is 'xml'"
expect 2 bench --pass up
expect 2 bench --mask dense --causal
expect 2 bench --set original --pass fwd
expect 2 bench --regime both
has err "--regime is about NVIDIA GPUs"
expect 2 bench --no-costs
has err "--no-costs is about NVIDIA GPUs"
expect 2 bench --regime slow
has err "--regime is 'slow'"
expect 2 bench --device cuda --regime burst --min-time 1
has err "exclude each other"
for verb in "explain --shape 1,1,1,1,1,8" bench "warm --dim 64" "run x.safetensors"; do
    expect 2 $verb --device gpu
    has err "--device is 'gpu'"
    expect 2 $verb --device cuda --index -1
    has err "--index is '-1'"
done
for verb in "explain --shape 1,1,1,1,1,8" bench; do
    expect 2 $verb --index 1
    has err "--index 1 needs --device"
    expect 2 $verb --device cuda --threads 2
    has err "--threads is about the CPU"
done
expect 2 check --index 1
has err "--index needs --device"
expect 2 warm
has err "--dim D"
expect 2 warm --dim 64 --set quick
has err "--set excludes"
expect 2 warm --dim x
has err "--dim is 'x'"
expect 2 warm --set nothing
has err "--set is 'nothing'"
expect 2 warm --dim 64 --device cpu
has err "compiled already"
expect 2 warm --dim 64 --with magic
has err "'magic'"
expect 2 warm --dim 64 extra
has err "'extra'"
expect 2 bench --plot picture.jpg
has err ".svg or .png"
expect 2 info extra
has err "'extra'"
