#!/usr/bin/env bash
# The tables of docs/results.md again: results.sh OUT [CASES [TABLE...]]. For each table OUT gets a results file, its
# text and a line of how long it took; a second call continues the first. CASES: of each task and length, with one seed,
# in place of each table's number. TABLE: only these; two calls with different tables may run in parallel.
# Environment; without a model its tables are left out:
#   SMOLLM2, GEMMA3   folders of SmolLM2-135M-Instruct and Gemma 3 270M
#   BOOKS, OTHERS     text to hide facts in, and other text, with which nothing was chosen (default: BOOKS)
#   TRAINING          text from which the table `gates` trains gates of SmolLM2
#   ADAPTER, GATES    folders of lookahead rows and of gates for SmolLM2 (default: OUT/adapter, OUT/gates); without them
#                     their policies are left out
set -euo pipefail
out=$1 cases=${2:-}
shift $(($# > 2 ? 2 : $#))
only=" $* "
mkdir -p "$out"
: "${SMOLLM2:=}" "${GEMMA3:=}" "${TRAINING:=}" "${BOOKS:=}" "${OTHERS:=$BOOKS}"
: "${ADAPTER:=$out/adapter}" "${GATES:=$out/gates}"

wanted() { # NAME
  [ "$only" = "  " ] || [[ $only == *" $1 "* ]] || return 1
  echo "== $1"
}

table() { # NAME CASES ARGUMENTS of `kvevict eval`
  local name=$1 own=$2 start=$SECONDS
  shift 2
  wanted "$name" || return 0
  # In one pass unless the table has chunks, a probe being the last tokens
  python -m kvevict eval --dtype float32 --mode known --chunk-size 0 --question last --cases "${cases:-$own}" \
    --out "$out/$name.jsonl" "$@" ${cases:+--seeds 0} >"$out/$name.txt"
  echo "$name $((SECONDS - start)) s" >>"$out/seconds.txt"
}

many() { # NAME CHUNKS POLICY... ARGUMENTS: a text read once, many questions; more of NAME's runs go to its file
  local name=$1 chunks=$2
  shift 2
  table "$name" 8 --tasks many --lengths 2000 --mode later --shares 1/8 1/4 1/2 \
    --chunk-size ${chunks//,/ } --policies "$@"
}

laq=laq:n_d=32,window=32,draft_keys=true # LookaheadKV's appendix F
presets="oracle snapkv adakv adakv:pool=avg pyramidkv cake laq $laq chunkkv chunkkv:n_reuse=2 edie edie-exact edie+tada"
presets+=" edie:pool=none,select=chunk,per_head=true paasvn vatp take take:append=false take+caote h2o tova streaming"
presets+=" knorm keydiff random"
all="$presets take+chunkkv take+edie take+edie:pool=max"
all+=" snapkv+caote snapkv+fastcaote h2o+caote h2o+fastcaote tova+caote tova+fastcaote"
chunks="take+edie take+edie:pool=max take take:warmup_layers=none take:append=false take+chunkkv snapkv:rows=probe"
chunks+=" edie:rows=probe edie+tada:own=true edie snapkv streaming oracle"
fidelity="take+edie take+edie:pool=max snapkv paasvn"
without=edie:rows=probe,heads=equal,kernel=31,pool=avg # take+edie without the first four tokens

# shellcheck disable=SC2086  # lists of policies
{
  table lookahead 12 --tasks needle facts keyvalue --lengths 512 1024 --budgets 64 128 256 \
    --policies snapkv take laq oracle lookahead
  for protocol in lookaheadkv chunkkv take edie caote; do
    table "protocol-$protocol" 16 --protocol $protocol --lengths 1024 --budgets 64
  done
  table perplexity 10 --tasks perplexity --lengths 1024 --budgets 64 --chunk-size 128 --policies h2o h2o:decode=False \
    h2o+caote h2o+fastcaote tova:per_head=True tova+caote snapkv:decode=True,interval=1 snapkv+caote streaming
  table chunks 10 --tasks facts keyvalue --policies $chunks --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table chunks-needle 2 --tasks needle --policies $chunks --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table bundled-whole 2 --tasks facts keyvalue fidelity --lengths 1920 --budgets 60 120 240 --seeds 31 \
    --policies lookahead fastkv:tsp_len=512 $all
  table continuing 2 --tasks fidelity --lengths 1920 --budgets 60 120 240 --seeds 31 --policies $fidelity
  table whole 10 --tasks facts keyvalue --budgets 64 128 256 --seeds 0 1 2 \
    --policies fastkv:tsp_len=256 $presets
}
if [ -n "$SMOLLM2" ] && [ -n "$TRAINING" ] && wanted gates; then
  python -m kvevict train --kind gates --model "$SMOLLM2" --dtype float32 --data "$TRAINING" --out "$GATES"
fi
[ -d "$ADAPTER" ] && learned=lookahead:adapter=$ADAPTER || learned=
[ -d "$GATES" ] && gate=gate:gates=$GATES || gate=
# shellcheck disable=SC2086
if [ -n "$SMOLLM2" ]; then
  real=(--model "$SMOLLM2" --haystack "$BOOKS" --seeds 31)
  long=(--model "$SMOLLM2" --haystack "$OTHERS" --dtype bfloat16 --seeds 31)
  other=(--model "$SMOLLM2" --haystack "$OTHERS" --dtype bfloat16 --seeds 0 --lengths 2000 --chunk-size 512)
  table smollm2-whole 4 "${real[@]}" --tasks ruler/niah_single_2 ruler/niah_multikey_1 fidelity \
    --lengths 2048 --budgets 64 128 256 --policies $learned fastkv:tsp_len=512 $all
  table smollm2-whole-4096 3 "${real[@]}" --tasks ruler/niah_single_{1,2} ruler/niah_multikey_1 fidelity \
    --lengths 4096 --budgets 128 256 512 --policies $learned fastkv:tsp_len=512 $all
  table smollm2-first-tokens 6 "${long[@]}" --tasks fidelity --lengths 1024 --budgets 64 \
    --policies take+edie $without {edie+tada,snapkv,random}{,:keep_first=4}
  table smollm2-4096 8 "${long[@]}" --tasks ruler/niah_single_{1,2} ruler/niah_multikey_1 --lengths 4096 \
    --chunk-size 512 --budgets 256 --policies take+edie{,:pool=max} take+chunkkv take $learned
  table smollm2-8000 2 "${long[@]}" --tasks ruler/niah_single_{1,2} --lengths 8000 --budgets 250 500 1000 \
    --policies take+edie take+chunkkv $learned laq oracle snapkv
  table smollm2-continuing 4 "${long[@]}" --tasks fidelity --lengths 2048 --budgets 64 128 256 \
    --policies $fidelity
  table smollm2-continuing-4096 3 "${long[@]}" --tasks fidelity --lengths 4096 --budgets 128 256 512 \
    --policies $fidelity
  table smollm2-numbers 44 "${other[@]}" --tasks ruler/niah_single_2 ruler/niah_multikey_1 --shares 1/16 \
    --policies take+edie
  table smollm2-ends 8 "${other[@]}" --tasks needle --shares 1/16 --depths 0 0.02 0.04 0.96 0.98 1 --policies take+edie
  table smollm2-several 5 "${other[@]}" --tasks many --shares 1/16 1/32 --policies take+edie{,:pool=max}
  table smollm2-several-whole 5 "${long[@]}" --seeds 0 --tasks many --lengths 2000 --shares 1/16 \
    --policies take+edie laq
  table smollm2-paraphrased 4 "${other[@]}" --tasks many/paraphrased --shares 1/16 --policies take+edie
  table smollm2-half 5 "${other[@]}" --tasks many --shares 1/16 \
    --policies take+edie take+edie/half{,:tsp=7,:tsp_len=64}
  many smollm2-many 0,512,1024 kvzip "${real[@]}" --seeds 0
  many smollm2-many 0 snapkv streaming "${real[@]}" --seeds 0
  many smollm2-many 512 'kvzip:carry="none"' kvzip:layers=uniform kvzip+ read-once compactor keydiff expected lagkv \
    $gate "${real[@]}" --seeds 0
  [ -z "$learned" ] || table smollm2-lookaheadkv 10 "${real[@]}" --protocol lookaheadkv --adapter "$ADAPTER" \
    --tasks ruler/niah_single_2 fidelity --lengths 1024 --budgets 64
  for protocol in chunkkv edie caote take; do
    table "smollm2-$protocol-384" 16 "${real[@]}" --protocol $protocol --tasks ruler/niah_single_2 --lengths 1024 \
      --budgets 384
  done
  table lookahead-smollm2 10 "${real[@]}" --seeds 5 --tasks facts ruler/niah_single_2 ruler/niah_multikey_1 fidelity \
    --lengths 1024 --budgets 64 128 --policies snapkv laq oracle $learned
  for t in "" 0.8; do
    table "smollm2-temperature${t:+-$t}" 8 "${real[@]}" --seeds 41 --lengths 1024 --budgets 64 \
      --tasks facts ruler/niah_single_2 ruler/niah_multikey_1 --policies snapkv laq $learned ${t:+--temperature $t}
  done
fi
# shellcheck disable=SC2086
if [ -n "$GEMMA3" ]; then
  real=(--model "$GEMMA3" --haystack "$BOOKS" --seeds 31)
  answers="ruler/niah_single_2 ruler/niah_multikey_1 fidelity"
  long=(--model "$GEMMA3" --haystack "$OTHERS" --dtype bfloat16 --seeds 31)
  table gemma3-continuing 3 "${long[@]}" --tasks fidelity --lengths 2048 --budgets 64 128 256 \
    --policies $fidelity
  table gemma3-continuing-4096 3 "${long[@]}" --tasks fidelity --lengths 4096 --budgets 128 256 512 \
    --policies $fidelity
  table gemma3-several 4 "${long[@]}" --tasks many --lengths 2000 --seeds 0 --shares 1/16 \
    --chunk-size 512 --policies take+edie
  many gemma3-many 0,512 kvzip "${real[@]}" --seeds 0
  table gemma3-whole 3 "${real[@]}" --tasks $answers --lengths 2048 --budgets 64 128 256 --policies $all
  table gemma3-4096 3 "${real[@]}" --tasks $answers --lengths 4096 --budgets 128 256 512 --policies $all
  table gemma3-2048 12 "${long[@]}" --tasks ruler/niah_single_2 ruler/niah_multikey_1 --lengths 2048 \
    --budgets 64 128 256 --chunk-size 512 --policies take+edie take+chunkkv take snapkv
  for protocol in chunkkv edie take caote; do
    table "gemma3-$protocol" 16 "${real[@]}" --protocol $protocol --tasks ruler/niah_single_2 --lengths 1024 \
      --budgets $([ $protocol = caote ] && echo 384 || echo 256)
  done
fi
