#!/bin/bash
# prepare.sh DIR [PYTHON]: what tests/aarch64/run.sh runs under emulation: the distribution's CPython for AArch64 (DIR/n1 and DIR/n2, the
# root folders of two machines), the packages of PYTHON's environment as wheels for it (DIR/site), and stand-ins for GPU
# libraries (DIR/absent). For Debian and what descends from it; needs no root. apt is asked for the host's own release: where its
# mirror has no arm64 (Ubuntu), APT_SOURCES names a list of sources that has. PIP_ARGS goes to pip.
set -euo pipefail
python=$(realpath -s "${2:-.venv/bin/python}")
checkout=$(realpath "$(dirname "$0")/../..")
rm -rf "$1"
mkdir -p "$1"/{apt/lists/partial,apt/cache/archives/partial,n2/usr/lib,site,absent}
cd "$1"

packages() {
  : > apt/status
  local options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Install-Recommends=0 -o Debug::NoLocking=1
    -o "Dir::State::Lists=$PWD/apt/lists" -o "Dir::State::status=$PWD/apt/status" -o "Dir::Cache=$PWD/apt/cache")
  [ -z "${APT_SOURCES:-}" ] || options+=(-o "Dir::Etc::SourceList=$APT_SOURCES" -o Dir::Etc::SourceParts=/dev/null)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" -y --download-only install python3 libgomp1 libstdc++6
  ln -s usr/lib n2/lib
  for package in apt/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink --exclude='./dev/*' -C n2
  done
}

# The versions that the tests on this machine run with. What has no wheel for AArch64 is named and left out.
wheels() {
  local version platforms name
  version=$(readlink n2/usr/bin/python3)
  version=${version#python}
  platforms=$(printf -- '--platform=manylinux_2_%d_aarch64 ' {17..35})
  "$python" -m pip list --exclude-editable --format=freeze | sed 's/+.*//' | grep -vE '^(nvidia|triton|pip=)' > wanted
  while read -r name; do
    # shellcheck disable=SC2086
    "$python" -m pip install -qq ${PIP_ARGS:-} $platforms --platform=manylinux2014_aarch64 --python-version="$version" --implementation=cp \
      --abi="cp${version/./}" --abi=abi3 --abi=none --only-binary=:all: --no-deps --target=site "$name" || echo "left out: $name"
  done < wanted
  ln -s "$checkout" site/sashiko
  cp -r "$("$python" -c 'from importlib.metadata import distribution as d; print(d("sashiko")._path)')" site/
}

labels() { sed 's/@.*//' | sort -u | sed 's/.*/.globl &\n.type &, %function\n&:/'; }

# A torch for GPUs loads their libraries where there is no GPU as well. Functions that answer 100, "no device", or a text will do.
stand_ins() {
  local each texts='Error(String|Name)(@|$)'
  find n2/usr/lib/aarch64-linux-gnu site/torch* -name '*.so*' > libraries
  mapfile -t each < <(grep ^site/torch/ libraries)
  aarch64-linux-gnu-readelf -d "${each[@]}" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | sort -u > needed
  xargs -n1 basename < libraries | sort -u | comm -23 needed - > absent.libraries
  [ -s absent.libraries ] || return 0
  aarch64-linux-gnu-nm -D -u "${each[@]}" | sed -n 's/^ *U //p' | sort -u > undefined
  mapfile -t each < libraries
  aarch64-linux-gnu-nm -D --defined-only "${each[@]}" 2> /dev/null | sed -n 's/^[0-9a-f]* [A-Za-z] \([^@]*\).*/\1/p' | sort -u > defined
  awk -F@ 'NR == FNR { defined[$1]; next } !($1 in defined)' defined undefined > absent.symbols
  sed -n 's/.*@\(.*\)/\1 { };/p' absent.symbols | sort -u > versions
  {
    echo .text
    grep -vE "$texts" absent.symbols | labels
    echo -e 'mov w0, #100\nret'
    { grep -E "$texts" absent.symbols || true; } | labels
    echo -e 'adr x0, 1f\nret\n1: .asciz "not there"'
  } > absent.s
  aarch64-linux-gnu-gcc -shared -nostdlib -Wl,--version-script=versions absent.s -o absent/all
  while read -r each; do ln -s all "absent/$each"; done < absent.libraries
}

# cpu DIR PART MIDR FLAGS: the files by which torch recognizes the processor.
cpu() {
  mkdir -p "$1/proc"
  for ((i = 0; i < $(nproc --all); i++)); do
    local folder="$1/sys/devices/system/cpu/cpu$i/regs/identification"
    mkdir -p "$folder"
    echo "$3" > "$folder/midr_el1"
    printf 'processor\t: %s\nFeatures\t: %s\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: %s\nCPU revision\t: 0\n\n' \
      "$i" "$4" "$2"
  done > "$1/proc/cpuinfo"
}

packages
wheels
stand_ins
cp -al n2 n1
n1="fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
cpu n1 0xd0c 0x413fd0c1 "$n1"
cpu n2 0xd49 0x410fd490 "$n1 jscvt fcma ilrcpc sha3 sha512 sve asimdfhm sve2 svei8mm svebf16 i8mm bf16"
for core in n1 n2; do
  printf '#!%s\nfrom sashiko.__main__ import main\nraise SystemExit(main())\n' "$PWD/$core/usr/bin/python3" > $core/usr/bin/sashiko
  chmod +x $core/usr/bin/sashiko
done
rm -rf apt wanted libraries needed undefined defined versions absent.*
