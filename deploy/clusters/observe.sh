#!/usr/bin/env bash
# Starts Prometheus and Grafana on the head of a cluster that `ray up` made, on its loopback:
#
#     ray exec deploy/clusters/aws.yaml 'bash ~/observe.sh [KEY_FILE]'
#     ray attach deploy/clusters/aws.yaml --port-forward 3000    # http://127.0.0.1:3000
#
# Run it again after each start of Ray, whose files of Grafana belong to one session.
#
# KEY_FILE is a file of the head with the operator's key, which a server with keys asks for. Ray's
# own files say where its nodes are, and bring dashboards; its `ray metrics launch-prometheus`
# would listen for everybody, and scrape Ray alone.
set -euo pipefail

# As in deploy/docker/compose.yaml.
PROMETHEUS=3.5.0
GRAFANA=12.1.0
settings=$HOME/observability
ray=/tmp/ray/session_latest/metrics/grafana
# On a volume that outlives the container.
programs=$HOME/.cache/draftline-observe
case $(uname -m) in
x86_64) machine=amd64 ;;
*) machine=arm64 ;;
esac

# fetch NAME URL: unpack an archive, unless it was before.
fetch() {
    [ -d "$programs/$1" ] && return
    mkdir -p "$programs/$1.new"
    python3 -c 'import shutil, sys, urllib.request as u; shutil.copyfileobj(u.urlopen(sys.argv[1]), sys.stdout.buffer)' \
        "$2" | tar --extract --gzip --strip-components=1 --directory="$programs/$1.new"
    mv "$programs/$1.new" "$programs/$1"
}

# start NAME PROGRAM OPTIONS...: in the background, in place of one that was started before.
start() {
    local name=$1 before
    shift
    before=$(cat "$programs/$name.pid" 2>/dev/null || true)
    if [ -n "$before" ] && [ "$(readlink "/proc/$before/exe")" = "$(readlink -f "$1")" ]; then
        kill "$before"
        tail --pid="$before" --follow /dev/null
    fi
    nohup "$@" >"$programs/$name.log" 2>&1 </dev/null &
    echo $! >"$programs/$name.pid"
}

fetch prometheus "https://github.com/prometheus/prometheus/releases/download/v$PROMETHEUS/prometheus-$PROMETHEUS.linux-$machine.tar.gz"
fetch grafana "https://dl.grafana.com/oss/release/grafana-$GRAFANA.linux-$machine.tar.gz"

# A later run without KEY_FILE keeps the key.
[ -f "$settings/draftline-key" ] || install -m 600 /dev/null "$settings/draftline-key"
if [ $# -gt 0 ]; then head -n 1 "$1" >"$settings/draftline-key"; fi
start prometheus "$programs/prometheus/prometheus" --config.file="$settings/prometheus.yaml" \
    --storage.tsdb.path="$programs/samples" --web.listen-address=127.0.0.1:9090

if [ ! -d "$ray/dashboards" ]; then
    echo "no $ray/dashboards: start Ray with its dashboard, then run this again" >&2
    exit 1
fi
cp "$settings/grafana-dashboard.json" "$ray/dashboards/draftline.json"
export GF_SERVER_HTTP_ADDR=127.0.0.1 GF_PATHS_DATA=$programs/grafana-data GF_PATHS_LOGS=$programs/grafana-data
# It listens on the loopback address: anyone with SSH access may look.
export GF_AUTH_DISABLE_LOGIN_FORM=true GF_ANALYTICS_REPORTING_ENABLED=false
start grafana "$programs/grafana/bin/grafana" server --homepath="$programs/grafana" --config="$ray/grafana.ini"
