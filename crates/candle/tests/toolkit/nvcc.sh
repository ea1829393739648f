#!/bin/sh
# What stands for a compiler where candle's kernels are not run: files without code.
case "$1" in
--version) printf 'nvcc: stand-in\n\n\nCuda compilation tools, release 12.4, V12.4.0\n'; exit;;
--list-gpu-code) echo sm_90; exit;;
esac
out= folder= mode=object
while [ $# -gt 0 ]; do
  case "$1" in
    -o) out=$2; shift;;
    --output-directory) folder=$2; mode=ptx; shift;;
    --lib) mode=lib;;
    *.cu) source=$1;;
  esac
  shift
done
case $mode in
  ptx) name=$(basename "$source" .cu); : > "$folder/$name.ptx";;
  lib) rm -f "$out"; ar rc "$out";;
  object) : > "$out";;
esac
