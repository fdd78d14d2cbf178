#!/usr/bin/env bash
# scripts/setup.sh venv        make .venv and install draftline with its development tools in it
# scripts/setup.sh redis       install redis-server from the system's packages (the tests need it)
# scripts/setup.sh tools       make .venv-tools with what documents and audits the tree (extra: tools)
# scripts/setup.sh browser     install Chromium (tests of the page at /ui, skipped without it)
# scripts/setup.sh prometheus  install Prometheus (tests of what it scrapes, skipped without it)
# scripts/setup.sh compiler    install g++ (CPU kernels and their tests need it)
#
# Set PYTHON to choose the interpreter. Output of the tools goes to build/setup-*.log.
set -euo pipefail
cd "$(dirname "$0")/.."

LOG=build/setup-${1:-}.log
# Where the package index offers a build of this version for CPUs only, pip prefers it.
CPU_TORCH="torch==2.13.0"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
export DEBIAN_FRONTEND=noninteractive

fail() {
    printf 'draftline: %s\n' "$1" >&2
    exit 1
}

# phase TITLE COMMAND...: one line on the screen; the log only if the command fails.
phase() {
    local title=$1
    shift
    printf 'draftline: %s\n' "$title"
    printf '\n== %s\n' "$title" >>"$LOG"
    "$@" >>"$LOG" 2>&1 </dev/null && return
    tail -n 40 "$LOG" >&2
    fail "failed: $title (whole log: $LOG)"
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "needs Python 3.11 or newer; install it, or run: make PYTHON=/path/to/python"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo --preserve-env=DEBIAN_FRONTEND "$@"; fi
}

apt_install() {
    as_root apt-get update && as_root apt-get install --yes --no-install-recommends "$@"
}

need_apt() {
    command -v apt-get >/dev/null || fail "$1 is missing; install it with your package manager"
}

install_packages() {
    local python=.venv/bin/python extras=dev
    if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then
        extras=dev,gpu
    else
        "$python" -m pip install "$CPU_TORCH"
    fi
    "$python" -m pip install --editable ".[$extras]"
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        need_apt "Python's venv module"
        local version
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        phase "installing python$version-venv" apt_install "python$version-venv"
    fi
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        phase "creating .venv" "$python" -m venv --clear .venv
    fi
    phase "installing packages (first time: a few minutes)" install_packages
    touch .venv/.ready
}

# Apart from .venv, so that what is audited and listed is what runs.
make_tools() {
    local python
    python=$(find_python)
    "$python" -m venv --clear .venv-tools
    "$python" - <<'PYTHON' >build/tools.txt
import tomllib, pathlib
extras = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
print(*extras["optional-dependencies"]["tools"], sep="\n")
PYTHON
    .venv-tools/bin/pip install --requirement build/tools.txt
}

# A server's package starts a service; the tests start servers of their own, so leave none behind.
install_server() {
    apt_install "$1"
    if [ -d /run/systemd/system ]; then
        as_root systemctl disable --now "$1"
    else
        as_root service "$1" stop || true
    fi
}

mkdir -p build
: >"$LOG"
case ${1:-} in
venv) make_venv ;;
redis)
    need_apt redis-server
    phase "installing redis-server" install_server redis-server
    ;;
tools)
    if [ ! -e .venv-tools/.ready ] || [ pyproject.toml -nt .venv-tools/.ready ]; then
        phase "installing tools for documents and audits" make_tools
        touch .venv-tools/.ready
    fi
    ;;
browser)
    need_apt chromium
    phase "installing Chromium" apt_install chromium fonts-dejavu-core
    ;;
prometheus)
    need_apt prometheus
    phase "installing Prometheus" install_server prometheus
    ;;
compiler)
    need_apt g++
    phase "installing g++" apt_install g++
    ;;
*) fail "usage: scripts/setup.sh venv|redis|tools|browser|prometheus|compiler" ;;
esac
