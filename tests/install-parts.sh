#!/usr/bin/env bash
# Install everything that tests can use, on Debian, as root: docs/testing.md.
#
#     tests/install-parts.sh
#
# sshd, iptables, ethtool and iproute2 (clusters of network namespaces), Open MPI, Slurm,
# Prometheus, etcd, PostgreSQL, login shells, a C compiler, Node.js; py-spy and mpi4py in the project's environment
# (.venv); TensorFlow in one of its own; axe-core. What is there already is left as it is, so a second run
# takes a second. No daemon is started: each test starts its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
PARTS=/opt/elastic-test-parts  # where tests/support/tensorflow.py looks
AXE="axe-playwright-python==0.1.8"  # brings axe-core 4.12.1 along, which is all we take of it
TENSORFLOW="tensorflow-cpu==2.21.0 tf-keras==2.21.0 scikit-learn>=1.3"

# A command that a test starts, and the Debian package that brings it.
COMMANDS="
sshd:openssh-server
ssh:openssh-client
ip:iproute2
iptables:iptables
ethtool:ethtool
nsenter:util-linux
mount:mount
pkill:procps
cc:gcc
make:make
mpirun:openmpi-bin
mpicc:libopenmpi-dev
slurmctld:slurmctld
slurmd:slurmd
srun:slurm-client
munged:munge
prometheus:prometheus
prometheus-node-exporter:prometheus-node-exporter
chromium:chromium
etcd:etcd-server
etcdctl:etcd-client
openssl:openssl
logrotate:logrotate
zsh:zsh
groff:groff-base
csh:tcsh
fish:fish
node:nodejs
"

# `python3 -m venv` needs Debian's package where python3 is Debian's.
missing_venv() {
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

missing_packages() {
    local pair
    for pair in $COMMANDS; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
    done
    missing_venv
    # Its server is on no PATH: /usr/lib/postgresql/VERSION/bin.
    ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || echo postgresql
    # gcc alone has no headers of the C library.
    [ -e /usr/include/stdio.h ] || echo libc6-dev
}

# Debian starts a daemon when its package is installed, unless this script forbids it.
forbid_daemons() {
    local policy=/usr/sbin/policy-rc.d
    [ ! -e $policy ] || return 0
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap "rm -f $policy" EXIT
}

install_packages() {
    local packages
    packages=$(missing_packages | sort -u)
    [ -n "$packages" ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "this needs root on Debian; still missing:" $packages >&2
        exit 1
    fi
    forbid_daemons
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet --quiet
    # shellcheck disable=SC2086 - one word for each package
    apt-get install --quiet --quiet --yes --no-install-recommends --no-upgrade $packages
}

install_into_our_environment() {
    make --no-print-directory VENV="$VENV" PYTHON="$PYTHON" environment
    "$VENV/bin/python" -c 'import mpi4py' 2>/dev/null && [ -x "$VENV/bin/py-spy" ] && return
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable '.[stacks,mpi]'
}

install_tensorflow() {
    local done=$PARTS/tensorflow/installed
    [ "$(cat "$done" 2>/dev/null)" != "$TENSORFLOW" ] || return 0
    mkdir -p $PARTS
    "$PYTHON" -m venv --clear $PARTS/tensorflow
    # shellcheck disable=SC2086 - one word for each package
    $PARTS/tensorflow/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-compile $TENSORFLOW
    echo "$TENSORFLOW" >"$done"
}

install_axe() {
    local done=$PARTS/axe/installed
    [ "$(cat "$done" 2>/dev/null)" != "$AXE" ] || return 0
    rm -rf $PARTS/axe
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target $PARTS/axe "$AXE"
    echo "$AXE" >"$done"
}

install_packages
install_into_our_environment
install_tensorflow
install_axe
