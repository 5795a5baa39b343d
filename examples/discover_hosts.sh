#!/bin/sh
# Prints the hosts of the moment, one "host" or "host:slots" a line; elasticrun asks again and again.
# Here they stand in a file that you may edit while the job runs; in earnest, ask your scheduler,
# cloud or inventory.
#
#   echo localhost:2 > /tmp/hosts
#   HOSTS_FILE=/tmp/hosts elasticrun --host-discovery-script examples/discover_hosts.sh \
#       --min-np 1 examples/digits.py --epochs 50
#   echo localhost:3 > /tmp/hosts
exec cat "${HOSTS_FILE:-/tmp/hosts}"
