"""The system calls that a sandbox may make, as a seccomp filter (BPF) for x86-64 and arm64.

The tables hold the numbers of the restricted calls on both machines; all other known calls are allowed.  Calls newer
than `_LAST_KNOWN` fail with ENOSYS, as on an older kernel.  Calls of another architecture or of x32 kill the process.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Machine: TypeAlias = Literal["x86_64", "aarch64"]
MACHINES: Final[Mapping[str, Machine]] = {"x86_64": "x86_64", "aarch64": "aarch64"}

_AUDIT: Final[Mapping[Machine, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32: Final = 0x40000000
_LAST_KNOWN: Final = 450

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_KILL: Final = 0x80000000

_LOAD, _AND, _RETURN, _IF_EQUAL, _IF_ABOVE, _IF_AT_LEAST, _IF_ANY_BIT = 0x20, 0x54, 0x06, 0x15, 0x25, 0x35, 0x45
_NUMBER, _ARCHITECTURE = 0, 4

_CLONE_THREAD: Final = 0x00010000
_CLONE_NEW: Final = 0x7E020000
_SET_OWNER: Final = (8, 15)
_SET_OWNER_OF_SOCKET: Final = (0x8901, 0x8902)
_SET_DEATH_SIGNAL: Final = (1,)

Instruction: TypeAlias = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant."""


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    rows = (row.split() for row in text.split(";"))
    return {name: (_number(intel), _number(arm)) for name, intel, arm in rows}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


_FOREIGN: Final = _table(
    # other processes, and the kernel's information about them
    "ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; process_madvise 440 440;"
    "process_mrelease 448 448; kcmp 312 272; pidfd_open 434 434; pidfd_getfd 438 438; pidfd_send_signal 424 424;"
    "migrate_pages 256 238; move_pages 279 239; setpriority 141 140; ioprio_set 251 30; sched_setaffinity 203 122;"
    "sched_setscheduler 144 119; sched_setparam 142 118; sched_setattr 314 274; perf_event_open 298 241;"
    # large subsystems of the kernel, with most of its past vulnerabilities
    "bpf 321 280; userfaultfd 323 282; keyctl 250 219; add_key 248 217; request_key 249 218; io_uring_setup 425 425;"
    "io_uring_enter 426 426; io_uring_register 427 427; fanotify_init 300 262; fanotify_mark 301 263;"
    "inotify_init 253 -; inotify_init1 294 26; inotify_add_watch 254 27; memfd_create 319 279; memfd_secret 447 447;"
    "personality 135 92; modify_ldt 154 -; iopl 172 -; ioperm 173 -; lookup_dcookie 212 18; vhangup 153 58;"
    # mounts and namespaces
    "mount 165 40; umount2 166 39; pivot_root 155 41; mount_setattr 442 442; move_mount 429 429; open_tree 428 428;"
    "fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick 433 433; chroot 161 51; setns 308 268; unshare 272 97;"
    "open_by_handle_at 304 265; name_to_handle_at 303 264; quotactl 179 60; quotactl_fd 443 443; swapon 167 224;"
    "swapoff 168 225; acct 163 89;"
    # the machine as a whole
    "init_module 175 105; finit_module 313 273; delete_module 176 106; kexec_load 246 104; kexec_file_load 320 294;"
    "reboot 169 142; syslog 103 116; settimeofday 164 170; clock_settime 227 112; clock_adjtime 305 266;"
    "adjtimex 159 171; sethostname 170 161; setdomainname 171 162; nfsservctl 180 42;"
    # shared memory and messages, found by number or name outside of all folders
    "shmget 29 194; shmat 30 196; shmctl 31 195; shmdt 67 197; semget 64 190; semop 65 193; semctl 66 191;"
    "semtimedop 220 192; msgget 68 186; msgsnd 69 189; msgrcv 70 188; msgctl 71 187; mq_open 240 180;"
    "mq_unlink 241 181; mq_timedsend 242 182; mq_timedreceive 243 183; mq_notify 244 184; mq_getsetattr 245 185;"
    # the network; `socketpair` is among the calls with conditions, below
    "socket 41 198; connect 42 203; bind 49 200; listen 50 201; accept 43 202; accept4 288 242;"
    # messages may hold descriptors, and so deleted files that are open in no process
    "sendmsg 46 211; sendmmsg 307 269"
)
_PROCESSES: Final = _table(
    "fork 57 -; vfork 58 -; execve 59 221; execveat 322 281; kill 62 129; tkill 200 130; tgkill 234 131;"
    "rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240;"
    # a lock on a file of the host can be seen by other sandboxes
    "flock 73 32"
)
_METADATA: Final = _table(
    "chmod 90 -; fchmod 91 52; fchmodat 268 53; chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54;"
    "setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7; removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16;"
    "utime 132 -; utimes 235 -; utimensat 280 88; futimesat 261 -"
)
_LOOKED_AT: Final = _table(
    "clone 56 220; clone3 435 435; prlimit64 302 261; socketpair 53 199; fcntl 72 25; ioctl 16 29; prctl 157 167;"
    "getpgid 121 155; getsid 124 156; getpriority 140 141; sched_getaffinity 204 123; sched_getscheduler 145 120;"
    "sched_getparam 143 121; sched_getattr 315 275; sched_rr_get_interval 148 127; get_robust_list 274 100;"
    "ioprio_get 252 31"
)
_REVEAL_PROCESSES: Final = {
    **dict.fromkeys(("getpgid", "getsid", "sched_getaffinity", "sched_getscheduler", "sched_getparam"), 0),
    **dict.fromkeys(("sched_getattr", "sched_rr_get_interval", "get_robust_list"), 0),
    **dict.fromkeys(("getpriority", "ioprio_get"), 1),
}
"""Calls that reveal whether a process exists, each with the place of the pid among its arguments; 0 is the caller."""


@dataclass(frozen=True)
class Permissions:
    """The optional rights of a sandbox.

    Landlock does not restrict changes of owners, modes and times of files.  So a sandbox that shares the host's files
    has a right to ``metadata`` only if its user owns no other files.
    """

    programs: bool
    """True if it may start programs and send signals."""
    metadata: bool
    """True if it may change owners, modes and times of files."""


def program(machine: Machine, permissions: Permissions) -> bytes:
    """Return the filter in the kernel's binary format."""
    refused = dict(_FOREIGN)
    if not permissions.programs:
        refused |= _PROCESSES
    if not permissions.metadata:
        refused |= _METADATA
    column = 0 if machine == "x86_64" else 1
    code = [*_entry(machine)]
    for name, block in _conditions(permissions).items():
        code += _case(_LOOKED_AT[name][column], block)
    for numbers in refused.values():
        code += _case(numbers[column], [_answer(errno.EPERM)])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _entry(machine: Machine) -> Iterable[Instruction]:
    """Yield the first checks: kill calls of other architectures, and refuse calls that are not known here."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _IF_EQUAL, 1, 0, _AUDIT[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _IF_AT_LEAST, 0, 1, _X32
    yield _RETURN, 0, 0, _KILL
    yield _IF_ABOVE, 0, 1, _LAST_KNOWN
    yield _answer(errno.ENOSYS)


def _case(number: int | None, block: list[Instruction]) -> list[Instruction]:
    """Return instructions that run ``block`` for the call of this number; none if the machine lacks the call.

    ``block`` must end in a return.  All other calls go on to the next case.
    """
    return [] if number is None else [(_IF_EQUAL, 0, len(block), number), *block]


def _conditions(permissions: Permissions) -> dict[str, list[Instruction]]:
    """Return a block for each call whose arguments decide if it is allowed."""
    if permissions.programs:
        own = {"clone": [_argument(0), (_IF_ANY_BIT, 0, 1, _CLONE_NEW), _answer(errno.EPERM), _answer(0)]}
    else:
        own = {
            "clone": [_argument(0), (_IF_ANY_BIT, 1, 0, _CLONE_THREAD), _answer(errno.EPERM), _answer(0)],
            # the owner of a descriptor gets signals for it, and could be any process of the same user
            "fcntl": _unless(1, _SET_OWNER),
            "ioctl": _unless(1, _SET_OWNER_OF_SOCKET),
            # PR_SET_PDEATHSIG: the process must keep dying with the server
            "prctl": _unless(0, _SET_DEATH_SIGNAL),
            **{name: _only_own(place) for name, place in _REVEAL_PROCESSES.items()},
        }
    return {
        **own,
        # a filter cannot read its arguments in memory; after ENOSYS the C library falls back to clone
        "clone3": [_answer(errno.ENOSYS)],
        "prlimit64": _only_own(0),
        # AF_UNIX and SOCK_STREAM only: event loops need such a pair, and it cannot be connected elsewhere
        "socketpair": [
            _argument(0),
            (_IF_EQUAL, 1, 0, 1),
            _answer(errno.EPERM),
            _argument(1),
            (_AND, 0, 0, 0xF),
            (_IF_EQUAL, 1, 0, 1),
            _answer(errno.EPERM),
            _answer(0),
        ],
    }


def _unless(index: int, values: Iterable[int]) -> list[Instruction]:
    """Return a block that allows a call unless its argument at ``index`` has one of these values."""
    refused = (step for value in values for step in ((_IF_EQUAL, 0, 1, value), _answer(errno.EPERM)))
    return [_argument(index), *refused, _answer(0)]


def _only_own(index: int) -> list[Instruction]:
    """Return a block that allows a call if its argument at ``index``, a pid, is 0: the caller itself."""
    return [_argument(index), (_IF_EQUAL, 1, 0, 0), _answer(errno.EPERM), _answer(0)]


def _argument(index: int) -> Instruction:
    """Return the instruction to load the lower half of an argument; both machines are little-endian."""
    return _LOAD, 0, 0, 16 + 8 * index


def _answer(number: int) -> Instruction:
    return _RETURN, 0, 0, _ERRNO | number if number else _ALLOW
