#!/usr/bin/env bash
# make model: spin checks model/onejob.pml, once for each fault, each pair of faults and
# each protection that is switched off, prints what came of it and compares it with
# model/expected.txt. It exits with 1 if anything differs, if a run is missing there that not
# DEEP=1 alone has, or if a protection that is switched off makes no difference; with 2 if it
# could not run.
#
#   QUICK=1        single faults and protections only
#   DEEP=1         up to 3 GB for each run instead of 200 or 600 MB, and "fences" for pairs, too (hours)
#   JOBS=2         how many run at the same time; default: one for each processor
#   ONLY=pattern   only the runs whose name matches this regular expression
#   TRACE=name     print the trace of this run, and nothing else is run
#   UPDATE=1       write model/expected.txt instead of comparing
#
# Traces and the output of spin are kept in bin/model. docs/decisions/model.md explains them.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."

. scripts/debian.sh
die() {
  say "$@"
  exit 2
}

if ! command -v spin >/dev/null; then
  can_install || die "there is no spin here, and this script cannot install it: install your distribution's package (spin on Debian and Ubuntu), or https://spinroot.com"
  install_packages spin || die "spin could not be installed"
fi
command -v gcc >/dev/null || die "there is no gcc, which compiles what spin makes"

model=$PWD/model/onejob.pml
expected=$PWD/model/expected.txt
# MB for the states of one run: of a pair of faults or of "live", and of anything else. A run that needs
# more is "bounded": up to there nothing was found.
pair_memory=200 memory=600
if [[ -n ${DEEP:-} ]]; then pair_memory=3000 memory=3000; fi
out=$PWD/bin/model
mkdir -p "$out"
work=$(mktemp -d /tmp/onejob-model.XXXXXX)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

# ---- What is run ----

# mask NAME is the value of a fault in the model.
mask() {
  local name
  name=F_$(tr a-z- A-Z_ <<<"$1")
  sed -nE "s/^#define $name +([0-9]+) .*/\1/p" "$model"
}

faults=(freeze suspend worker-kill kill guard-kill destroy unheard key-delete row-reset
  seq-back restore wipe failover split cut-consul cut-pg slow)
declare -A value=()
for f in "${faults[@]}"; do
  value[$f]=$(mask "$f")
  [[ -n ${value[$f]} ]] || die "model/onejob.pml does not define the fault $f"
done

jobs=$work/jobs   # name, faults, what is defined, separated by tabs
bases=$work/bases # name of a run without a protection, name of its baseline
run() { # NAME DEFINES FAULT...
  local name=$1 defines=$2 f sum=0
  shift 2
  for f in "$@"; do sum=$((sum + value[$f])); done
  printf '%s\t%s\t%s\n' "$name" "$sum" "$defines"
}
{
  for check in exclusion fences; do
    define=-DCHECK_${check^^}
    run "none $check" "$define"
    for f in "${faults[@]}"; do run "$f $check" "$define" "$f"; done
  done
  if [[ -z ${QUICK:-} ]]; then
    run "none live" -DLIVE
    run "none go-handler" "-DCHECK_EXCLUSION -DGO_HANDLER"
    run "none lock-command" "-DCHECK_EXCLUSION -DOUTSIDER"
    for f in "${faults[@]}"; do
      run "$f live" -DLIVE "$f"
      run "$f go-handler" "-DCHECK_EXCLUSION -DGO_HANDLER" "$f"
      run "$f lock-command" "-DCHECK_EXCLUSION -DOUTSIDER" "$f"
    done
    run "destroy lock-command-without-watch" "-DCHECK_EXCLUSION -DOUTSIDER -DHEARD_BY_RENEWAL" destroy
    for ((a = 0; a < ${#faults[@]}; a++)); do
      for ((b = a + 1; b < ${#faults[@]}; b++)); do
        for check in exclusion ${DEEP:+fences}; do
          if [[ $check == exclusion && (${faults[a]} == suspend || ${faults[b]} == suspend) ]]; then continue; fi # it takes no other fault
          run "${faults[a]}+${faults[b]} $check" "-DPAIR -DCHECK_${check^^}" "${faults[a]}" "${faults[b]}"
        done
      done
    done
  fi

  # One protection is switched off, and the faults are those that it is there for. With the
  # protection the same check must hold under the same faults, or the run shows nothing: that
  # is its baseline. A single fault has it already.
  off() { # PROTECTION[:VARIANT] CHECK DEFINES FAULT...
    local name=$1 check=$2 defines=$3 base define
    shift 3
    define=${name%%:*} base="$name base"
    run "$name off" "-D${define^^} $check${defines:+ $defines}" "$@"
    if [[ $check == -DCHECK_* && -z $defines && $# -le 1 ]]; then
      base=${check#-DCHECK_} base="${1:-none} ${base,,}"
    else
      run "$base" "$check${defines:+ $defines}" "$@"
    fi
    printf '%s\t%s\n' "$name off" "$base" >>"$bases"
  }
  x=-DCHECK_EXCLUSION y=-DCHECK_FENCES
  off no_margin $x "" freeze
  off no_lock_delay $x -DOUTSIDER destroy
  off late_kill $x "" freeze
  off from_answer $x -DNARROW slow freeze
  off early_takeover $x "" freeze
  off no_deadline $x "" cut-consul cut-pg
  off no_guard $x "" freeze
  off one_witness $x "" unheard
  off one_witness:takeover $y "" unheard
  off no_wait $x "-DSYNC -DNARROW" split unheard
  off silence_anywhere $x "" split
  off declare_early $x "" worker-kill
  off no_index $x "" key-delete
  off no_fence_compare $y "" cut-pg
  off no_session_compare $y -DONLY_OUTCOMES freeze seq-back
  off no_mark $y "" failover
  off no_record_check $y -DNARROW split
  off release_first $y ""
  off no_verify $y "" key-delete
  off no_takeover -DLIVE "" kill
} >"$jobs"

if [[ -n ${ONLY:-} ]]; then
  awk -F '\t' -v only="$ONLY" '
    NR == FNR { base[$1] = $2; next }
    { name[FNR] = $1; line[FNR] = $0; last = FNR }
    $1 ~ only { wanted[$1]; if ($1 in base) wanted[base[$1]] }
    END { for (i = 1; i <= last; i++) if (name[i] in wanted) print line[i] }' "$bases" "$jobs" >"$jobs.only"
  mv "$jobs.only" "$jobs"
  [[ -s $jobs ]] || die "no run's name matches $ONLY"
fi

# ---- One run ----

# place DEFINES is the folder of the program that has these.
place() { echo "$work/program/${1// /}"; }

# build DEFINES makes the program. The faults are not compiled in, so there are few programs.
# Those of switched-off protections run once, and shortly.
build() {
  local dir level=-O1 memory=$memory
  dir=$(place "$1")
  mkdir -p "$dir" && cd "$dir"
  cp "$model" onejob.pml
  if [[ $1 == -DNO_* || $1 == -D*_*\ -DCHECK_* ]]; then level=-O0; fi
  if [[ $1 == -DPAIR* || $1 == -DLIVE* ]]; then level=-O1 memory=$pair_memory; fi
  read -ra defines <<<"$1"
  # Breadth first: the first violation that is found is one with the fewest steps.
  if ! { spin -a "${defines[@]}" -DFAULTS_OF_ENVIRONMENT onejob.pml && gcc "$level" -w -DBFS -DSAFETY -DMEMLIM="$memory" -o pan pan.c; } >build.log 2>&1; then
    cat build.log >&2
    exit 255
  fi
}

# check NAME FAULTS DEFINES leaves its result in $work/results, and the trace in bin/model.
check() {
  local name=$1 mask=$2 file dir result states seconds steps=
  read -ra defines <<<"$3"
  file=${name// /.}
  dir=$work/$file
  mkdir "$dir" && cd "$dir"
  cp "$model" onejob.pml
  rm -f "$out/$file.trace"
  # The limit is processor time: a busy machine must not change a result.
  (ulimit -t 500 && FAULTS=$mask exec "$(place "$3")/pan" -E -w18) >"$out/$file.log" 2>&1 || true
  if grep -q 'reached -DMEMLIM bound' "$out/$file.log" && grep -q 'errors: 0$' "$out/$file.log"; then
    result=bounded
  elif ! grep -q '^State-vector.*errors: [01]$' "$out/$file.log" || grep -qE 'out of memory|too small|aborting|not a complete search' "$out/$file.log"; then
    result=unknown
  elif grep -q 'errors: 0$' "$out/$file.log"; then
    result=holds
  else
    {
      echo "# $name"
      echo "# seconds, replica (- is none), step; again: spin -a -DFAULTS=$mask ${defines[*]} model/onejob.pml"
      spin -T -B -t "-DFAULTS=$mask" "${defines[@]}" onejob.pml | awk '
        /^tick/ { ticks++ }
        /^[AB-]  / { printf "%5.1f  %s\n", ticks / 2, $0 }'
    } >"$out/$file.trace"
    steps=$(grep -c '^ ' "$out/$file.trace" || true)
    case $(grep -F === "$out/$file.trace") in
    *'two handlers'*) result=OVERLAP ;;
    *'under a fence'*) result=FENCE ;;
    *'not the holder'*) result=STALE ;;
    *'before the outcome is durable'*) result=EARLY ;;
    *'nobody notices'*) result=UNNOTICED ;;
    *'has not ended'*) result=STUCK ;;
    *'lease of its holder'*) result=ALIVE ;;
    *) result=unknown ;;
    esac
  fi
  states=$(sed -nE 's/^ *([0-9.e+]+) states, stored.*/\1/p' "$out/$file.log")
  seconds=$(sed -nE 's/^pan: elapsed time ([0-9.e+-]+) seconds/\1/p' "$out/$file.log")
  printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$result" "${states:--}" "${seconds:--}" "${steps:--}" >>"$work/results"
  cd "$work" && rm -rf "$dir"
}

if [[ -n ${TRACE:-} ]]; then
  line=$(awk -F '\t' -v name="$TRACE" '$1 == name' "$jobs")
  [[ -n $line ]] || die "there is no run named $TRACE"
  IFS=$'\t' read -r name mask defines <<<"$line"
  (build "$defines") || die "the model could not be compiled"
  check "$name" "$mask" "$defines"
  cat "$out/${TRACE// /.}.trace" 2>/dev/null || echo "$TRACE: $(cut -f 2 "$work/results")"
  exit
fi

export -f build check place
export model out work memory pair_memory
SECONDS=0
# each COMMAND: runs it for each line of its input, several at the same time.
each() { tr '\n' '\0' | xargs -0 -P "${JOBS:-$(nproc)}" -I{} bash -euo pipefail -c "IFS=\$'\\t'; read -r -a fields <<<\"\$1\"; unset IFS; $1 \"\${fields[@]}\"" - {}; }
cut -f 3 "$jobs" | sort -u | each build || die "the model could not be compiled"
each check <"$jobs"

# ---- What came of it ----

declare -A result=() steps=()
declare -i total=0
while IFS=$'\t' read -r name r states seconds n; do
  result[$name]=$r steps[$name]=$n
  total+=1
done <"$work/results"

cell() { # NAME: what the table says of a run
  local r=${result[$1]:-}
  case $r in
  '') echo '' ;;
  holds) echo . ;;
  bounded) echo o ;;
  *) echo "$r" ;;
  esac
}

table() {
  local f g
  printf '%-13s %-10s %-10s %-8s %-11s %s\n' "one fault" exclusion fences live go-handler lock-command
  for f in none "${faults[@]}"; do
    printf '%-13s %-10s %-10s %-8s %-11s %s\n' "$f" "$(cell "$f exclusion")" "$(cell "$f fences")" "$(cell "$f live")" "$(cell "$f go-handler")" "$(cell "$f lock-command")"
  done
  if [[ -z ${QUICK:-} ]]; then
    echo
    echo "pairs of faults: above the diagonal X is OVERLAP (exclusion); below it, with DEEP=1, F is FENCE, S is STALE (fences); . holds; o: none found before the memory was used up"
    printf '%-13s' ""
    for f in "${faults[@]}"; do printf ' %-4.4s' "$f"; done
    echo
    local -i a b
    local r
    for ((a = 0; a < ${#faults[@]}; a++)); do
      printf '%-13s' "${faults[a]}"
      for ((b = 0; b < ${#faults[@]}; b++)); do
        if ((a < b)); then r=${result[${faults[a]}+${faults[b]} exclusion]:-}; fi
        if ((a > b)); then r=${result[${faults[b]}+${faults[a]} fences]:-}; fi
        if ((a == b)); then r=-; fi
        if [[ (${faults[a]} == suspend || ${faults[b]} == suspend) && $a -lt $b ]]; then r=OVERLAP; fi
        case $r in
        holds) r=. ;;
        bounded) r=o ;;
        OVERLAP) r=X ;;
        unknown) r='?' ;;
        -) ;;
        *) r=${r:0:1} ;;
        esac
        printf ' %-4s' "$r"
      done
      echo
    done
    echo
    echo "violated by a pair, and by neither of its faults alone:"
    for ((a = 0; a < ${#faults[@]}; a++)); do
      for ((b = a + 1; b < ${#faults[@]}; b++)); do
        for check in exclusion fences; do
          f=${faults[a]} g=${faults[b]}
          r=${result[$f+$g $check]:-holds}
          if [[ $r != holds && $r != bounded && ${result[$f $check]:-} == holds && ${result[$g $check]:-} == holds ]]; then
            printf '  %-28s %-8s %s steps: bin/model/%s.trace\n' "$f + $g" "$r" "${steps[$f+$g $check]}" "$f+$g.$check"
          fi
        done
      done
    done
  fi
  echo
  printf '%-20s %-10s %s\n' "switched off" "violated" "with the protection"
  while IFS=$'\t' read -r name base; do
    if [[ -z ${result[$name]:-} ]]; then continue; fi
    printf '%-20s %-10s %-8s %s steps: bin/model/%s.trace\n' "${name% off}" "$(cell "$name")" "${result[$base]:-}" "${steps[$name]}" "${name// /.}"
  done <"$bases"
}
table
echo
echo "$total runs in $SECONDS s"

sort "$work/results" | cut -f 1,2 >"$work/got"
cp "$work/results" "$out/results.tsv"
if grep -P '\tunknown' "$work/got"; then die "spin could not finish these; see bin/model/*.log"; fi
if [[ -n ${UPDATE:-} ]]; then
  touch "$expected"
  { join -t $'\t' -v 1 "$expected" "$work/got"; cat "$work/got"; } | sort >"$work/new"
  mv "$work/new" "$expected"
  say "wrote model/expected.txt"
  exit
fi
sort "$expected" | join -t $'\t' - <(cut -f 1 "$work/got") >"$work/want"
join -t $'\t' -v 1 "$work/got" <(sort "$expected") >"$work/more"
if [[ -s $work/more ]]; then
  say "model/expected.txt does not say what is to come of these runs; UPDATE=1 adds them:"
  cat "$work/more" >&2
  if grep -qvP '\+\S+ fences\t' "$work/more"; then # of those no more than DEEP=1 has time for is expected
    say "it must have all but what DEEP=1 adds"
    exit 1
  fi
  join -t $'\t' "$work/got" <(cut -f 1 "$work/want") >"$work/known"
  mv "$work/known" "$work/got"
fi
if ! diff -u --label expected --label "now" "$work/want" "$work/got"; then
  say "these results are not those of model/expected.txt: either the protocol has changed, or the model is wrong." \
    "TRACE='name of the run' make model prints a trace; UPDATE=1 make model accepts the results"
  exit 1
fi
if grep -P ' off\t(holds|bounded)' "$work/got"; then
  say "a protection was switched off, and nothing was violated: the model does not see it"
  exit 1
fi
status=0
while IFS=$'\t' read -r name base; do
  case ${result[$name]:+${result[$base]:-}} in
  '' | holds) ;;
  bounded) say "$base: the search for a violation with the protection ended early, when the memory was used up" ;;
  *)
    say "$name shows nothing: with the protection the same is violated under the same faults ($base: ${result[$base]})"
    status=1
    ;;
  esac
done <"$bases"
exit $status
