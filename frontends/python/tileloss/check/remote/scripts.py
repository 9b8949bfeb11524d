"""What `tileloss remote` runs on the other machine: POSIX sh, git, and what every Linux has (coreutils, setsid, grep, sed, tar).

A script and its arguments travel on ssh's standard input (ssh.py): neither machine shows them in a list of processes.
Arguments are "$1", "$2", ... It fails by `fail TEXT` (the machine) or `refuse TEXT` (what was asked for).

Under the folder that --dir names:

repo.git            the commits that were sent, a reference each: the next bundle has what they lack
runs/ID/tree        the commit, checked out
runs/ID/log         what the command printed, stdout and stderr
runs/ID/pid         the leader: it runs the command and waits for it
runs/ID/status      the command's exit code, once it has ended
"""

from __future__ import annotations

FAILED, REFUSED = 93, 92

# Every process of a run has TILELOSS_REMOTE_RUN=ID in its environment. That tells it from a stranger with the same number after
# a restart, and finds those that left the run's process group.
COMMON = rf"""
fail() {{ echo "tileloss-remote: $1" >&2; exit {FAILED}; }}
refuse() {{ echo "tileloss-remote: $1" >&2; exit {REFUSED}; }}
tell_full_disk() {{
  full=$(echo x | cat 2>&1 >probe) || echo "tileloss-full: the disk there is full, the log may be cut: $full" >&2
}}
enter() {{ cd -- "$1/runs/$2" 2>/dev/null || fail "the run's folder $1/runs/$2 is gone"; }}
is_running() {{ [ -s pid ] && grep -qzxFs "TILELOSS_REMOTE_RUN=$1" "/proc/$(cat pid)/environ"; }}
processes() {{ grep -lzxFs "TILELOSS_REMOTE_RUN=$1" /proc/[0-9]*/environ | sed 's|/proc/\(.*\)/environ|\1|'; }}
"""

# DIR -> its absolute path, then the commits that are there
PREPARE = """
for tool in git setsid grep sed tar; do
  command -v "$tool" >/dev/null || fail "there is no $tool: it needs git, coreutils, setsid, grep, sed and tar"
done
cd || fail "there is no home folder"
error=$(mkdir -p -- "$1" 2>&1) && cd -- "$1" || fail "$error"
[ -d repo.git ] || error=$(git init --quiet --bare repo.git 2>&1) || fail "$error"
pwd -P
git --git-dir=repo.git for-each-ref --sort=-committerdate --count=20 --format='%(objectname)' refs/tileloss
"""

# DIR ID COMMIT, and the bundle behind the script
RECEIVE = """
cd -- "$1" || fail "$1 is gone"
bundle=$PWD/incoming-$2
trap 'rm -f -- "$bundle"' EXIT
error=$({ cat >"$bundle"; } 2>&1) || fail "the commit could not be stored: $error"
error=$(git --git-dir=repo.git -c gc.auto=0 fetch --quiet "$bundle" "refs/heads/run:refs/tileloss/$3" 2>&1) ||
  fail "the commit could not be stored: $error"
"""

# The leader: FOLDER NAMES COMMAND..., NAMES those of the secrets. A handler of TERM, unlike TERM ignored, is not inherited:
# `stop` ends the command, the leader lives to write its exit code. What it starts then has no secrets. No variables:
# the command might have them.
# On a disk that is full by then the exit code goes over the bytes that START has set aside.
LEADER = """
trap : TERM INT HUP
cd -- "$1/tree" || exit
echo "$$" >../pid || exit
(shift 2; exec "$@")
set -- "$1" "$2" "$?"
unset $2
if echo "$3" >"$1/status.new"; then
  mv -- "$1/status.new" "$1/status"
else
  echo "$3" 1<>"$1/reserve"
  mv -- "$1/reserve" "$1/status"
fi
"""

# DIR ID COMMIT LEADER NAMES COMMAND...; the function `secrets` exports them
START = """
cd -- "$1" || fail "$1 is gone"
run=$PWD/runs/$2 objects=$PWD/repo.git/objects
error=$(mkdir -p runs && mkdir -- "$run" 2>&1) || fail "$error"
trap '[ -s "$run/pid" ] || rm -rf -- "$run"' EXIT
error=$(echo "   " | cat 2>&1 >"$run/reserve") || fail "$error"
error=$(git init --quiet "$run/tree" 2>&1) || fail "$error"
error=$({ echo "$objects" >"$run/tree/.git/objects/info/alternates"; } 2>&1) || fail "$error"
cd -- "$run/tree" || fail "$run/tree is gone"
error=$(git -c advice.detachedHead=false checkout --quiet --detach "$3" 2>&1) ||
  fail "the commit could not be checked out: $error"
command -v -- "$6" >/dev/null || refuse "COMMAND: expected a program that is there or in the commit, got $6"
(
  export TILELOSS_REMOTE_RUN="$2"
  leader=$4
  shift 4
  set -- setsid sh -c "$leader" tileloss-run "$run" "$@"
  secrets
  exec "$@"
) </dev/null >>"$run/log" 2>&1 &
tries=0
until [ -s "$run/pid" ]; do
  tries=$((tries + 1))
  [ "$tries" -lt 100 ] || fail "the command did not start: $(cat -- "$run/log")"
  sleep 0.1
done
"""

# DIR ID OFFSET -> the log from there on, until the run has ended; then `tileloss-ended: CODE` on stderr.
# A connection that is gone closes standard input: nothing of this stays behind then. A log that is quiet is looked at once a
# second, as the run may be a bench.
FOLLOW = """
enter "$1" "$2"
exec 3<&0
{ cat <&3; kill -s TERM "$$"; } >/dev/null 2>&1 &
watcher=$!
trap 'kill "$watcher" 2>/dev/null' EXIT
offset=$3 quiet=0
while :; do
  ended=
  is_running "$2" || ended=yes
  size=$(wc -c <log)
  if [ "$size" -gt "$offset" ]; then
    tail -c "+$((offset + 1))" log | head -c "$((size - offset))" || exit
    offset=$size quiet=0
  fi
  [ -z "$ended" ] || break
  quiet=$((quiet + 1))
  if [ "$quiet" -lt 10 ]; then sleep 0.2; else sleep 1; fi
done
[ -s status ] || fail "the run is gone without an exit code: killed, or the machine was restarted"
tell_full_disk
echo "tileloss-ended: $(cat status)" >&2
"""

# DIR ID -> state, exit code or -, bytes of the log, seconds
STATUS = """
enter "$1" "$2"
state=lost code=- end=$(date +%s)
if is_running "$2"; then
  state=running
elif [ -s status ]; then
  state=ended code=$(cat status) end=$(stat -c %Y status)
fi
tell_full_disk
echo "$state" $code "$(wc -c <log)" "$((end - $(stat -c %Y pid)))"
"""

# DIR ID PATH... -> a tar archive of log, status, the result files that the run made, and the named paths of its tree
FETCH = """
enter "$1" "$2"
shift 2
for path in "$@"; do
  [ -e "tree/$path" ] || refuse "--path: expected a file or folder that the run has, got $path"
done
{
  printf '%s\\0' log
  [ ! -s status ] || printf '%s\\0' status
  git -C tree ls-files -z --others -- '*.jsonl' '*report*.html' | sed -z 's|^|tree/|'
  [ "$#" = 0 ] || printf 'tree/%s\\0' "$@"
} | tar --hard-dereference --null --files-from=- --create --file=-
[ "$?" -le 1 ] || fail "tar failed"
"""

# DIR ID GRACE -> as STATUS. TERM goes once to each process: to the leader's group, and to what has left it.
STOP = """
enter "$1" "$2"
run=$2 tries=$(($3 * 5)) killed=
group() { ! is_running "$run" || kill -s "$1" -- "-$(cat pid)" 2>/dev/null; }
outside() {
  for process in $(processes "$run"); do
    read -r line <"/proc/$process/stat" || continue
    set -- "$1" ${line##*) }
    [ "$4" = "$(cat pid)" ] || kill -s "$1" "$process"
  done 2>/dev/null
}
wait_for() {
  while [ "$1" -gt 0 ] && [ -n "$(processes "$run")" ]; do
    set -- $(($1 - 1))
    sleep 0.2
  done
}
outside TERM
group TERM
wait_for "$tries"
if [ -n "$(processes "$run")" ]; then
  ! is_running "$run" || killed=yes
  group KILL
  kill -s KILL $(processes "$run") 2>/dev/null
  wait_for 25
  [ -z "$(processes "$run")" ] || fail "these processes did not end: $(processes "$run" | tr '\\n' ' ')"
  [ -s status ] || [ -z "$killed" ] || echo 137 >status
fi
"""

# DIR ID; what is gone already is no error
REMOVE = """
[ -d "$1/runs/$2" ] || exit 0
enter "$1" "$2"
! is_running "$2" || refuse "ID: expected a run that has ended, $2 is running"
cd .. && error=$(rm -rf -- "$2" 2>&1) || fail "$error"
"""
