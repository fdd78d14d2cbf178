#!/bin/sh
# deploy/kuberay/monitoring.sh | kubectl apply -f -
# Prints monitoring.yaml, the alerts as a rule of Prometheus' operator, and the dashboard for the
# Grafana of kube-prometheus-stack, which takes what has this label.
set -eu
here=$(dirname "$0")
assets=$here/../assets/observability

cat "$here/monitoring.yaml"
cat <<'RULES'
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: draftline
  labels: {release: prometheus}
spec:
RULES
sed 's/^/  /' "$assets/alerts.yaml"
cat <<'DASHBOARD'
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: draftline-dashboard
  labels: {grafana_dashboard: "1"}
data:
  draftline.json: |
DASHBOARD
sed 's/^/    /' "$assets/grafana-dashboard.json"
