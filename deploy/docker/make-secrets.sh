#!/bin/sh
# Writes random secrets for compose.yaml where there are none yet; what is there stays.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets models
random() { openssl rand -hex 24; }
# secret NAME TEXT
secret() { [ -e "secrets/$1" ] || printf '%s\n' "$2" >"secrets/$1"; }
secret operator_key "$(random)"
secret gateway_key "sk-$(random)"
secret grafana_password "$(random)"
secret redis_password "$(random)"
password=$(cat secrets/redis_password)
secret drafter_token "$(random)"
secret redis.conf "$(printf '%s\n' "requirepass $password" 'appendonly yes' 'dir /data' \
    'maxmemory 1gb' 'maxmemory-policy noeviction')"
# Containers read them as users of their own; the folder is closed to everybody else.
chmod 644 secrets/*
printf 'secrets are in %s\n' "$PWD/secrets"
