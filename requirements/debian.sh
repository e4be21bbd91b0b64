#!/bin/sh
# Makes a virtual environment where Debian's python3 stands alone: its pip and its headers are packages of their own
# (python3-venv, python3-dev). Both are fetched here without root, and unpacked into the environment.
set -eu
python=$1
environment=$2
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages="python3-pip-whl libpython$version-dev"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# shellcheck disable=SC2086
if ! (cd "$folder" && apt-get -qq download $packages) >"$folder/log" 2>&1; then
	cat "$folder/log" >&2
	echo "error: $python stands alone and $packages could not be fetched; install python3-venv and python3-dev" >&2
	exit 1
fi
for package in "$folder"/*.deb; do
	dpkg --extract "$package" "$folder/tree"
done
rm -rf "$environment"
"$python" -m venv --without-pip "$environment"
wheel=$(ls "$folder"/tree/usr/share/python-wheels/pip-*.whl)
PYTHONPATH=$wheel "$environment/bin/python" -m pip --disable-pip-version-check install --quiet --no-index "$wheel"
cp -R "$folder/tree/usr/include/." "$environment/include/"
