# Debian's unstable suite for a prefix of ours; the host's apt configuration is not changed: lists, cache and source file are private.
# Source it after lib.sh. sid_open WORK makes them below WORK and sets the array `private` of options for apt-get and apt-cache.
# shellcheck shell=bash
sid_open() {
  local python keyring
  python=$("$ROOT/setup/python.sh") || die "no Python 3.11-3.13" "run setup/packages.sh first"
  read -r SID_URI keyring _ < <("$python" "$ROOT/setup/apt_sources.py") ||
    die "no Debian mirror in this machine's apt sources" "add a deb entry for the release under /etc/apt/sources.list.d" 2
  mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
  printf 'Types: deb\nURIs: %s\nSuites: sid\nComponents: main\nSigned-By: %s\n' "$SID_URI" "$keyring" >"$1/sid.sources"
  private=(-o "Dir::Etc::sourcelist=$1/sid.sources" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null
    -o "Dir::State::lists=$1/lists" -o "Dir::Cache=$1/cache" -o APT::Sandbox::User=root
    -o Acquire::Languages=none)
}
