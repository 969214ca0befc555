#!/bin/bash
# run.sh DIR n1|n2 ARGS: CPython of what prepare.sh made in DIR, with these arguments, on an emulated Neoverse N1 or N2.
# Emulated programs that start others need the kernel to know the emulator. Where it does not, a namespace of their own tells it.
set -euo pipefail
root=$(realpath "$1/$2")
case $2 in
  n1) cpu=neoverse-n1 ;;
  n2) cpu=max,sve-max-vq=1,sme=off,pauth-impdef=on ;;  # emulators before 8.2 have no neoverse-n2
  *) echo "$2 is neither n1 nor n2" >&2; exit 2 ;;
esac
export QEMU_LD_PREFIX=$root QEMU_CPU=$cpu PYTHONPATH=$(realpath "$1/site") LD_LIBRARY_PATH=$(realpath "$1/absent") PYTHONSAFEPATH=1
shift 2
if "$root/usr/bin/python3" -V &> /dev/null; then
  exec "$root/usr/bin/python3" "$@"
fi
exec unshare --user --map-root-user --mount bash -c '
  mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
  header="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
  mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
  echo -n ":qemu-aarch64:M::$header:$mask:$(command -v qemu-aarch64-static):F" > /proc/sys/fs/binfmt_misc/register
  exec "$@"' _ "$root/usr/bin/python3" "$@"
