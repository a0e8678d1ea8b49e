"""`minigpt-dist`, also as `python -m minigpt_dist`: find the command, run it, turn what it raises into a code.

Owns the top of the process: exit codes, signals, a closed pipe. Leaves everything else to `cli/`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

import minigpt_dist
from minigpt_dist.cli.commands import DEFAULT, PROGRAM, load, overview, parser_of
from minigpt_dist.cli.usage import EXIT_BROKEN, EXIT_OK, EXIT_USAGE, UsageError
from minigpt_dist.launch.errors import LaunchError

_BEGAN = time.perf_counter()


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line; its exit code. Raises UsageError and LaunchError."""
    words = list(arguments)
    if words[:1] in (["-h"], ["--help"]):
        print(overview())
        return EXIT_OK
    if words == ["--version"]:
        print(f"{PROGRAM} {minigpt_dist.__version__}")
        return EXIT_OK
    if not words or words[0].startswith("-"):
        words.insert(0, DEFAULT)
    command = load(words[0])
    args, unknown = parser_of(command).parse_known_args(words[1:])
    if unknown:
        wanted = f"one of the options that `{PROGRAM} {words[0]} --help` lists"
        raise UsageError(f"argument is {unknown[0]!r}, but should be {wanted}")
    args.command_line, args.began = words, _BEGAN
    return command.run(args)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script; its exit code. Only `COMMAND --help` leaves by SystemExit, as argparse does."""
    if arguments is None:  # this process is ours alone
        signal.signal(signal.SIGTERM, _leave)
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        return _say(str(error), EXIT_USAGE)
    except LaunchError as error:
        return _say(str(error), EXIT_BROKEN)
    except KeyboardInterrupt:
        return _say("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader has seen enough; what is still buffered must not fail again at exit
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _say(message: str, code: int) -> int:
    """Rank 0 speaks for all where a launcher has started many of this process."""
    if os.environ.get("RANK", "0") == "0" or code == EXIT_BROKEN:
        print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # not the default action: folders and ranks are put away on the way out


if __name__ == "__main__":
    sys.exit(main())
