#!/bin/bash
# tiny: configs/tiny.toml on Reef. Written by hpctrain submit.
# By hand: flux batch runs/tiny/job-1.flux
# flux: --job-name=tiny
# flux: --cwd=/home/ada/project
# flux: --output=runs/tiny/job-{{id}}.out
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=3600s

# Where hpctrain and its Python are.
export PATH=/home/ada/project/.venv/bin:$PATH

# Puts this job back into the queue, unless runs/tiny/no-requeue says no.
again() {
    if [[ -e runs/tiny/no-requeue ]]; then
        echo runs/tiny/no-requeue: not handed in again >&2
    elif ! flux --parent batch runs/tiny/job-1.flux; then
        echo 'not put back into the queue; by hand: flux batch runs/tiny/job-1.flux' >&2
    fi
}

# The ranks.
(sleep 3300 && touch runs/tiny/stop) &
timer=$!
flux run --nodes=2 --ntasks=8 --cores-per-task=24 --gpus-per-task=1 \
    hpctrain train runs/tiny/job-1.toml
status=$?
kill "$timer"

# 75: the run stopped in good order before its last step, to be started again.
if [[ $status == 75 ]]; then
    again
fi
exit "$status"
