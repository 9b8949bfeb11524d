#!/bin/sh
# Runs a commit of this checkout on a machine that ssh reaches; its log follows here, its files come back (docs/users/remote.md).
#
#   remote/run.sh HOST [-n] [-c COMMIT] [-s NAME]... [-p PATH]... [-o DIR] [-d DIR] [-- COMMAND...]     ./dev test, if no other
#   remote/run.sh HOST -f ID follows a run again, -k ID ends its processes: TERM, after 8 seconds KILL
#
#   -c COMMIT  HEAD                              -p PATH  comes back, of what the run made, besides *.jsonl and *report*.html
#   -s NAME    a variable that COMMAND gets      -o DIR   files come to DIR/ID; build/remote
#   -n         print the ID, follow nothing      -d DIR   the folder there; tileloss-remote
# Exit codes: the run's; 2 a wrong argument or a tree with changes; 3 no connection, or a run without an exit code.
# The script sends itself; its functions run there. $1 is -d's DIR, with repo.git and runs/ID: tree, log, pid, status. $2 is ID.

start() { # commit $3, COMMAND $4...; until the log is open. Blanks keep status a place on a disk that fills up.
  cd -- "$1" && mkdir -p runs && mkdir "runs/$2" || exit 3
  git --git-dir=repo.git worktree add --quiet --detach "runs/$2/tree" "$3" && cd "./runs/$2" && echo "   " >status || exit 3
  (secrets && export TILELOSS_REMOTE_RUN="$2" && shift 3 && exec setsid sh -c '
    trap : TERM INT HUP
    echo "$$" >pid && exec </dev/null >log 2>&1 || exit
    (cd ./tree && exec "$@")
    echo "$?" 1<>status' sh "$@") &
}

follow() { # the log from byte $3 on, until there is an exit code, or no sshd above this
  cd -- "$1/runs/$2" && exec 3<log && tail -c "+$3" <&3 || exit 3
  while read -r code <status && [ -z "$code" ] && grep -qzxFs "TILELOSS_REMOTE_RUN=$2" "/proc/$(cat pid)/environ"; do
    [ -d "/proc/$PPID" ] && sleep 0.5 && cat <&3 || exit 3
  done
  read -r code <status && cat <&3
  echo >probe || say "the disk there is full: the log may be cut"
  [ "$code" ] || { say "the run is gone without an exit code: killed, or the machine was restarted" && exit 3; }
}

stop() { # what has the ID in its environment, in whatever session
  cd -- "$1/runs/$2" || exit 3
  for signal in TERM 0 0 0 0 0 0 0 KILL KILL; do
    marked=$(grep -lzxFs "TILELOSS_REMOTE_RUN=$2" /proc/[0-9]*/environ | cut -d/ -f3 | grep .) || exit 0
    kill -"$signal" $marked 2>/dev/null
    sleep 1
  done && exit 3
}

fetch() { # a tar archive: log, what the run made of paths $3..., and last, as the sign that all is there, status
  cd -- "$1/runs/$2" && shift 2 || exit 3
  { printf 'log\0' && git -C tree ls-files -z --others -- "$@" | sed -z 's|^|tree/|' && printf 'status\0'; } |
    tar --create --null --files-from=- --file=-
}

say() { printf 'remote/run.sh: %s\n' "$1" >&2; }
quote() { printf '%s\n' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"; }

there() { # FUNCTION WORD...: all by standard input, which no list of processes shows; half of it calls no function
  words=
  for word; do words="$words $(quote "$word")"; done
  { printf 'secrets() { :%s\n}\nset -- %s\n' "$exports" "$words" && cat -- "$0"; } | $ssh -- "$host" 'exec sh'
}

[ "$0" != sh ] || { "$@" && exit; } || exit
case ${1-} in '' | -* | *[[:space:]/:]*) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;; esac
unset exports value # which the environment may have: what is put into them would be in it
ssh="ssh -T -a -x -oBatchMode=yes -oConnectTimeout=15 -oServerAliveInterval=15 -oClearAllForwardings=yes -oControlMaster=no"
host=$1 action=start commit=HEAD dir=tileloss-remote output=build/remote paths=
hidden="WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN" && shift # from ssh and git here, as what -s names
while getopts nc:d:f:k:o:p:s: flag; do
  case $flag in
    c) commit=$OPTARG ;;
    d) dir=$OPTARG ;;
    f) action=follow id=$OPTARG ;;
    k) action=stop id=$OPTARG ;;
    n) action=detach ;;
    o) output=$OPTARG ;;
    p) paths="$paths $(quote "$OPTARG")" ;;
    s) value=$(printenv -- "$OPTARG") || { say "-s: expected the name of a variable that is set here" && exit 2; }
       exports="$exports; export $OPTARG=$(quote "$value")" hidden="$hidden $OPTARG" ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1)) && [ $# -gt 0 ] || set -- ./dev test
unset value $hidden && unset $(git rev-parse --local-env-vars)
[ "$action" != stop ] || { there stop "$dir" "$id" && exit; } || exit 3
if [ "$action" != follow ]; then
  changes=$(git status --porcelain -uall) && sha=$(git rev-parse --quiet --verify --end-of-options "$commit^{commit}") ||
    { say "-c: expected a commit of the checkout here, got $commit" && exit 2; }
  [ -z "$changes" ] || { say "a commit is sent; commit, stash or ignore first: $changes" && exit 2; }
  receive="git init --quiet --bare $(quote "$dir/repo.git") && git -c receive.shallowUpdate=true receive-pack"
  GIT_SSH_COMMAND=$ssh git push --quiet --no-verify --recurse-submodules=no --receive-pack="$receive" \
    "$host:$dir/repo.git" "$sha:refs/tileloss/$sha" || exit 3
  id=$(date -u +%Y%m%d-%H%M%S)-$$ && say "$sha on $host: remote/run.sh $host -f $id"
  there start "$dir" "$id" "$sha" "$@" || exit 3
  [ "$action" = start ] || { echo "$id" && exit; }
fi
exports= folder=$output/$id && mkdir -p -- "$folder" && rm -f -- "$folder/status" && : >>"$folder/log" || exit 3
for delay in $(seq 30) $(yes 30 | head -n 105); do # an hour
  code=$({ { there follow "$dir" "$id" $(($(wc -c <"$folder/log") + 1)); echo "$?" >&3; } | tee -a -- "$folder/log" >&4; } 3>&1)
  [ "$code" = 255 ] && say "no connection; again in $delay s" && sleep "$delay" || break
done 4>&1
[ "$code" = 0 ] || exit 3
eval "there fetch \"\$dir\" \"\$id\" '*.jsonl' '*report*.html' $paths" |
  tar --extract --no-same-owner --no-same-permissions --directory="$folder" --file=-
find "$folder" ! -type d ! -type f -delete # links and devices: the machine may be anyone's
read -r code <"$folder/status" && say "exit code $code; files in $folder" && exit "$code" || exit 3
