#!/bin/sh
# Build the image of both programs with what this machine has for it, and push it:
#   sh scripts/image.sh [REGISTRY]          REGISTRY such as registry.example.org or HOST:PORT/folder
# ARCH=arm64: for other machines than this one; the tag says so. BUILD_OPTIONS: for `build`, as they
# stand. CONTAINER_TOOL: podman, docker or buildah, where the first one that works is not wanted.
set -eu
cd "$(dirname "$0")/.."
registry=${1:-}

say() { printf 'image: %s\n' "$*"; }
die() { printf 'image: %s\n' "$1" >&2; exit "${2:-1}"; }

case $registry in
    *://* | */ | /* | *[!A-Za-z0-9.:/_-]*)
        die "$registry is no registry: give a host, such as REGISTRY=registry.example.org" 2 ;;
esac

# A docker without its daemon is of no use: ask the daemon.
works() {
    command -v "$1" >/dev/null 2>&1 && { [ "$1" != docker ] || docker info >/dev/null 2>&1; }
}
find_tool() {
    for tool in ${CONTAINER_TOOL:-podman docker buildah}; do
        if works "$tool"; then echo "$tool"; return; fi
    done
}
tool=$(find_tool)
[ -n "$tool" ] || die "nothing to build images with is here: install podman, buildah, or docker with its daemon running"

case $(uname -m) in
    aarch64) own=arm64 ;;
    *) own=amd64 ;;
esac
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ -z "${ARCH:-}" ] || [ "$ARCH" = "$own" ] || suffix=-$ARCH
tag=$version${suffix:-}
name=${registry:-localhost}/hostprep:$tag

say "building $name with $tool"
# shellcheck disable=SC2086 # several options
"$tool" build -f Containerfile --build-arg "ARCH=${ARCH:-$own}" --build-arg "VERSION=$version" \
    ${BUILD_OPTIONS:-} -t "$name" .
if [ -z "$registry" ]; then
    say "built $name; no node can pull it from there: REGISTRY=registry.example.org pushes it"
    exit
fi
# On loopback there is no certificate to check; docker knows that by itself.
insecure=
case $tool/$registry in
    docker/*) ;;
    */127.* | */localhost | */localhost:* | */localhost/*) insecure=--tls-verify=false ;;
esac
"$tool" push $insecure "$name" ||
    die "$name was built and not pushed: log in with $tool login ${registry%%/*}, then run this again"
say "pushed $name. With it:"
printf '  helm install hostprep charts/hostprep --namespace hostprep-system --create-namespace'
printf ' --set image.registry=%s%s\n' "$registry" "${suffix:+ --set image.tag=$tag}"
