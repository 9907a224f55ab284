#!/usr/bin/env bash
# debian_image.sh TAG PACKAGES...: make a Docker image from this machine's Debian mirror (no image registry is needed).
# The image carries its recipe's digest as a label; the same recipe is not built twice, and its tar is kept in .cache/images.
. "$(dirname "$0")/lib.sh"

tag=$1
shift
packages=$(printf '%s\n' "$@" | paste -sd, -)
STEP="image-${tag%%:*}"
python=$("$ROOT/setup/python.sh") || die "no Python 3.11-3.13" "run setup/packages.sh first"
read -r uri keyring suite < <("$python" "$ROOT/setup/apt_sources.py") ||
  die "no Debian mirror in this machine's apt sources" "add a deb entry for the release under /etc/apt/sources.list.d" 2
recipe=$(key layout-1 "$suite" "$packages") # raise the number when build() below changes what is in the image
tarball=$CACHE/images/${tag%%:*}-$recipe.tar

if [ "$(docker image inspect --format '{{index .Config.Labels "belayer.recipe"}}' "$tag" 2>/dev/null)" = "$recipe" ]; then
  say "$tag is there"
  exit 0
fi
need_root
mkdir -p "$CACHE/images"

build() {
  # Trims what no sandbox needs; the tar is written beside its target and renamed, so a broken one is never imported.
  debootstrap --variant=minbase --keyring="$keyring" --include="$packages" "$suite" "$work/root" "$uri"
  rm -rf "$work/root"/var/cache/apt/* "$work/root"/var/lib/apt/lists/* "$work/root"/var/log/*.log \
    "$work/root"/usr/share/{doc,man,info,locale}/*
  tar --numeric-owner -C "$work/root" --exclude=./dev/* --exclude=./proc/* --exclude=./sys/* -cf "$tarball.tmp" .
  mv "$tarball.tmp" "$tarball"
}
if [ ! -f "$tarball" ]; then
  # Not under /tmp: debootstrap needs device nodes, and /tmp is often mounted nodev.
  work=$(mktemp -d "$CACHE/images/build.XXXXXX")
  trap 'for m in proc sys dev; do umount -l "$work/root/$m" 2>/dev/null || true; done; rm -rf "$work"' EXIT
  long "debootstrap $suite with $packages" "see debootstrap/debootstrap.log in the message above; the mirror is $uri" build
fi
long "importing $tag" "docker import must accept $tarball; rm it and run make setup again" \
  docker import --change "LABEL belayer.recipe=$recipe" --change 'CMD ["/bin/bash"]' \
  --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$tarball" "$tag"
