"""Runs commands, each in a fork of one process that has imported what they import: `python -m launch.NAME` without its start-up.

    python fork_server.py MODULE ...      # the modules to import first

Each line of standard input is a job, a JSON object: `module`, `arguments`, and the files `stdin`, `stdout`, `stderr`. Each line
of the answer is the exit code of one.
"""

import importlib
import json
import os
import runpy
import sys
import traceback


def run(job):
    """In the fork: become the command."""
    files = [(job["stdin"], os.O_RDONLY), (job["stdout"], os.O_WRONLY), (job["stderr"], os.O_WRONLY)]
    for descriptor, (path, mode) in enumerate(files):
        os.dup2(os.open(path, mode), descriptor)
    sys.argv = [job["module"], *job["arguments"]]
    code = 0
    try:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # Read without a buffer: a fork must not inherit half of the next job.
    while line := os.read(0, 1 << 16):
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
