# What follows is the same in every job: birl/launch/slurm.sh.
set -u
launch="$run/launch"
out="${launch//%/%%}" # % means something to --output
mkdir -p "$launch"
# The last job of an array has the array's own number: asking for that would be about all of them.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"

say() { echo "$(date +%FT%T) $*"; }
state() { echo "$job $*" >"$launch/state.part" && mv "$launch/state.part" "$launch/state"; }
lines() { if [ -f "$run/metrics.jsonl" ]; then wc -l <"$run/metrics.jsonl"; else echo 0; fi; }
# The address by which Slurm reaches a node: its name need not mean anything elsewhere.
address() { scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }
step() { squeue --noheader --steps --jobs="$job" --format='%i %j' | awk '$2 == "learner" { print $1 }'; }
save() { # tell the learner; false where it is not there yet
    local pid found
    # Rank 0 is on this node. A step's signal would reach its workers as well, which it still needs.
    if read -r pid <"$run/.lock" && grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "/proc/$pid/environ"; then
        kill -TERM "$pid"
    else
        found=$(step)
        if [ -z "$found" ]; then return 1; fi
        scancel --signal=TERM "$found"
    fi
    return 0 # 22.05's scancel fails for steps that it has signalled
} 2>/dev/null

hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export PYTHONUNBUFFERED=1
if [ "$ranks" -gt 1 ]; then
    MASTER_ADDR=$(address "${hosts[0]}")
    export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
    # This script runs where rank 0 will.
    MASTER_PORT=$("${learner[0]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    export MASTER_PORT
fi
if [ "${#engine_nodes[@]}" -gt 0 ]; then
    if [ -n "$own_cache" ]; then
        export BIRL_CACHE="$launch/cache"
        rm -rf "$BIRL_CACHE/servers" # engines of a start that a node took with it
    fi
    if [ "${#hosts[@]}" -gt 1 ]; then export BIRL_HOST="${BIRL_HOST:-0.0.0.0}"; fi
    # Both sides need the same one, and nobody else: it is in the environment alone, and is another after each start.
    export BIRL_TOKEN="${BIRL_TOKEN:-$("${learner[0]}" -c 'import secrets; print(secrets.token_hex(32))')}"
fi

asked="" told="" since=""
trap 'asked=limit' USR1
trap 'asked=stop' USR2
trap 'asked=cancelled told=yes' TERM # Slurm has told the steps, and a second TERM would keep the learner from saving

say "start ${SLURM_RESTART_COUNT:-0} of job $job on ${hosts[*]}"
state running
before=$(lines)
declare -A pids
# --export=ALL: what sbatch's --export left out would be left out again. --exact: a step leaves the rest to the others.
common=(--export=ALL --exact --input=none --open-mode=append)
srun "${common[@]}" --job-name=learner --kill-on-bad-exit=1 "${learner_step[@]}" \
    --nodelist="$(IFS=,; echo "${hosts[*]:0:$learner_nodes}")" --output="$out/learner-%t.log" \
    bash -c 'if [ "$0" -gt 1 ]; then
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$0 LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    fi; exec "$@"' \
    "$ranks" "${learner[@]}" &
pids[learner]=$!
for i in "${!engine_nodes[@]}"; do
    srun "${common[@]}" --job-name="engine-$i" "${engine_step[@]}" --nodelist="${hosts[${engine_nodes[$i]}]}" \
        --output="$out/engine-$i.log" "${engine[@]}" &
    pids[engine-$i]=$!
done

patience=600 # seconds that the learner may take to save
while kill -0 "${pids[learner]}" 2>/dev/null; do
    sleep 0.5 &
    wait $! # which a signal interrupts, not so sleep itself
    for name in "${!pids[@]}"; do
        if [ -z "$asked" ] && [ "$name" != learner ] && ! kill -0 "${pids[$name]}" 2>/dev/null; then asked="$name"; fi
    done
    [ -n "$asked" ] || continue
    if [ -z "$since" ]; then
        since=$SECONDS
        if [ "$asked" = limit ]; then patience=$((signal > 30 ? signal - 15 : signal / 2)); fi
    fi
    if [ -z "$told" ] && save; then
        told=yes
        say "$asked: the learner gets a signal to save and end"
    fi
    if [ $((SECONDS - since)) -gt "$patience" ]; then
        say "the learner has not ended within $patience s"
        scancel --signal=KILL "$(step)" || kill "${pids[learner]}"
        patience=$((patience + 600))
    fi
done
wait "${pids[learner]}"
code=$?
say "the learner ended with $code"

again() { # why; the engines end with the job
    state restarting "$1"
    say "requeued: $1"
    scontrol requeue "$job" && exit 0
    state failed "$1, and Slurm did not requeue the job"
    exit 1
}
if [ "$code" = 0 ] && [ -z "$told" ]; then # whatever else happened meanwhile
    state done
    exit 0
fi
case "$asked" in
stop | cancelled)
    state stopped
    exit "$code"
    ;;
limit)
    if [ -n "$requeue" ]; then again "time limit"; fi
    state stopped "time limit"
    exit "$code"
    ;;
esac

if [ -z "$asked" ] && [ "$ranks" = 1 ] && { [ "$code" = 130 ] || [ "$code" = 143 ]; }; then
    state stopped "a signal" # from outside; of several ranks it may come from srun, which ends all when one fails
    exit "$code"
fi

why="${asked:-learner} ended with $code"
if [ -n "$asked" ]; then
    wait "${pids[$asked]}"
    why="$asked ended with $?"
    code=1
fi
say "$why"
if [ "$(squeue --noheader --jobs="$job" --format=%T)" != RUNNING ]; then exit 1; fi # as for a lost node
if [ "$code" = 2 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && [ "$(lines)" = "$before" ]; then
    state failed "$why" # before its first step: a mistake in its words, which stays one
    exit 2
fi
read -r counted failures 2>/dev/null <"$launch/failures" || counted=""
if [ "$counted" != "$job" ]; then failures=0; fi
failures=$((failures + 1))
echo "$job $failures" >"$launch/failures"
if [ -n "$requeue" ] && [ "$failures" -le "$restarts" ]; then again "$why (failure $failures of $restarts)"; fi
state failed "$why"
exit 1
