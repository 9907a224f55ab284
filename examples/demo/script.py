"""What the four trajectories do. The model writes the thoughts; the actions are this script, since a model of 135M
parameters cannot write code. Observations are the same in every run, so that two runs can be compared byte for byte."""

from __future__ import annotations

from typing import Any

TASKS = (
    "Count the words of a poem.",
    "Write a program that squares numbers.",
    "Keep a counter running in the background.",
    "Tidy up a directory tree.",
)

# Each line is one action; together they leave files, deletions, shell state and a background process behind.
_COMMON_START = 'mkdir -p /root/job && cd /root/job && X=41 && printf "%s\\n" alpha beta gamma > words && wc -w words'
_COMMON_END = 'X=$((X+1)); echo "X=$X cwd=$PWD"; ls; sha256sum * | sort'

ACTIONS: tuple[tuple[str, ...], ...] = (
    (
        _COMMON_START,
        'for w in $(cat words); do echo "$w ${#w}"; done | tee lengths',
        "sleep 1.5; sort -r lengths > reversed && rm words && echo sorted",
        _COMMON_END,
    ),
    (
        _COMMON_START,
        'printf "print([n * n for n in range(10)])\\n" > squares.py && python3 squares.py',
        "sleep 1.5; python3 squares.py > out && rm /etc/issue && cat out",
        _COMMON_END + "; ls /etc/issue 2>&1",
    ),
    (
        _COMMON_START,
        '(i=0; while :; do i=$((i+1)); echo $i > /root/count; sleep 0.05; done) & echo "started $(jobs | wc -l)"',
        # Waited for: on a loaded machine the counter is slow, and what is seen must be the same each time.
        "sleep 1.5; cp words /root/job/copy; "
        'until [ "$(cat /root/count)" -gt 5 ] 2>/dev/null; do sleep 0.1; done; echo "counter moves: yes"',
        'a=0; until a=$(cat /root/count); [ -n "$a" ]; do :; done; '
        'until [ "$(cat /root/count)" -gt "$a" ] 2>/dev/null; do sleep 0.1; done; echo "still counting"; '
        + _COMMON_END,
    ),
    (
        _COMMON_START,
        "mkdir -p a/b/c && ln words a/hard && ln -s ../words a/soft && chmod 750 a && find . | sort",
        "sleep 1.5; mv a/b a/d && rm -rf a/d/c && mkfifo a/pipe && stat -c '%A %n' a a/* | sort",
        "rm a/pipe a/soft; mv a/hard hard; rm -rf a; " + _COMMON_END,
    ),
)


def opening(trajectory: int) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You are a careful agent in a Linux sandbox. Think in a few short sentences."},
        {"role": "user", "content": TASKS[trajectory]},
    ]


# Content of the sandbox at the end: every file below /root and /etc with mode, owner, type, size and digest. The
# counter's own file moves all the time and is looked at by the script itself.
MANIFEST = (
    "cd / && find root etc -xdev ! -path root/count ! -path etc/hosts ! -path etc/hostname ! -path etc/resolv.conf "
    "! -path etc/mtab -printf '%y %m %U:%G %s %p %l\\n' | sort; "
    "find root etc -xdev -type f ! -path root/count ! -path etc/hosts ! -path etc/hostname ! -path etc/resolv.conf "
    "-exec sha256sum {} + | sort"
)
