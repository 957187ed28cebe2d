#!/bin/sh
# The tests of the kernels, and any others, on an emulated ARM processor: an interpreter and PyTorch for ARM, run by
# qemu-user, and kernels that a cross compiler makes. Needs Debian 12's python3.11 packages, qemu-user and
# gcc-aarch64-linux-gnu. One minute of setup in FOLDER, then about ten times as long as without emulation.
#
#     tests/kernels/on_arm.sh FOLDER [PYTEST ARGUMENTS ...]
set -eu
folder=$(realpath -m "$1"); shift
root=$(cd "$(dirname "$0")/../.." && pwd)
packages=$("$root/.venv/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
for program in qemu-aarch64 aarch64-linux-gnu-gcc; do
    command -v $program >/dev/null || { echo "install qemu-user and gcc-aarch64-linux-gnu: there is no $program" >&2; exit 2; }
done

if [ ! -e "$folder/done" ]; then
    mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial"
    : > "$folder/apt/status"
    cat > "$folder/apt.conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$folder/apt";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
END
    export APT_CONFIG="$folder/apt.conf"
    apt-get update -qq
    apt-get install -qq -y --download-only --no-install-recommends python3.11 libgomp1 libstdc++6
    for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
    # the newest PyTorch for ARM that is no CUDA build; what is pure Python comes from .venv, behind these
    "$root/.venv/bin/python" -m pip install -q --target "$folder/site" --no-deps --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
        torch==2.9.1 numpy==2.4.6 tokenizers safetensors regex PyYAML xxhash MarkupSafe psutil hypothesis \
        "pydantic_core==$("$root/.venv/bin/python" -c 'import pydantic_core; print(pydantic_core.__version__)')"
    printf '#!/bin/sh\nfor a in "$@"; do [ "$a" = -march=native ] && a=-march=armv8-a; set -- "$@" "$a"; shift; done\n' > "$folder/cc"
    echo 'exec aarch64-linux-gnu-gcc "$@"' >> "$folder/cc"
    chmod +x "$folder/cc"
    touch "$folder/done"
fi

cd "$root"
export CC="$folder/cc" BIRL_CACHE="$folder/kernels" PYTHONPATH="$root:$folder/site:$packages" OMP_NUM_THREADS=1
exec qemu-aarch64 -L "$folder/root" "$folder/root/usr/bin/python3.11" -m pytest -p no:cacheprovider "$@"
