#!/usr/bin/env bash
# What takes hours, for a machine that is idle at night (`make nightly`; root): docs/testing.md.
#
# Every part runs, whatever has failed before it; the last lines say what passed, and the exit
# status is 1 if something did not. Each number can be lowered: KILLS=2 TIMES=1 make nightly.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${VENV:-.venv}/bin/python
KILLS=${KILLS:-20}          # workers killed one after the other in one job
CHANGES=${CHANGES:-1000}    # of the world, in one job
SCHEDULES=${SCHEDULES:-50}  # random histories that end in the same bits
TIMES=${TIMES:-5}           # each slowing, each fault
SEEDS=${SEEDS:-10000}       # simulated clusters
PROGRAMS=${PROGRAMS:-1000}  # of random Horovod calls
SCRIPTS=${SCRIPTS:-2000}    # random training scripts, with failures
DRIVERS=${DRIVERS:-200}      # killed one after the other in one job
MINUTES=${MINUTES:-60}      # on an overloaded machine with bad links
FAULTS=${FAULTS-}           # of hosts, for tests.cluster.trials; none: all of them

export ELASTIC_TEST_REQUIRE=all
status=0
summary=""

run() { # NAME COMMAND…
    local name=$1 verdict=passed began=$SECONDS
    shift
    echo "=== $name"
    "$@" || verdict=FAILED status=1
    summary+=$(printf '%-8s %5d s  %s' "$verdict" $((SECONDS - began)) "$name")$'\n'
}

run "the tests that \`make test\` leaves out" "$PYTHON" -m pytest -q -m night tests
run "worker, horovod and e2e tests with the newest torch" \
    make -s test-newest-torch VENV="${VENV:-.venv}"
run "$KILLS kills in a row, no step lost" \
    env E2E_KILLS="$KILLS" "$PYTHON" -m pytest -q -s --timeout 900 tests/e2e/test_failures.py \
    -k test_survivors_keep_their_process_and_the_world_grows_back_after_each_kill
run "$CHANGES changes of the world leave no memory, thread or descriptor behind" \
    env CHANGES="$CHANGES" "$PYTHON" -m pytest -q -s --timeout 1800 tests/worker/test_recovery.py \
    -k test_a_hundred_changes_of_the_world
run "$SCHEDULES random exact schedules" \
    env ELASTIC_SCHEDULES="$SCHEDULES" "$PYTHON" -m pytest -q tests/e2e/test_exact_random.py
run "a rank that is 2 or 3 times slower is named within 30 steps" \
    "$PYTHON" -m tests.e2e.slow_rank_trial --processor 2,3 --ranks 2,3,4 --times "$TIMES"
run "a host with a slow link is named within 30 steps" \
    "$PYTHON" -m tests.e2e.slow_rank_trial --rate 20mbit,50mbit --ranks 4 --times "$TIMES"
run "nobody is named while steps jitter" \
    "$PYTHON" -m tests.e2e.slow_rank_trial --calm $((TIMES * 60)) --ranks 3
run "a node check names the host with the slow processor, and nobody where none is slow" \
    "$PYTHON" -m tests.runtime.check_trial --processor 0.35,0.15,1 --times "$TIMES"
run "a node check names the host with the slow link" \
    "$PYTHON" -m tests.runtime.check_trial --link 100,300 --times "$TIMES"
# shellcheck disable=SC2086 - one word for each fault
run "every fault of a host" "$PYTHON" -m tests.cluster.trials $FAULTS --times "$TIMES"
run "a worker leaves a host with too few processors" \
    "$PYTHON" -m tests.cluster.starved_host --times "$TIMES"
run "$DRIVERS drivers killed, workers beside them, no step lost" \
    "$PYTHON" -m tests.e2e.driver_kills --drivers "$DRIVERS" --workers 3
run "$MINUTES minutes of load and bad links cost no host" \
    "$PYTHON" -m tests.cluster.rough_hour --minutes "$MINUTES"
for plan in hour hosts; do
    run "$MINUTES minutes of chaos: $plan" \
        "$PYTHON" -m benchmarks.chaos --plan "benchmarks/plans/$plan.yaml" --seconds $((MINUTES * 60))
done
run "$MINUTES minutes of hostile input for every parser" \
    "$PYTHON" -m tests.fuzz --minutes "$MINUTES"
# shellcheck disable=SC2046 - one word for each file
run "new examples for every property" "$PYTHON" -m pytest -q --hypothesis-profile default \
    $(grep -rl "^from hypothesis" tests --include="test_*.py")
run "$SCRIPTS random training scripts hold the same after any failure" \
    env ELASTIC_PROGRAMS="$SCRIPTS" "$PYTHON" -m pytest -q --hypothesis-profile default \
    --timeout 10800 tests/properties/test_state_programs.py
run "$PROGRAMS random programs of Horovod calls" \
    "$PYTHON" -m tests.horovod.seeds --seeds "$PROGRAMS"
run "$SEEDS simulated clusters" "$PYTHON" -m tests.sim --seeds "$SEEDS"
run "$SEEDS simulated clusters of several jobs" "$PYTHON" -m tests.brain.seeds --seeds "$SEEDS"
run "100 workloads of several jobs" "$PYTHON" -m tests.brain.workloads --workloads 100

printf '\n%s' "$summary"
exit $status
