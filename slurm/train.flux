#!/bin/bash
# One rank for each GPU with Flux:  flux batch slurm/train.flux CONFIG [--set KEY=VALUE ...]
# Status 75: the run was stopped in good order before its last step. Hand it in again, and it goes on.
# hpctrain submit CONFIG --machine NAME writes such a script for a machine, with its modules and variables.
# flux: --job-name=train
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=3600s

# The run's folder. Say RUN=FOLDER where it has another name than the configuration.
run=${RUN:-runs/$(basename "$1" .toml)}

# The ranks.
(sleep 3480 && touch "$run"/stop) &
timer=$!
flux run --nodes=2 --ntasks=8 --cores-per-task=4 --gpus-per-task=1 hpctrain train "$@"
status=$?
kill "$timer"

exit "$status"
