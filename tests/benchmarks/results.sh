#!/usr/bin/env bash
# Every table of docs/results.md again: results.sh OUT [CASES]. OUT gets a results file and a text with its tables per
# line below; begun again it goes on where it was. CASES: of each task and length, in place of each table's own number.
# SMOLLM2: folder of SmolLM2-135M-Instruct, ADAPTER: of lookahead rows for it, BOOKS: text to hide things in; without
# SMOLLM2 the tables of that model are left out. TINYSTORIES: folder of TinyStories-656K, STORIES: its stories.
set -euo pipefail
out=$1 cases=${2:-}
mkdir -p "$out"

table() { # NAME CASES ARGUMENTS of `kvevict eval`
  local name=$1 own=$2
  shift 2
  echo "== $name"
  python -m kvevict eval --dtype float32 --mode aware --cases "${cases:-$own}" --out "$out/$name.jsonl" \
    "$@" >"$out/$name.txt"
}

chunks="take take:ema_space=literal take/no-probe take/no-delay take/chunk-only take+caote edie+tada/chunked edie"
chunks+=" snapkv h2o tova streaming knorm keydiff random oracle"
rows="take take/no-delay take+chunkkv take+caote snapkv:rows=probe edie:rows=probe edie+tada:rows=probe"
rows+=" edie-exact:rows=probe snapkv+caote:rows=probe,decode=false"
whole="oracle lookahead snapkv snapkv/kvcf snapkv/kvpress adakv adakv/edie adakv/kvpress pyramidkv cake"
whole+=" fastkv:tsp_len=256 laq laq/paper chunkkv chunkkv+reuse chunkkv/kvpress edie edie-exact edie+tada chunkkv/edie paasvn vatp take"
whole+=" take/no-probe take+caote h2o h2o/kvcf tova streaming knorm keydiff keydiff/kvpress random"

# shellcheck disable=SC2086  # lists of policies
{
  table lookahead 12 --tasks needle facts keyvalue --lengths 512 1024 --budgets 64 128 256 \
    --policies snapkv take laq oracle lookahead
  for protocol in lookaheadkv chunkkv take edie caote; do
    table "protocol-$protocol" 16 --protocol $protocol --lengths 1024 --budgets 64
  done
  table chunks 10 --tasks facts keyvalue --policies $chunks --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table chunks-needle 2 --tasks needle --policies $chunks --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table rows 10 --tasks facts keyvalue --policies $rows --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table rows-needle 2 --tasks needle --policies $rows --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table whole 10 --tasks facts keyvalue --policies $whole --budgets 64 128 256 --seeds 0 1 2
}
if [ -n "${SMOLLM2:-}" ]; then
  real=(--model "$SMOLLM2" --haystack "$BOOKS")
  table smollm2-4096 8 "${real[@]}" --tasks ruler/niah_single_1 ruler/niah_single_2 ruler/niah_multikey_1 \
    --lengths 4096 --chunk-size 512 --budgets 256 --seeds 31 \
    --policies take+edie take+chunkkv take "lookahead:adapter=$ADAPTER"
  table digits 5 "${real[@]}" --tasks ruler/niah_single_2 --lengths 2048 --chunk-size 512 --budgets 128 --seeds 3 \
    --policies take take+chunkkv take:kernel=31 edie:rows=probe edie:rows=probe,select=chunk,per_head=true
  table lookahead-smollm2 10 "${real[@]}" --tasks facts ruler/niah_single_2 ruler/niah_multikey_1 fidelity \
    --lengths 1024 --budgets 64 128 --seeds 5 --policies snapkv laq oracle "lookahead:adapter=$ADAPTER"
  table lookahead-chunks 12 "${real[@]}" --tasks ruler/niah_single_2 --lengths 2048 --chunk-size 512 --budgets 128 \
    --seeds 3 --policies take+chunkkv "lookahead:adapter=$ADAPTER"
fi
if [ -n "${TINYSTORIES:-}" ]; then
  table stories 128 --model "$TINYSTORIES" --tasks perplexity/documents --haystack "$STORIES" --lengths 300 \
    --budgets 64 128 256 --policies $(printf '%s\n' $whole | grep -v -e lookahead -e fastkv)
fi
