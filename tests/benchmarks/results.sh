#!/usr/bin/env bash
# Every table of docs/results.md that `kvevict eval` makes, again: results.sh OUT [CASES [TABLE...]]. OUT gets per table
# below a results file, its text and a line of how long it took; begun again it goes on where it was. CASES: of each
# task and length, with one seed, in place of each table's own number. TABLE: only these; two calls with other tables
# may run side by side. SMOLLM2, GEMMA3: folders of SmolLM2-135M-Instruct and Gemma 3 270M, ADAPTER: of lookahead rows
# for SmolLM2, BOOKS: text to hide things in; without a model its tables are left out. TINYSTORIES: folder of
# TinyStories-656K, STORIES: its stories. DRAFT: what train_draft.py made.
set -euo pipefail
out=$1 cases=${2:-}
shift $(($# > 2 ? 2 : $#))
only=" $* "
mkdir -p "$out"

table() { # NAME CASES ARGUMENTS of `kvevict eval`
  local name=$1 own=$2 start=$SECONDS
  shift 2
  [ "$only" = "  " ] || [[ $only == *" $name "* ]] || return 0
  echo "== $name"
  python -m kvevict eval --dtype float32 --mode aware --cases "${cases:-$own}" --out "$out/$name.jsonl" \
    "$@" ${cases:+--seeds 0} >"$out/$name.txt"
  echo "$name $((SECONDS - start)) s" >>"$out/seconds.txt"
}

chunks="take take:ema_space=literal take/no-probe take/no-delay take/chunk-only take+caote edie+tada/chunked edie"
chunks+=" snapkv h2o tova streaming knorm keydiff random oracle"
rows="take take/no-delay take+chunkkv take+caote snapkv:rows=probe edie:rows=probe edie+tada:rows=probe"
rows+=" edie-exact:rows=probe snapkv+caote:rows=probe,decode=false"
presets="oracle snapkv snapkv/kvcf snapkv/kvpress adakv adakv/edie adakv/kvpress pyramidkv cake laq laq/paper chunkkv"
presets+=" chunkkv+reuse chunkkv/kvpress edie edie-exact edie+tada chunkkv/edie paasvn vatp take"
presets+=" take/no-probe take+caote h2o h2o/kvcf tova streaming knorm keydiff keydiff/kvpress random"
learned=lookahead:adapter=${ADAPTER:-} pooled=edie:rows=probe,heads=equal,kernel=31
caotes="snapkv+caote snapkv+fastcaote h2o+caote h2o+fastcaote tova+caote tova+fastcaote"
all="$presets take+chunkkv take+edie $caotes take/no-delay take/chunk-only edie+tada/chunked"

numbers="ruler/niah_single_2 ruler/niah_multikey_1" answers="$numbers fidelity"
tasks="facts keyvalue multivalue tracking ruler/niah_single_1 ruler/niah_single_2 ruler/niah_single_3"
tasks+=" ruler/niah_multikey_1 ruler/niah_multikey_2 ruler/niah_multikey_3 ruler/niah_multivalue"
tasks+=" ruler/niah_multiquery ruler/vt ruler/cwe ruler/fwe longeval/lines"
own=$(realpath "$(dirname "$0")/../../kvevict/models/small_llama")

# shellcheck disable=SC2086  # lists of policies and tasks
every() { # NAME CASES OTHERS TASKS ARGUMENTS: in one pass (CASES) and in chunks (OTHERS), the question known, and not;
  # fidelity asks no question, so it is the same for both
  local name=$1 first=$2 others=$3 asked=$4
  shift 4
  table "$name-whole" "$first" --tasks $asked fidelity --share-reads "$@"
  table "$name-chunks" "$others" --tasks $asked fidelity --share-reads --chunk-size 512 "$@"
  table "$name-unknown" "$others" --tasks $asked --share-reads --mode agnostic "$@"
  table "$name-unknown-chunks" "$others" --tasks $asked --share-reads --mode agnostic --chunk-size 512 "$@"
}

many() { # NAME CHUNKS POLICY... ARGUMENTS: a text read once, many questions; more of NAME's runs go to its file
  local name=$1 chunks=$2
  shift 2
  table "$name" 8 --tasks many --lengths 2000 --mode agnostic --shares 1/8 1/4 1/2 --share-reads \
    --chunk-size ${chunks//,/ } --policies "$@"
}

places() { # NAME CASES TASK LENGTH ARGUMENTS: where the question stands; observed by the last rows, and by the question alone
  local name=$1 count=$2 task=$3 length=$4
  shift 4
  local some=(--tasks "$task" --lengths "$length" --chunk-size 512 --shares 1/16 "$@" --seeds 0)
  table "$name" "$count" "${some[@]}" --policies take+edie "take+edie:probe=(-128,0)"
  table "$name-known" "$count" "${some[@]}" --policies take+edie --observe asked
}

# shellcheck disable=SC2086
{
  places asked-numbers 128 asked/numbers 1900 ${BOOKS:+--haystack "$BOOKS"}
  table lookahead 12 --tasks needle facts keyvalue --lengths 512 1024 --budgets 64 128 256 \
    --policies snapkv take laq oracle lookahead
  table protocol-lookaheadkv 16 --protocol lookaheadkv --lengths 1024 --budgets 64 --share-reads \
    ${DRAFT:+--draft "$DRAFT"}
  for protocol in chunkkv take edie caote; do
    table "protocol-$protocol" 16 --protocol $protocol --lengths 1024 --budgets 64 --share-reads
  done
  table chunks 10 --tasks facts keyvalue --policies $chunks --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table chunks-needle 2 --tasks needle --policies $chunks --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table rows 10 --tasks facts keyvalue --policies $rows --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table rows-needle 2 --tasks needle --policies $rows --budgets 48 64 128 256 --chunk-size 128 --seeds 0 1 2
  table pools 10 --tasks facts keyvalue --budgets 64 128 --chunk-size 128 --seeds 0 1 \
    --policies take take+chunkkv take+edie $pooled edie:rows=probe,heads=equal,kernel=15 edie:rows=probe
  every bundled 2 2 "facts keyvalue" --lengths 1920 --budgets 60 120 240 --seeds 31 \
    --policies lookahead fastkv:tsp_len=512 $all \
    ${DRAFT:+"speckv:draft_model=$DRAFT" "speckv/paper:draft_model=$DRAFT"}
  table whole 10 --tasks facts keyvalue --budgets 64 128 256 --seeds 0 1 2 --share-reads \
    --policies lookahead fastkv:tsp_len=256 $presets $caotes {speckv,speckv/paper}:draft_model="$own"
  table known 10 --tasks facts --budgets 64 128 --chunk-size 0 128 --mode both --seeds 0 1 2 \
    --policies oracle take take/no-probe snapkv h2o
  table heatmap 4 --tasks needle --lengths 256 512 1024 2000 --budgets 128 --chunk-size 128 --seeds 7 \
    --policies take snapkv h2o
  for t in "" 0.2 0.8; do
    table "temperature${t:+-$t}" 16 --tasks facts keyvalue --lengths 1024 --budgets 64 --seeds 41 --share-reads \
      --policies snapkv ${DRAFT:+"speckv:draft_model=$DRAFT"} laq lookahead ${t:+--temperature $t}
  done
}
if [ -n "${SMOLLM2:-}" ]; then
  real=(--model "$SMOLLM2" --haystack "$BOOKS" --seeds 31)
  table smollm2-full 10 "${real[@]}" --tasks $tasks --lengths 2048 --policies full
  table smollm2-full-needle 4 "${real[@]}" --tasks needle --lengths 2048 --policies full
  table smollm2-full-4096 10 "${real[@]}" --tasks facts ruler/niah_single_{1,2,3} ruler/niah_multikey_1 \
    --lengths 4096 --policies full
  table smollm2-full-needle-4096 2 "${real[@]}" --tasks needle --lengths 4096 --policies full
  every smollm2 4 2 "$numbers" "${real[@]}" --lengths 2048 --budgets 64 128 256 \
    --policies "$learned" fastkv:tsp_len=512 $all $pooled
  table smollm2-chunks-five 3 "${real[@]}" --tasks $answers --lengths 2048 --budgets 64 128 256 --chunk-size 512 \
    --policies take+edie take+chunkkv take snapkv "$learned"
  table smollm2-unknown-more 6 "${real[@]}" --tasks $numbers --lengths 2048 --budgets 512 1024 --mode agnostic \
    --share-reads --policies take snapkv laq "$learned" chunkkv edie+tada h2o tova keydiff streaming random
  table smollm2-first-tokens 6 "${real[@]}" --tasks fidelity ruler/niah_single_2 --lengths 1024 --budgets 64 \
    --share-reads --policies take+edie $pooled {edie+tada,snapkv,random}{,:keep_first=4}
  table smollm2-whole-4096 3 "${real[@]}" --tasks ruler/niah_single_{1,2} ruler/niah_multikey_1 fidelity \
    --lengths 4096 --budgets 128 256 512 --share-reads --policies "$learned" fastkv:tsp_len=512 $all $pooled
  table smollm2-unknown-4096 1 "${real[@]}" --tasks $numbers --lengths 4096 --budgets 128 256 512 --share-reads \
    --mode agnostic --policies "$learned" fastkv:tsp_len=512 $all $pooled
  table smollm2-chunks-4096 1 "${real[@]}" --tasks $numbers --lengths 4096 --budgets 128 256 512 --share-reads \
    --chunk-size 512 --policies "$learned" fastkv:tsp_len=512 $all
  table smollm2-unknown-chunks-4096 1 "${real[@]}" --tasks ruler/niah_single_2 --lengths 4096 --share-reads \
    --budgets 128 256 512 --mode agnostic --chunk-size 512 --policies "$learned" fastkv:tsp_len=512 $all
  table smollm2-4096 8 "${real[@]}" --tasks ruler/niah_single_1 ruler/niah_single_2 ruler/niah_multikey_1 \
    --lengths 4096 --chunk-size 512 --budgets 256 --policies take+edie $pooled take+chunkkv take "$learned"
  table smollm2-fidelity-4096 8 "${real[@]}" --tasks fidelity --lengths 4096 --chunk-size 512 --budgets 256 \
    --policies take+edie $pooled take+chunkkv take snapkv streaming "$learned"
  table smollm2-8000 2 "${real[@]}" --tasks ruler/niah_single_{1,2} fidelity --lengths 8000 --budgets 250 500 1000 \
    --share-reads --policies take+edie take+chunkkv "$learned" laq oracle snapkv
  table smollm2-8000-chunks 2 "${real[@]}" --tasks ruler/niah_single_{1,2} fidelity --lengths 8000 --budgets 500 \
    --chunk-size 512 --policies take+edie take+chunkkv "$learned" snapkv take
  table smollm2-8000-chunks-more 1 "${real[@]}" --tasks ruler/niah_single_{1,2} --lengths 8000 --budgets 250 1000 \
    --share-reads --chunk-size 512 --policies take+edie "$learned" take+chunkkv snapkv
  table smollm2-8000-unknown 1 "${real[@]}" --tasks ruler/niah_single_{1,2} --lengths 8000 --budgets 1000 \
    --share-reads --mode agnostic --policies take+edie take+chunkkv "$learned" laq oracle
  places smollm2-asked 6 asked 2000 "${real[@]}"
  several=("${real[@]}" --tasks many --lengths 2000 --seeds 0 --share-reads)
  table smollm2-several 5 "${several[@]}" --shares 1/16 1/32 --chunk-size 512 --policies take+edie
  table smollm2-several-others 5 "${several[@]}" --shares 1/16 --chunk-size 512 --policies take+chunkkv snapkv
  chunks_of_2000=("${real[@]}" --mode aware --lengths 2000 --seeds 0 --shares 1/16 --chunk-size 512 --policies take+edie)
  table smollm2-paraphrased 4 "${chunks_of_2000[@]}" --tasks many/paraphrased --share-reads
  table smollm2-ends 8 "${chunks_of_2000[@]}" --tasks needle --depths 0 0.02 0.04 0.96 0.98 1
  table smollm2-several-whole 5 "${several[@]}" --shares 1/16 --policies take+edie laq
  table smollm2-half 5 "${several[@]}" --shares 1/16 --chunk-size 512 \
    --policies take+edie take+edie/half{,:tsp=7,:tsp_len=64}
  many smollm2-many 0,512 kvzip "${real[@]}" --seeds 0
  many smollm2-many 0 keydiff snapkv streaming knorm "${real[@]}" --seeds 0
  many smollm2-many 512 'kvzip:carry="none"' kvzip:{carry=max,support=all,layers=uniform} \
    kvzip:layers=uniform,heads=equal "kvzip:instruction=[198,198,48010,260,2672,2468,3869,30]" "${real[@]}" --seeds 0
  many smollm2-many 256,1024 kvzip "${real[@]}" --seeds 0
  many smollm2-many 512 read-once compactor kvzip+ kvzip:most=0.{5,25,125} "${real[@]}" --seeds 0
  for protocol in edie chunkkv lookaheadkv take caote; do
    table "smollm2-$protocol" 10 "${real[@]}" --protocol $protocol --tasks ruler/niah_single_2 fidelity --lengths 1024 \
      --budgets 64 --adapter "$ADAPTER" --share-reads
  done
  for protocol in chunkkv edie caote take; do
    table "smollm2-$protocol-384" 16 "${real[@]}" --protocol $protocol --tasks ruler/niah_single_2 --lengths 1024 \
      --budgets 384 --share-reads
  done
  table lookahead-smollm2 10 "${real[@]}" --seeds 5 --tasks facts ruler/niah_single_2 ruler/niah_multikey_1 fidelity \
    --lengths 1024 --budgets 64 128 --policies snapkv laq oracle "$learned"
  table lookahead-chunks 12 "${real[@]}" --seeds 3 --tasks ruler/niah_single_2 --lengths 2048 --chunk-size 512 \
    --budgets 128 --policies take+chunkkv "$learned"
  for t in "" 0.2 0.8; do
    table "smollm2-temperature${t:+-$t}" 8 "${real[@]}" --seeds 41 --lengths 1024 --budgets 64 --share-reads \
      --tasks facts ruler/niah_single_2 ruler/niah_multikey_1 --policies snapkv laq "$learned" ${t:+--temperature $t}
  done
fi
if [ -n "${GEMMA3:-}" ]; then
  real=(--model "$GEMMA3" --haystack "$BOOKS" --seeds 31)
  table gemma3-full 6 "${real[@]}" --tasks $tasks --lengths 2048 --policies full
  table gemma3-full-needle 2 "${real[@]}" --tasks needle --lengths 2048 --policies full
  table gemma3-several 4 "${real[@]}" --tasks many --lengths 2000 --seeds 0 --share-reads --shares 1/16 \
    --chunk-size 512 --policies take+edie
  many gemma3-many 0,512 kvzip "${real[@]}" --seeds 0
  many gemma3-many 0 keydiff snapkv streaming knorm "${real[@]}" --seeds 0
  every gemma3 3 2 "$numbers" "${real[@]}" --lengths 2048 --budgets 64 128 256 --policies $all
  table gemma3-chunks-five 3 "${real[@]}" --tasks $answers --lengths 2048 --budgets 64 128 256 --chunk-size 512 \
    --policies take+edie take+chunkkv take snapkv edie
  table gemma3-4096 3 "${real[@]}" --tasks $answers --lengths 4096 --budgets 128 256 512 --share-reads --policies $all
  table gemma3-unknown-4096 1 "${real[@]}" --tasks $numbers --lengths 4096 --budgets 128 256 512 --share-reads \
    --mode agnostic --policies $all
  table gemma3-chunks-4096 1 "${real[@]}" --tasks $numbers --lengths 4096 --budgets 128 256 512 --share-reads \
    --chunk-size 512 --policies $all
  table gemma3-unknown-chunks-4096 1 "${real[@]}" --tasks ruler/niah_single_2 --lengths 4096 --share-reads \
    --budgets 128 256 512 --mode agnostic --chunk-size 512 --policies $all
  table gemma3-8000 1 "${real[@]}" --tasks $answers --lengths 8000 --budgets 250 500 1000 --share-reads \
    --policies take+edie take+chunkkv laq oracle chunkkv/edie
  table gemma3-8000-chunks 1 "${real[@]}" --tasks $numbers --lengths 8000 --budgets 250 500 1000 --share-reads \
    --chunk-size 512 --policies take+edie take+chunkkv chunkkv/edie
  table gemma3-8000-unknown 1 "${real[@]}" --tasks $numbers --lengths 8000 --budgets 1000 --share-reads \
    --mode agnostic --policies take+edie take+chunkkv laq oracle chunkkv/edie
  for protocol in chunkkv edie take caote; do
    table "gemma3-$protocol" 16 "${real[@]}" --protocol $protocol --tasks ruler/niah_single_2 --lengths 1024 \
      --budgets $([ $protocol = caote ] && echo 384 || echo 256) --share-reads
  done
fi
if [ -n "${TINYSTORIES:-}" ]; then
  table stories 128 --model "$TINYSTORIES" --tasks perplexity/documents --haystack "$STORIES" --lengths 300 \
    --budgets 64 128 256 --share-reads --policies $presets $caotes
fi
