#!/usr/bin/env bash
# Draws a Grafana dashboard as it was between two times, by Grafana's own components and a Prometheus that runs
# (PROMETHEUS, default http://127.0.0.1:9090). Needs npm, Chromium and pngquant; works in build/dashboard_picture.
#   scripts/dashboard_picture/draw.sh FROM TO OUT.png [DASHBOARD.json]     times in seconds since 1970
set -euo pipefail
from=$1 to=$2 out=$(realpath -m "$3")
root=$(cd "$(dirname "$0")/../.." && pwd)
DASHBOARD=$(realpath "${4:-$root/deploy/assets/observability/grafana-dashboard.json}")
export DASHBOARD PROMETHEUS=${PROMETHEUS:-http://127.0.0.1:9090}
work=$root/build/dashboard_picture
mkdir -p "$work" && cp "$root"/scripts/dashboard_picture/*.{js,jsx,json,html} "$work" && cd "$work"
npm install --no-audit --no-fund --loglevel=error
npm run --silent build
node node_modules/vite/bin/vite.js preview > preview.log & server=$!
trap 'kill $server' EXIT
until curl --silent --output /dev/null http://127.0.0.1:18556/; do sleep 0.2; done
chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
  --disable-component-update --disable-sync --user-data-dir="$work/chromium" --hide-scrollbars \
  --window-size=1400,4790 --virtual-time-budget=20000 --screenshot="$out" \
  "http://127.0.0.1:18556/?from=$from&to=$to"
pngquant --force --nofs --speed 1 --output "$out" 96 "$out"
