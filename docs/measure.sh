#!/usr/bin/env bash
# measure.sh PART...: what needs a GPU, part by part: the GPU tests and the runs that figures in docs/ are from.
#
# In an environment made with pip install -e ".[all]" (README, "In vLLM"). Runs and tables go to
# $OUT (default runs/docs). The seconds are those of one H200, with ~ an estimate; an engine takes 70 to 90 to start.
#
#   tests          the kernels and their baselines, compiled                           90 s
#   tests-vllm     the plugin, whole engines, the profiler                           ~200 s
#   verify         README's accuracy table                                             30 s
#   attention      docs/h200.md: spreads, layouts, sizes                             ~150 s
#   rows           docs/h200.md: time against rows, 8 to 4,096                        ~60 s
#   layer          docs/h200.md: the stages of a layer                                ~30 s
#   table6         docs/table6.md and its figures: three launches of every arm        290 s
#   e2e            whole steps, the shapes of the paper's Table 3                    ~430 s
#   e2e-batch1     whole steps, a batch of one, 2k to 64k                            ~240 s
#   e2e-qwen       whole steps, Qwen3-4B                                             ~670 s
#   e2e-coverage   whole steps, FA3 and FlashInfer on Moira's lists                  ~350 s
#   profile        the stages under the profiler                                      ~60 s
#   profile-e2e    whole steps under the profiler                                    ~350 s
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs/docs}
mkdir -p "$out"
export MOIRA_BENCH_KERNEL_MIN_TIME_MS=60

moira() { python -m moira_cli.main "$@"; }
tests() { python -m pytest -q "$@"; }
run() { # run NAME "COMMAND" OPTION...: into the folder NAME; a folder that is there is finished, not begun again
  local folder=$out/$1 command=$2
  shift 2
  if [ -d "$folder" ]; then
    set -- --resume "$folder"
  else
    set -- "$@" --run-dir "$folder"
  fi
  moira $command "$@" --progress plain
}
steps() { # steps NAME OPTION...: whole steps in vLLM
  run "$1" "bench e2e" --arms dense-fa3,moira --launches 1 --repetitions 3 --tokens 128 "${@:2}"
}

for part; do
  echo "== $part"
  case $part in
    tests)
      tests tests/test_{attention,merge,selection,estimate,summary,pipeline,verify,timing,baselines_gpu,bench_layer}.py
      ;;
    tests-vllm)
      tests tests/test_vllm_steps.py tests/test_vllm_gpu.py tests/test_serving_gpu.py
      tests -m gpu tests/test_profile.py tests/test_profile_e2e.py
      ;;
    verify)
      moira verify | tee "$out/verify.txt"
      ;;
    attention)
      run attention "bench kernel" --shape 8kx32,32kx16,64kx8,131kx4,8kx4,8kx128,2kx512 --cv 0,0.5,1,1.2 \
        --kv-layout nhd,hnd --arms moira,moira-eq4
      run one-long "bench kernel" --shape 131kx8 --lists one-long --arms moira,moira-eq4,fa3-varlen
      ;;
    rows)
      run rows "bench kernel" --shape 8kx1,8kx2,8kx4,8kx8,8kx16,8kx32,8kx64,8kx128,8kx256,8kx512 --cv 1 \
        --arms moira,moira-eq4
      moira report "$out/rows" --format png
      ;;
    layer)
      moira bench layer --shape 2kx1,8kx32,8191x32,130kx4 | tee "$out/layer.txt"
      ;;
    table6)
      run table6 compare --suite table6 --skip sparse-torch,dense-torch
      moira report "$out/table6" --format md | tee "$out/table6.md"
      moira report "$out/table6" --format png
      ;;
    e2e) steps e2e --suite table3 ;;
    e2e-batch1) steps e2e-batch1 --suite batch1 ;;
    e2e-qwen) steps e2e-qwen --model qwen3-4b --suite paper ;;
    e2e-coverage)
      steps e2e-coverage --shape 130kx4 --kv-layout hnd --arms dense-fa3,moira,fa3-coverage,flashinfer-coverage
      ;;
    profile)
      moira profile --torch --run-dir "$out/profile" kernel --shape 8kx32,32kx16,130kx4 \
        --arms moira-layer,moira,dense-fa3
      moira profile --torch --run-dir "$out/profile-all" kernel --shape 8kx32 --arms all
      moira profile --ncu --run-dir "$out/profile-ncu" kernel --shape 32kx16 --arms moira
      ;;
    profile-e2e)
      moira profile --torch --run-dir "$out/profile-e2e" e2e --shape 32kx16,130kx4 --arms dense-fa3,moira \
        --repetitions 2
      ;;
    *)
      echo "measure.sh: no part '$part'; the parts are in the first lines of this file" >&2
      exit 2
      ;;
  esac
done
